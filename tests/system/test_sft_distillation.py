"""SFT runs that are distilled from a teacher on given text: places, calls, adapters, a killed run, another teacher."""

from pathlib import Path

import pytest

from rlctl.config.builtin import RECIPES
from tests.faults.runs import Run, read
from tests.faults.test_resume import check_a_kill_changes_nothing
from tests.system.test_distillation import TEACHER, make_teacher, weights_of

POLICY = (f"model.path={RECIPES / 'tiny/qwen3-tiny'}", "model.random_init=false", "trainer.optimizer.lr=1e-4")
TAUGHT = (*POLICY, f"teacher.path={TEACHER}", "sft.loss.distillation={}", "run.log_every=1")
SHORT = ("sft.num_steps=3", "checkpoint={every: 0, at_end: true}")


def test_the_divergence_from_the_teacher_falls_through_a_compiled_graph(tmp_path: Path) -> None:
    settings = (*TAUGHT, "sft.num_steps=12", "validation.every=12", "checkpoint.at_end=false")
    run = Run(tmp_path, "taught", *settings, "ray_compiled_graph.enabled=require", kind="sft")
    assert run.end() == 0, run.text()
    assert len(run.steps()) == 12 and all(step["loss/teacher"] > 0 for step in run.steps())
    records = [record for record in read(run.path / "metrics.jsonl") if record["kind"] == "validation"]
    assert records[-1]["validation/teacher"] < 0.8 * records[0]["validation/teacher"]
    assert run.undeclared_metrics() == set()


@pytest.mark.long  # four runs
@pytest.mark.parametrize("over", ["vocabulary", "top_k"])
def test_places_and_calls_change_no_bit(over: str, tmp_path: Path) -> None:
    term = f"sft.loss={{nll_coef: 0.5, distillation: {{over: {over}, num_top_tokens: 5}}}}"
    weights = []
    for name, settings in {
        "resident": ("teacher.place=resident",),
        "swapped": ("teacher.place=swapped",),
        "graph": ("teacher.place=swapped", "ray_compiled_graph.enabled=require"),
    }.items():
        run = Run(tmp_path, name, *TAUGHT, *SHORT, term, *settings, "validation.every=0", kind="sft")
        assert run.end() == 0, run.text()
        weights.append(weights_of(run, 3))
    assert len(set(weights)) == 1
    untaught = Run(tmp_path, "untaught", *POLICY, *SHORT, "validation.every=0", kind="sft")
    assert untaught.end() == 0, untaught.text()
    assert weights_of(untaught, 3) not in weights
    assert "loss/teacher" not in untaught.steps()[0]


@pytest.mark.long  # three runs
@pytest.mark.parametrize("place", ["swapped", "resident"])
def test_a_killed_run_goes_on_bit_for_bit(place: str, tmp_path: Path) -> None:
    settings = (*TAUGHT, f"teacher.place={place}", "sft.num_steps=40", "checkpoint={every: 1, keep_last: 99}")
    check_a_kill_changes_nothing(tmp_path, (*settings, "validation.every=0"), last=40, kind="sft")
    other = Run(tmp_path, "killed", f"teacher.path={RECIPES / 'tiny/qwen3-tiny'}", resume=True, kind="sft")
    assert other.end() == 2
    assert "not the weights of the teacher of the checkpoint of step 40" in other.text()


@pytest.mark.long  # a run each
@pytest.mark.parametrize("adapts", [False, True])
def test_another_architecture_teaches_two_ranks_without_given_tokens_loss(adapts: bool, tmp_path: Path) -> None:
    folder = make_teacher(tmp_path / "teacher", "llama", hidden_size=64)
    loss = "sft.loss={nll_coef: 0, distillation: {divergence: jensen_shannon}}"
    lora = ("lora={rank: 4, alpha: 8}", "trainer.optimizer.lr=1e-2") if adapts else ()
    settings = (f"teacher.path={folder}", loss, "trainer.num_ranks=2", "sft.num_steps=10", *lora)
    run = Run(tmp_path, "other", *TAUGHT, *settings, "validation.every=0", kind="sft")
    assert run.end() == 0, run.text()
    divergences = [step["loss/teacher"] for step in run.steps()]
    assert divergences[-1] < divergences[0]


@pytest.mark.long  # three runs
def test_an_adapter_over_its_base_teaches_adapters_and_a_whole_model(tmp_path: Path) -> None:
    lora = ("lora={rank: 4, alpha: 8}", "trainer.optimizer.lr=1e-2", "validation.every=0")
    adapter = Run(tmp_path, "adapter", *POLICY, *lora, "sft.num_steps=40", kind="sft")
    assert adapter.end() == 0, adapter.text()
    teacher = f"teacher={{path: {RECIPES / 'tiny/qwen3-tiny'}, lora: {adapter.path}}}"
    loss = "sft.loss={nll_coef: 0, distillation: {}}"
    first_divergences = []
    for name, settings in {"adapters": lora, "whole": ("validation.every=0",)}.items():
        run = Run(tmp_path, name, *POLICY, teacher, loss, "sft.num_steps=40", *settings, kind="sft")
        assert run.end() == 0, run.text()
        divergences = [step["loss/teacher"] for step in run.steps()]
        assert 0 < divergences[-1] < 0.8 * divergences[0]
        first_divergences.append(divergences[0])
    # Both begin at the base below the teacher's adapter.
    assert first_divergences[0] == pytest.approx(first_divergences[1], rel=1e-4)
