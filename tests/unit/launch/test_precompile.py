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


def settle(kind: str, *overrides: str) -> Settled:
    return load(kind, None, list(overrides)).settled.settle_on(RunMachine("cpu"), None)


def make_session(folder: Path) -> Any:
    session: Any = Session.__new__(Session)
    session.events = EventLog(folder / "events.jsonl")
    session.startup = {}
    session.start_time = 0.0
    session.lost = ""
    session.interrupts = SimpleNamespace(is_requested=False)
    return session


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
    assert precompiles(settle(kind, *overrides)) is expected


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
    settled: Any = settle("sft", "sft.batch_size=16", *overrides)
    assert warm_up_passes(settled, longest=40) == expected


@pytest.mark.parametrize(("kl_coef", "expected_roles"), [(0.0, ()), (0.1, ("reference",))])
def test_each_rank_goes_through_a_full_pack_of_two_lengths(
    kl_coef: float, expected_roles: tuple[str, ...], tmp_path: Path
) -> None:
    sizes = ("trainer.compile=true", "trainer.num_ranks=3", "trainer.micro_batch_tokens=600", "model.max_length=50")
    counts: list[int] = []
    lengths: list[int] = []
    roles_of_passes: list[tuple[str, ...]] = []

    def warm_up(count: int, length: int, loss: object, roles: tuple[str, ...], valuing: list[str]) -> None:
        assert not valuing
        counts.append(count)
        lengths.append(length)
        roles_of_passes.append(roles)

    trainer: Any = SimpleNamespace(warm_up=warm_up)
    session = make_session(tmp_path)
    precompile(session, settle("grpo", *sizes, "data.max_prompt_length=8", f"grpo.loss.kl_coef={kl_coef}"), trainer)
    assert len(counts) == 2
    first_length, second_length = lengths
    assert counts[0] * first_length <= 3 * 600 < (counts[0] + 3) * first_length
    assert 2 <= second_length < first_length <= 50
    assert roles_of_passes == [expected_roles, expected_roles]
    session.end_start()
    assert set(list(read_records(tmp_path / "events.jsonl"))[-1]["parts"]) == {"warm-up"}
