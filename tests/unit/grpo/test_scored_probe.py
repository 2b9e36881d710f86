"""The probe's rows of decoded, scored and trained log-probs: the pairs that differ name the work that is wrong."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlctl.dashboard.event_text import describe
from rlctl.generation.engine import Engine
from rlctl.grpo.scored_probe import compare_rows, find_refusal
from rlctl.training.micro_batching import TrainingSample
from rlctl.workers.errors import Failure, WorkerError

TOKENS = np.arange(6, dtype=np.int32)
MASK = np.array([False, False, True, True, False, True])


@pytest.mark.parametrize(
    ("odd", "work"),
    [
        ("decoded", "the engine's decoding steps compute otherwise"),
        ("scored", "the engine's passes over given tokens compute otherwise"),
        ("trained", "the engine agrees with itself, so that one side loads or computes the weights differently"),
    ],
)
def test_the_row_at_odds_with_both_others_is_named(odd: str, work: str) -> None:
    rows = {name: [np.full(6, -1.0, np.float32)] for name in ("decoded", "scored", "trained")}
    rows[odd][0][3] = -2.0
    # Tokens that were not sampled have no log-prob to compare.
    rows[odd][0][4] = np.nan
    gaps = compare_rows([TrainingSample(TOKENS, MASK, {})], **rows)
    text = gaps.explain(1.001)
    agreeing = " and ".join(name for name in rows if name != odd)
    assert f"{agreeing} agree (1.000000): {work}" in text
    # One of three tokens differs by 1 nat.
    assert text.count(f"differ ({(np.e + 2) / 3:.6f})") == 2


def test_three_rows_that_agree_name_none() -> None:
    same = [np.full(6, -1.0, np.float32)]
    text = compare_rows([TrainingSample(TOKENS, MASK, {})], same, same, same).explain(1.001)
    assert "differ" not in text and text.endswith("scored and trained agree (1.000000)")


class SilentEngine(Engine):
    """Engine of a user that scores nothing."""


def test_an_engine_that_cannot_score_or_answer_gives_the_reason() -> None:
    def refusal(call: Any) -> str:
        parts: Any = SimpleNamespace(pool=SimpleNamespace(call=call))
        return find_refusal(parts)

    def fail(method: Any) -> list[str]:
        raise WorkerError("open_scores", [Failure("engine-0", "AttributeError", "no attribute open_scores", "")])

    assert refusal(lambda method: ["", method(SilentEngine())]) == "SilentEngine scores no tokens"
    assert refusal(lambda method: ["", ""]) == ""
    assert "no attribute open_scores" in refusal(fail)


def test_the_event_has_the_error_of_scored_tokens_or_the_reason_why_there_are_none() -> None:
    agreed = "probe: trainer and generator agree, token_mult_prob_error 1.000001 over 60 tokens"
    event = {"kind": "probe", "token_mult_prob_error": 1.000001, "tokens": 60}
    assert describe(event)[0] == agreed
    assert describe({**event, "scored": 1.000002})[0] == f"{agreed}, 1.000002 as scored"
    assert describe({**event, "unscored": "Mine scores no tokens"})[0] == f"{agreed}; not scored: Mine scores no tokens"
