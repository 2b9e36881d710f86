"""`rlctl bench grpo --advise`: the youngest samples among equal rates; a rate beyond every split is told."""

import random
from pathlib import Path
from typing import Any

import pytest

from rlctl.bench.advice import AdviceBench, AdviceResults, setups
from rlctl.bench.grpo import GrpoBench
from rlctl.bench.rates import fit_costs
from rlctl.bench.simulation import Costs, Setup, SimulatedRow
from rlctl.generation.simulated_engine import DecodeCost
from tests.unit.cli.test_bench import shown

COLOCATED = Setup(2, 2, colocated=True)


def row(setup: Setup, effective: float, generation: float = 1000.0) -> SimulatedRow:
    tokens = {"trained": 10_000.0, "generated": 8_000.0}
    return SimulatedRow(setup, 10_000 / effective / 2, effective, generation, 0.4, 0.0, 1.23, 60.0, **tokens)


def results(*rows: SimulatedRow, training: float = 2500.0, cap: int = 64) -> AdviceResults:
    costs = Costs(training, DecodeCost(0.003, 0.00002))
    return AdviceResults("qwen3-1.7b", 2, "", (600.0, 1.0, cap), costs, sorted(rows, key=lambda row: -row.effective))


def flying(bound: int, effective: float, prefetch: str = "auto") -> SimulatedRow:
    return row(Setup(1, 1, bound=bound, prefetch="full" if prefetch == "full" else "auto"), effective)


def test_the_smallest_bound_and_lookahead_within_two_percent_of_the_best_is_advised() -> None:
    rows = [row(COLOCATED, 300.0), flying(1, 500.0), flying(2, 590.0, "full"), flying(2, 589.0), flying(4, 600.0)]
    found = results(*rows)
    assert found.advised is rows[3]
    text = "\n".join(line.rstrip() for line in shown(found, 400).splitlines())
    assert (
        "advice: trainer.num_ranks=1 generation.num_engines=1 async.enabled=true async.max_trajectory_age_steps=2 "
        "async.prefetch=auto (71% of the ceiling, 1.96 x colocated; 1 + 1, bound 4, auto is 1.9% faster, on older "
        "samples)"
    ) in text
    assert found.as_json()["advice"] == rows[3].setup.overrides
    # A run whose devices take turns has the youngest samples of all.
    assert results(*rows, row(COLOCATED, 595.0)).advised.setup.colocated


def test_what_no_split_of_whole_devices_reaches_is_said_with_what_each_side_needs() -> None:
    # Training takes 4 device-seconds a step and generation 8: a device each reaches 12 / 2 / 8 of the ceiling.
    found = results(row(COLOCATED, 300.0), flying(1, 600.0))
    assert found.ceiling == pytest.approx(10_000 / 12)
    assert "2 devices apart reach at most 75% of the ceiling: at 1 + 1 the trainer needs 0.50 of the time of the " in (
        " ".join(shown(found, 400).split())
    )
    even = results(row(COLOCATED, 300.0), flying(1, 600.0), training=1250.0)
    assert "at most" not in shown(even, 400).replace("at most 64", "")


def test_a_step_that_the_longest_answer_makes_long_is_explained() -> None:
    found = results(row(COLOCATED, 300.0), flying(1, 600.0), cap=4096)
    assert "the longest answer (4,096 tokens) takes 17.2 s, so a step takes at least 8.6 s at bound 1" in (
        " ".join(shown(found, 400).split())
    )


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_fits_the_terminal(width: int) -> None:
    lines = shown(results(row(COLOCATED, 12_345.0), flying(4, 23_456.0)), width).splitlines()
    assert max(map(len, lines)) <= width
    assert [line for line in lines if line.startswith("colocated ")]


def test_every_split_is_tried_with_every_bound_and_lookahead_that_differ() -> None:
    every = list(setups(4))
    assert len(every) == len(set(every)) == 1 + 3 * 8
    assert {(each.trainers, each.engines) for each in every if not each.colocated} == {(1, 3), (2, 2), (3, 1)}
    assert {each.devices for each in every} == {4}


def bench(gpus: int) -> AdviceBench:
    work = GrpoBench("tiny", 1, 1, 1, 2, 4, 1, 2, (8.0, 0.5, 16), ["colocated"], [])
    return AdviceBench(work, gpus, Costs(2500.0, DecodeCost(0.003, 0.00002)))


@pytest.mark.parametrize("finished", [1, 3])
def test_ctrl_c_shows_the_setups_that_were_simulated(
    finished: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[Setup] = []

    def until_pressed(config: Any, setup: Setup, *others: Any) -> SimulatedRow:
        if len(made) == finished:
            raise KeyboardInterrupt
        made.append(setup)
        return row(setup, 100.0 * len(made))

    monkeypatch.setattr("rlctl.bench.advice.simulate", until_pressed)
    if finished == 1:
        with pytest.raises(KeyboardInterrupt):
            bench(4).measure(tmp_path, lambda text: None)
        return
    found = bench(4).measure(tmp_path, lambda text: None)
    # Even splits come before uneven ones.
    assert made == [Setup(4, 4, colocated=True), Setup(2, 2), Setup(2, 2, bound=1)]
    assert found.interrupted and len(found.rows) == 3
    assert "advice of what was simulated: trainer.num_ranks=2" in " ".join(shown(found, 400).split())


def test_costs_are_found_in_the_records_of_two_runs() -> None:
    draw, steps = random.Random(0), []
    for prompts in (16, 16, 16, 4, 4, 4):
        lengths = [draw.randint(10, 1000) for _ in range(prompts * 8)]
        tokens = {"length/max": max(lengths), "tokens/generated": sum(lengths), "tokens/trained": sum(lengths) + 64}
        times = {
            "time/generation": 0.0026 * max(lengths) + 0.00002 * sum(lengths),
            "time/train": 0.1 + (sum(lengths) + 64) / 20_000,
        }
        rest = {"time/refit": 0.3, "time/sleep": 0.1, "time/reward": 0.02, "time/data": 0.01, "time/other": 0.03}
        steps.append(tokens | times | rest | {"refit/seconds": 0.05, "refit/pause": 0.01})
    found = fit_costs(steps)
    assert found.decode.base == pytest.approx(0.0026) and found.decode.per_sequence == pytest.approx(0.00002)
    assert found.training == pytest.approx(20_000) and found.update == pytest.approx(0.1)
    others = (found.refit, found.pause, found.change, found.reward, found.driver)
    assert others == pytest.approx((0.05, 0.01, 0.35, 0.02, 0.04))
    # Records that allow no positive cost of a token have none, rather than a negative one.
    assert fit_costs([step | {"time/generation": step["length/max"] / 1000} for step in steps]).decode == DecodeCost(
        pytest.approx(0.001), pytest.approx(0.0, abs=1e-9)
    )
