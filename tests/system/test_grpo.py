"""Whole runs: options of a run together, and its directory afterwards."""

import json
import shutil
from itertools import chain
from pathlib import Path

import pytest

from rlctl.dashboard.dashboard import render
from rlctl.dashboard.panels.learning import metrics_of
from rlctl.dashboard.report.metric_charts import charts_of
from rlctl.dashboard.state import read_state
from tests.faults.runs import WITHOUT_VLLM, Run, outcomes, read
from tests.system.test_eval import SAMPLED, evaluate, validation

REWARD = """
def score(prompt, completion, answer, row):
    if completion.startswith("7"):
        raise ValueError("sevens are not for me")
    return float(completion == answer)

class Notes:
    def __init__(self, run, config, file):
        self.out = open(run / file, "w")
        print(config["run"]["name"], file=self.out)
    def write(self, kind, step, metrics):
        print(kind, step, len(metrics) > 5, file=self.out)
    def close(self):
        self.out.close()
"""


@pytest.mark.long  # one run; its parts: test_next_token.py, test_parity_check.py
def test_a_run_under_top_p_trains_and_is_judged_by_tokens_of_the_whole_distribution(tmp_path: Path) -> None:
    cut = ("generation.top_p=0.8", "generation.top_k=12", "grpo.updates_per_step=2")
    settings = ("trainer.dtype=bfloat16", "grpo.num_steps=2", "health.parity_every=1", "validation.every=0")
    run = Run(tmp_path, "cut", *cut, *settings)
    assert run.end() == 0, run.text()
    steps = run.steps()
    assert len(steps) == 2
    for step in steps:
        # The kept probability: each token has this weight.
        assert 0.8 <= step["importance/mean"] < 0.98
        assert step["mismatch/token_mult_prob_error"] > 1.03 > step["mismatch/parity"]
    assert not [event for event in run.events() if event["kind"] in ("warning", "health")]


@pytest.mark.long  # combination
def test_two_ranks_two_engines_kl_and_recomputed_log_probs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    shutil.copy(Path(__file__).parents[1] / "plugins" / "reference_pull.py", tmp_path)
    settings = (
        "grpo.num_steps=3",
        "grpo.updates_per_step=2",
        "grpo.loss.proximal=recompute",
        "grpo.loss.kl_coef=0.01",
        "grpo.advantage={name: 'reference_pull.py:ReferencePull', coef: 0.5}",
        "grpo.dynamic_sampling={filter: rewards, max_extra: 0}",
        "trainer.num_ranks=2",
        "generation.num_engines=2",
        "validation.num_generations=2",
        "validation.temperature=1.0",
        "validation.max_prompts=20",
        "telemetry.trackers=[tensorboard, {name: 'mine:Notes', file: notes.txt}]",
        "rewards=[{name: exact}, {name: 'mine:score', weight: 0.5}]",
    )
    run = Run(tmp_path, "two", *settings)
    assert run.end() == 0, run.text()
    steps = run.steps()
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["mismatch/token_mult_prob_error"] <= 1.001
        assert step["loss/kl"] >= 0
        parts = sum(value for name, value in step.items() if name.startswith("time/") and name != "time/step")
        assert parts == pytest.approx(step["time/step"], rel=0.01)
    assert sum(step["reward/failed"] for step in steps) > 0
    assert len(outcomes(run.path)) == 24
    validations = [record for record in read(run.path / "metrics.jsonl") if record["kind"] == "validation"]
    assert {record["validation/prompts"] for record in validations} == {20}
    assert all(record["validation/pass_at_k"] >= record["validation/accuracy"] for record in validations)
    assert list((run.path / "tensorboard").iterdir())
    noted = (run.path / "notes.txt").read_text().splitlines()
    assert noted[0] == "two"
    assert [line for line in noted if line.startswith("step")] == [f"step {step} True" for step in (1, 2, 3)]
    third_row = render(read_state(run.path), 80, 24).rows[2]
    assert "weights v3 · 2 ranks · 2 engines" in "".join(segment.text for segment in third_row)
    logs = {path.name for path in (run.path / "logs" / "latest").iterdir()}
    assert {"trainer-0.log", "trainer-1.log", "engine-0.log", "engine-1.log"} <= logs


@pytest.mark.long  # combination
def test_a_run_goes_on_with_another_number_of_ranks_and_engines(tmp_path: Path) -> None:
    on_two = Run(tmp_path, "two", "grpo.num_steps=2", "trainer.num_ranks=2", "generation.num_engines=2")
    assert on_two.end() == 0, on_two.text()
    on_one = Run(tmp_path, "two", "trainer.num_ranks=1", "generation.num_engines=1", "grpo.num_steps=3", resume=True)
    assert on_one.end() == 0, on_one.text()
    assert [step["step"] for step in on_one.steps()] == [1, 2, 3]


@pytest.fixture(scope="module")
def extended_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two steps with the examples of rlctl/README.md, in files of the user's own, that is validated once."""
    folder = tmp_path_factory.mktemp("own")
    for name in ("my_loss.py", "rank_advantage.py"):
        text = (Path(__file__).parents[1] / "plugins" / name).read_text()
        assert len(text.splitlines()) < 30
        # A second metric, without a row.
        (folder / name).write_text(text.replace("{GATE.name: gate}", "{GATE.name: gate, 'sapo/undeclared': gate}"))
    loss = ("grpo.loss.name=my_loss.py:Sapo", "grpo.loss.tau_down=2", "grpo.updates_per_step=2")
    advantage = "grpo.advantage={name: 'rank_advantage.py:RankAdvantage', most: 2.0}"
    validated = ("validation.at_start=false", "validation.every=2", *SAMPLED)
    run = Run(folder, "mine", WITHOUT_VLLM, "grpo.num_steps=2", *validated, *loss, advantage)
    assert run.end() == 0, run.text()
    return run


def test_a_loss_and_an_advantage_of_ones_own_are_trained_with_their_keys(extended_run: Run) -> None:
    """Ranks import them, and their fields are keys."""
    steps = extended_run.steps()
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert abs(step["advantage/mean"]) < 1e-6 and 0 < step["advantage/std"] <= 2
        assert step["groups/uniform"] <= step["advantage/zero"] < 1 and step["train/grad_norm"] > 0
        # The second update of a step is of a policy that has moved.
        assert step["ratio/max"] > 1 and "ratio/clipped_low" not in step
    assert "tau_down: 2" in (extended_run.path / "config.yaml").read_text()


@pytest.mark.slow
def test_a_metric_of_ones_own_is_shown_with_its_meaning_and_an_undeclared_one_is_told_once(extended_run: Run) -> None:
    assert extended_run.undeclared_metrics() == {"sapo/undeclared"}
    messages = [event["what"] for event in extended_run.events() if "is not declared" in str(event.get("what"))]
    assert len(messages) == 1 and messages[0].startswith("metric sapo/undeclared ")
    state = read_state(extended_run.path)
    (chart,) = [chart for chart in charts_of([state]) if chart.title == "Gate"]
    assert chart.meanings == {"sapo/gate": "mean of the gate"} and len(chart.series[0].values) == 2
    assert [metric.name for metric in metrics_of(state) if metric.label == "gate"] == ["sapo/gate"]
    assert all(step["sapo/undeclared"] == step["sapo/gate"] > 0 for step in extended_run.steps())


@pytest.mark.long  # combination
def test_an_advantage_reads_the_references_log_probs_in_an_asynchronous_run(tmp_path: Path) -> None:
    """They are computed before the advantages, which differ from token to token once the policy has moved."""
    shutil.copy(Path(__file__).parents[1] / "plugins" / "reference_pull.py", tmp_path)
    advantage = "grpo.advantage={name: 'reference_pull.py:ReferencePull', coef: 0.5}"
    run = Run(tmp_path, "pulled", "grpo.num_steps=3", "async.enabled=true", "validation.every=0", advantage)
    assert run.end() == 0, run.text()
    steps = run.steps()
    (probed,) = run.events("probe")
    assert 1 <= probed["scored"] < 1.0001 and "unscored" not in probed
    assert len(steps) == 3 and all(step["time/log_probs"] > 0 and "train/parts" not in step for step in steps)
    records = read(run.path / "rollouts.jsonl")
    groups = [record for record in records if record["kind"] == "group" and record["step"] == 3]
    rollouts = chain.from_iterable(group["rollouts"] for group in groups)
    spans = [rollout["advantages"] for rollout in rollouts if "advantages" in rollout]
    assert any(largest - smallest > 1e-3 for smallest, largest in spans)


def test_an_evaluation_is_the_runs_own_validation_to_the_last_digit(extended_run: Run) -> None:
    """Sampled answers, two to each task: seeds, engine, rewards and metrics must all be the run's."""
    (evaluation,) = evaluate(str(extended_run.path), "--save-every", "15", cwd=extended_run.path.parents[1])
    assert evaluation["figures"]["metrics"] == validation(extended_run, 2)
    assert evaluation["figures"]["pass_at"]["2"]["value"] == validation(extended_run, 2)["validation/pass_at_k"]


@pytest.mark.long  # one run; its parts: tests/unit/rewards/test_scorer.py
def test_a_reward_that_cannot_be_used_is_bad_input_before_any_step(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(prompt, completion, answer, row):\n    return 'good'\n")
    run = Run(tmp_path, "bad", "rewards=[{name: 'mine:score'}]", "grpo.num_steps=1")
    assert run.end() == 2
    errors = [event["what"] for event in run.events() if event["kind"] == "error"]
    assert len(errors) == 1
    assert errors[0] == f"{tmp_path / 'mine.py'}:score: no finite number at mine.py:1: returned 'good'"


@pytest.mark.long  # repetitions
@pytest.mark.parametrize("ranks", [1, 2])
def test_fifty_steps_through_a_compiled_graph_have_the_same_bits(tmp_path: Path, ranks: int) -> None:
    size = ("sft.num_steps=50", "sft.batch_size=16", f"trainer.num_ranks={ranks}", "validation.every=0")
    curves = []
    for enabled in ("false", "require"):
        graph = (f"ray_compiled_graph.enabled={enabled}", "checkpoint.every=0")
        run = Run(tmp_path, f"graph-{enabled}", *size, *graph, kind="sft")
        assert run.end() == 0, run.text()
        curves.append([(step["loss/nll"], step["train/grad_norm"]) for step in run.steps()])
    assert len(curves[0]) == 50 and curves[0] == curves[1]


@pytest.mark.long  # test_damage.py resumes SFT, with a graph, on one rank
def test_sft_resumes_where_it_stood_and_a_compiled_graph_changes_no_bit(tmp_path: Path) -> None:
    short = (
        "sft.num_steps=6",
        "checkpoint.every=3",
        "validation.every=3",
        "sft.batch_size=16",
        "trainer.num_ranks=2",
    )
    unhurt = Run(tmp_path, "whole", *short, kind="sft")
    assert unhurt.end() == 0, unhurt.text()
    shutil.copytree(unhurt.path, tmp_path / "runs" / "half", symlinks=True)
    shutil.rmtree(tmp_path / "runs" / "half" / "checkpoints" / "step_6")
    half = Run(tmp_path, "half", "ray_compiled_graph.enabled=require", resume=True, kind="sft")
    assert half.end() == 0, half.text()
    curves = []
    for run in (unhurt, half):
        curves.append([(step["step"], step["loss/nll"], step["train/grad_norm"]) for step in run.steps()])
    assert curves[0] == curves[1]
    exports = [run.path / "checkpoints" / "step_6" / "hf" / "model.safetensors" for run in (unhurt, half)]
    assert exports[0].read_bytes() == exports[1].read_bytes()
    assert json.loads((unhurt.path / "checkpoints" / "step_6" / "state.json").read_text())["score"] < 0
