"""A compiled trainer compiles on full packs before step 1, once."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.launch.assemble_sft import warm_up_passes
from rlctl.launch.precompile import precompile, precompiles
from rlctl.launch.session import Session
from rlctl.preflight.load import load
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.settled import Settled
from rlctl.telemetry.events import EventLog
from rlctl.telemetry.jsonl import read_records


def settled(kind: str, *overrides: str) -> Settled:
    return load(kind, None, list(overrides)).settled.settle_on(RunMachine("cpu"), None)


def session_in(folder: Path) -> Any:
    one: Any = Session.__new__(Session)
    one.events, one.startup, one.start_time, one.lost = EventLog(folder / "events.jsonl"), {}, 0.0, ""
    one.interrupts = SimpleNamespace(is_requested=False)
    return one


@pytest.mark.parametrize(
    ("kind", "overrides", "expected"),
    [
        ("grpo", [], False),
        ("grpo", ["trainer.compile=true"], True),
        ("sft", ["trainer.compile=true"], True),
        ("sft", ["trainer.compile=true", "ray_compiled_graph.enabled=true"], False),
    ],
)
def test_only_a_compiled_trainer_warms_up_and_none_twice(kind: str, overrides: list[str], expected: bool) -> None:
    assert precompiles(settled(kind, *overrides)) is expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], [(16, 40)]),
        (["ray_compiled_graph.warmup_gbs=3"], [(3, 40)]),
        (["ray_compiled_graph.warmup_seq_len=20"], [(16, 20)]),
        (["trainer.compile=true"], [(16, 40), (16, 19)]),
    ],
)
def test_a_graph_warms_up_on_a_batch_of_the_longest_sample_unless_keys_name_sizes(
    overrides: list[str], expected: list[tuple[int, int]]
) -> None:
    run: Any = settled("sft", "sft.batch_size=16", *overrides)
    assert warm_up_passes(run, longest=40) == expected


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_each_rank_goes_through_a_full_pack_of_two_lengths(kl: float, tmp_path: Path) -> None:
    sizes = ("trainer.compile=true", "trainer.num_ranks=3", "trainer.micro_batch_tokens=600", "model.max_length=50")
    seen: list[tuple[int, int, dict[str, str]]] = []
    trainer: Any = SimpleNamespace(warm_up=lambda count, length, loss, columns: seen.append((count, length, columns)))
    session = session_in(tmp_path)
    precompile(session, settled("grpo", *sizes, "data.max_prompt_length=8", f"grpo.loss.kl_coef={kl}"), trainer)
    [(count, length, _), (_, second, _)] = seen
    assert count * length <= 3 * 600 < (count + 3) * length
    assert 2 <= second < length <= 50
    assert [columns for _, _, columns in seen] == [{"reference_log_prob": "reference"} if kl else {}] * 2
    session.end_start()
    assert set(list(read_records(tmp_path / "events.jsonl"))[-1]["parts"]) == {"warm-up"}
