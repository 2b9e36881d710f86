"""Arithmetic of `rlctl bench refit`: times, shares, overlap and pauses from timestamps of every process."""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from rlctl.bench.refit_results import RefitResults, SchemeRow, make_row
from rlctl.bench.rounds import Measured
from rlctl.bench.weights import parameters_of
from rlctl.bench.workload import SHAPES, model_folder


def make_record(begins: list[float], ends: list[float], commit: float = 0.0, **phases: float) -> Measured:
    """Return the record of one process. begins, ends: of each round. All rounds have the same commit and phases."""
    return Measured(
        begins=begins,
        ends=ends,
        commits=[commit] * len(ends),
        phases=[phases] * len(ends),
        extra_bytes=7,
        growth_bytes=3,
    )


def make_scheme(seconds: float, phases: dict[str, float], differences: Sequence[str] = ()) -> SchemeRow:
    """Return a row of results, with 0 bytes of memory."""
    return SchemeRow(
        label="x",
        mode="direct",
        seconds=seconds,
        commit=0.0,
        phases=phases,
        trainer_extra=0,
        engine_extra=0,
        trainer_growth=0,
        engine_growth=0,
        checked=True,
        wrong=list(differences),
    )


def test_a_round_lasts_from_the_first_begin_to_the_last_arrival_without_its_commit() -> None:
    sent = [make_record([0.0, 10.0, 20.0], [0.5, 10.5, 20.5], pack=0.2, wire=0.4)]
    received = [
        make_record([0.1, 10.1, 20.1], [9.0, 11.0, 21.0], commit=0.1, wire=0.3),
        make_record([0.1, 10.1, 20.1], [9.0, 11.5, 22.0], commit=0.1, wire=0.6, load=0.1),
    ]
    row = make_row("x", sent, received, [], "staged")
    # The first round is a warm-up and does not count. The others take 1.5 - 0.1 and 2.0 - 0.1.
    assert row.seconds == pytest.approx(1.65)
    assert row.commit == row.pause == pytest.approx(0.1)
    # The time on the wire is measured at the end that waits for a shorter time.
    assert row.phases == {"pack": 0.2, "wire": 0.4, "load": 0.1}
    assert (row.trainer_extra, row.engine_growth, row.checked, row.wrong) == (7, 3, True, [])
    assert replace(row, mode="direct").pause == pytest.approx(1.75)


@pytest.mark.parametrize(
    ("phases", "seconds", "expected_overlap"),
    [
        ({"pack": 1.0, "wire": 2.0}, 2.0, 1.0),
        ({"pack": 1.0, "wire": 2.0}, 3.0, 0.0),
        ({"pack": 1.0, "wire": 2.0}, 2.5, 0.5),
        ({"wire": 2.0}, 2.0, None),
        ({}, 2.0, None),
    ],
)
def test_overlap_is_what_hides_of_what_could(
    phases: dict[str, float], seconds: float, expected_overlap: float | None
) -> None:
    assert make_scheme(seconds, phases).overlap == expected_overlap


def test_rates_and_shares_are_of_the_payload_and_the_plain_link() -> None:
    row = make_scheme(seconds=2.0, phases={}, differences=["w"])
    results = RefitResults(
        model="m", payload=8 * 10**9, trainers=1, engines=1, tensor_parallel=1, bound=1.5, rows=[row]
    )
    assert results.rate(row) == 4.0
    assert results.share(row) == 0.75
    assert results.errors() == ["x: delivered weights differ from the sent ones: w"]
    four_differ = replace(results, rows=[replace(row, wrong=["a", "b", "c", "d"])])
    assert four_differ.errors()[0].endswith(": a, b, c and 1 more")
    assert json.loads(json.dumps(results.as_json()))["rows"][0]["share"] == 0.75


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_has_the_parameters_of_its_name(name: str, tmp_path: Path) -> None:
    rows = parameters_of(model_folder(name, tmp_path))
    millions = sum(prod(shape) for _, shape in rows) / 1e6
    # Parameter counts that the models' publishers state.
    published_millions = {
        "tiny": 30.02,
        "qwen3-0.6b": 596,
        "qwen3-1.7b": 1721,
        "qwen3-4b": 4022,
        "qwen3-8b": 8191,
        "qwen3-30b-a3b": 30532,
        "qwen3-235b-a22b": 235094,
        "llama-8b": 8030,
    }
    assert millions == pytest.approx(published_millions[name], rel=0.005)
