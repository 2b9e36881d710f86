"""`rlctl bench algorithms`: learning curves from metrics, the target, table and chart, and files left after a stop."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from rlctl.bench import algorithms
from rlctl.bench.algorithms import AlgorithmBench, AlgorithmResults, AlgorithmRow, LearningCurve, learning_curve
from rlctl.cli.bench_frame import show
from rlctl.config.schema import GrpoConfig
from rlctl.preflight.load import load
from rlctl.telemetry.jsonl import Record


def make_curve(*accuracy: float, seed: int = 0) -> LearningCurve:
    """Return the curve of a run with a validation after each step. A step has 100 rollouts and takes 2 s."""
    steps = range(len(accuracy))
    return LearningCurve(
        seed=seed,
        steps=list(steps),
        rollouts=[100 * step for step in steps],
        seconds=[2.0 * step for step in steps],
        accuracy=list(accuracy),
        tokens=9,
        wasted=0.25,
    )


@pytest.mark.parametrize(
    ("accuracy", "index"),
    [
        ([0.4, 0.9, 0.95], 1),
        ([0.4, 0.9, 0.89, 0.9, 0.9], 3),
        ([0.4, 0.95, 0.8], None),
        ([0.4, 0.8, 0.9], 2),
        ([0.4, 0.5], None),
        ([0.9, 0.9], 0),
    ],
)
def test_the_target_is_reached_where_the_next_validation_confirms_it(accuracy: list[float], index: int | None) -> None:
    assert make_curve(*accuracy).find_target(0.9) == index


def make_validation(step: int, accuracy: float) -> Record:
    return {"kind": "validation", "step": step, "validation/accuracy": accuracy}


def make_step(number: int, seconds: float, **metrics: float) -> Record:
    return {"kind": "step", "step": number, "time/step": seconds, "tokens/generated": 1000.0, **metrics}


def test_a_curve_counts_every_rollout_that_was_sampled_and_the_seconds_of_steps_alone() -> None:
    config = load("grpo", "grpo-tiny", ["grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=2"]).config
    assert isinstance(config, GrpoConfig)
    filtered = {"groups/replaced": 3.0, "groups/surplus": 1.0, "tokens/surplus": 500.0, "tokens/wasted": 0.4}
    records = [make_validation(0, 0.1), make_step(1, 2.0), make_step(2, 3.0, **filtered), make_validation(2, 0.5)]
    curve = learning_curve(7, records, config)
    assert (curve.seed, curve.steps, curve.accuracy) == (7, [0, 2], [0.1, 0.5])
    assert curve.rollouts == [0, 8 + 16]
    assert curve.seconds == [0, 5.0]
    assert (curve.tokens, curve.wasted) == (2500, pytest.approx(600 / 2500))


def test_a_run_without_held_out_accuracy_has_no_curve() -> None:
    with pytest.raises(RuntimeError, match="seed 0: no held-out accuracy"):
        learning_curve(0, [make_step(1, 2.0)], load("grpo", None, []).config)  # type: ignore[arg-type]


def make_results(*rows: AlgorithmRow) -> AlgorithmResults:
    return AlgorithmResults("grpo-tiny", seeds=3, steps=240, target=0.9, rows=list(rows), failed=[])


GOOD = AlgorithmRow(
    "gspo", [make_curve(0.4, 0.9, 0.96), make_curve(0.4, 0.8, 0.92, seed=1), make_curve(0.4, 0.7, 0.88, seed=2)]
)
BAD = AlgorithmRow("grpo grpo.loss.clip_high=0.4", [make_curve(0.4, 0.5, 0.6)])


def render(results: AlgorithmResults, width: int) -> list[str]:
    """Return the printed lines."""
    output = io.StringIO()
    show(results, Console(file=output, width=width, force_terminal=True, color_system=None))
    return output.getvalue().splitlines()


def test_the_table_has_a_row_for_each_algorithm_and_fits_the_terminal() -> None:
    narrow = render(make_results(GOOD, BAD), 80)
    wide = render(make_results(GOOD, BAD), 140)
    assert max(map(len, narrow)) <= 80
    row = next(line for line in narrow if line.startswith("gspo")).split()
    # Rollouts and seconds are means over the two runs that reach the target, after one and two validations.
    assert row == ["gspo", "0.400", "0.920", "0.880..0.960", "150", "(2/3)", "3", "2.00"]
    assert "never" in " ".join(narrow)
    wide_row = next(line for line in wide if line.startswith("gspo")).split()
    assert wide_row[-6:] == ["2", "of", "3", "9", "25%", "4"]


def test_json_has_the_curve_of_every_run_and_what_the_table_says() -> None:
    good, bad = json.loads(json.dumps(make_results(GOOD, BAD).as_json()))["rows"]
    assert [run["accuracy"][-1] for run in good["runs"]] == [0.96, 0.92, 0.88]
    assert good["end"] == {"mean": pytest.approx(0.92), "min": 0.88, "max": 0.96}
    assert good["to_target"] == {"reached": 2, "rollouts": 150, "seconds": 3}
    assert bad["to_target"] == {"reached": 0, "rollouts": None, "seconds": None}


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_chart_draws_every_algorithm_against_rollouts_and_seconds(tmp_path: Path, ending: str) -> None:
    chart = make_results(GOOD, BAD).chart()
    path = tmp_path / f"chart.{ending}"
    assert chart.curves[0].x == {"rollouts sampled": [0, 100, 200], "seconds of training": [0, 2, 4]}
    assert chart.curves[0].least == [0.4, 0.7, 0.88] and chart.curves[0].greatest == [0.4, 0.9, 0.96]
    chart.write(path)
    image = path.read_bytes()
    assert image.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    if ending == "svg":
        drawing = image.decode()
        assert all(text in drawing for text in ("rollouts sampled", "seconds of training", "gspo", BAD.name))


class FakeTrain:
    """Stand-in for `rlctl train`. A run raises its error in `errors`, or ends with accuracy 0.9."""

    def __init__(self, errors: dict[str, BaseException]) -> None:
        self.errors = errors
        self.commands = dict[str, list[str]]()

    def __call__(
        self, name: str, command: Sequence[str], run: Path, watch: Callable[[list[Record]], None]
    ) -> list[Record]:
        self.commands[name] = list(command)
        if name in self.errors:
            raise self.errors[name]
        records = [make_validation(0, 0.4), make_step(1, 2.0), make_step(2, 2.0), make_validation(2, 0.9)]
        watch(records)
        return records


def measure_bench(
    monkeypatch: pytest.MonkeyPatch, folder: Path, errors: dict[str, BaseException] | None = None
) -> tuple[AlgorithmResults, FakeTrain, list[str]]:
    """Measure two algorithms with two seeds; return the results, the runs and the lines of progress."""
    train = FakeTrain(errors or {})
    progress = list[str]()
    monkeypatch.setattr(algorithms, "train", train)
    bench = AlgorithmBench(
        algorithms=["grpo", "rloo"],
        recipe="grpo-tiny",
        seeds=2,
        steps=2,
        target=0.9,
        extra=["trainer.optimizer.lr=1e-4"],
    )
    assert bench.check() == []
    return bench.measure(folder, progress.append), train, progress


def test_every_seed_of_all_algorithms_comes_before_the_next_seed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results, train, progress = measure_bench(monkeypatch, tmp_path)
    assert list(train.commands) == ["grpo, seed 0", "rloo, seed 0", "grpo, seed 1", "rloo, seed 1"]
    assert progress[:2] == ["grpo, seed 0 (run 1 of 4)", "grpo, seed 0 (run 1 of 4): step 0, accuracy 0.400"]
    assert progress[-1].startswith("rloo, seed 1 (run 4 of 4): step 2, accuracy 0.900; 0s left")
    assert [len(row.runs) for row in results.rows] == [2, 2]
    assert not results.interrupted and results.errors() == []
    command = train.commands["rloo, seed 1"]
    recipe = command[command.index("grpo") + 1]
    config = load("grpo", recipe, command[command.index(recipe) + 1 :]).config
    assert isinstance(config, GrpoConfig)
    assert (config.grpo.advantage.name, config.grpo.num_steps, config.run.seed) == ("leave_one_out", 2, 1)
    assert (config.trainer.optimizer.lr, config.checkpoint.every) == (1e-4, 0)
    assert Path(config.run.dir) == tmp_path


def test_ctrl_c_leaves_the_runs_that_are_finished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results, _, _ = measure_bench(monkeypatch, tmp_path, {"grpo, seed 1": KeyboardInterrupt()})
    assert results.interrupted and [len(row.runs) for row in results.rows] == [1, 1]
    with pytest.raises(KeyboardInterrupt):
        measure_bench(monkeypatch, tmp_path, {"grpo, seed 0": KeyboardInterrupt()})


def test_a_run_that_fails_is_left_out_and_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = RuntimeError("rloo, seed 0 ended with 1: no memory")
    results, _, _ = measure_bench(monkeypatch, tmp_path, {"rloo, seed 0": error})
    assert [len(row.runs) for row in results.rows] == [2, 1] and results.errors() == [str(error)]
    errors: dict[str, BaseException] = {"grpo, seed 0": RuntimeError("no memory")}
    for name in ("grpo, seed 1", "rloo, seed 0", "rloo, seed 1"):
        errors[name] = RuntimeError("bad luck")
    with pytest.raises(RuntimeError, match="no memory; bad luck"):
        measure_bench(monkeypatch, tmp_path, errors)


def test_a_file_of_ones_own_is_an_algorithm(home: Path) -> None:
    (home / "mine.yaml").write_text("grpo: {loss: {clip_high: 0.5}}\n")
    bench = AlgorithmBench(["mine.yaml"], "grpo-tiny", seeds=1, steps=1, target=0.9, extra=[])
    assert bench.check() == []
    config = bench.config_of("mine.yaml", home)
    assert config.grpo.loss.clip_high == 0.5  # type: ignore[union-attr]
