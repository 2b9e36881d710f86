"""Whole runs with a teacher on separate engines: the losses of a teacher in the trainer's ranks, and a lost engine."""

import json
from pathlib import Path

import psutil
import pytest

from rlctl.config.builtin import RECIPES
from tests.faults.runs import WITHOUT_VLLM, Run
from tests.system.test_distillation import make_teacher

TEACHER = f"teacher.path={RECIPES / 'tiny/qwen3-sums'}"
TERM = ("grpo.loss.distillation={}", "grpo.num_generations_per_prompt=1", "grpo.num_prompts_per_step=16")
DISTILLED = (TEACHER, *TERM, "rewards=[]", "validation.every=0", "checkpoint={every: 0, at_end: true}")
ON_ENGINES = "teacher.place=engines"


def compare_places(folder: Path, settings: tuple[str, ...], seconds: str = "time/teacher") -> None:
    """Run with the teacher in the ranks, and on engines. Check that both have the same losses and gradients.

    seconds: name of the teacher's seconds in the ranks.
    """
    in_ranks = Run(folder, "ranks", *settings, "teacher.place=resident")
    assert in_ranks.end() == 0, in_ranks.text()
    on_engines = Run(folder, "engines", *settings, ON_ENGINES)
    assert on_engines.end() == 0, on_engines.text()
    for expected, step in zip(in_ranks.steps(), on_engines.steps(), strict=True):
        assert step["loss/teacher"] == pytest.approx(expected["loss/teacher"], rel=1e-4)
        assert step["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-3)
        assert step["rollouts/non_finite"] == 0
        assert step["time/idle_teacher"] > 0
        assert expected[seconds] > 0 and seconds not in step
    assert on_engines.steps()[0]["memory/teacher_gib"] > 0.1
    # In the first step the engine has not reported before.
    assert 0 <= on_engines.steps()[-1]["idle/teacher"] < 1
    assert on_engines.undeclared_metrics() == in_ranks.undeclared_metrics() == set()
    assert "teacher-0" in on_engines.events("processes")[0] and "teacher-0" not in in_ranks.events("processes")[0]


@pytest.mark.long  # a run
def test_a_lost_engine_is_rebuilt_and_scores_again(tmp_path: Path) -> None:
    settings = (*DISTILLED, WITHOUT_VLLM, ON_ENGINES, "grpo.num_steps=8", "async.enabled=true")
    run = Run(tmp_path, "lost", *settings)
    run.wait_for_step(2)
    (processes,) = run.events("processes")
    psutil.Process(processes["teacher-0"]).kill()
    assert run.end() == 0, run.text()
    assert len(run.steps()) == 8
    (lost,) = run.events("engine_lost")
    (restarted,) = run.events("engine_restarted")
    assert lost["role"] == restarted["role"] == "teacher"
    assert all(step["rollouts/non_finite"] == 0 for step in run.steps())


@pytest.mark.long  # two runs
@pytest.mark.parametrize("engine", ["vllm", "torch"])
def test_a_teacher_on_engines_teaches_as_one_in_the_trainers_ranks(engine: str, tmp_path: Path) -> None:
    compare_places(tmp_path, (*DISTILLED, "grpo.num_steps=2") + ((WITHOUT_VLLM,) if engine == "torch" else ()))


TOP = "grpo.loss.distillation={over: top_k, num_top_tokens: 5}"


@pytest.mark.long  # two runs
@pytest.mark.parametrize("engine", ["vllm", "torch"])
def test_the_likeliest_tokens_of_engines_are_those_of_the_ranks(engine: str, tmp_path: Path) -> None:
    """The teacher is random: of its 32 logits, 14 are padding with as much probability as the others."""
    folder = make_teacher(tmp_path / "teacher", "qwen3")
    settings = (*DISTILLED, TOP, f"teacher.path={folder}", "grpo.num_steps=2", "grpo.loss.distillation.rest=bin")
    compare_places(tmp_path, settings + ((WITHOUT_VLLM,) if engine == "torch" else ()), seconds="train/teacher")


@pytest.mark.long  # a run
def test_several_teachers_on_engines_give_each_row_its_own_likeliest_tokens(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (RECIPES / "tiny-data/train.jsonl").read_text().splitlines()]
    data = tmp_path / "train.jsonl"
    schools = ("sums", "random")
    data.write_text("".join(json.dumps(row | {"school": schools[n % 2]}) + "\n" for n, row in enumerate(rows)))
    folder = make_teacher(tmp_path / "random", "llama")
    teachers = f"teachers={{sums: {{path: {RECIPES / 'tiny/qwen3-sums'}, place: engines}}, "
    teachers += f"random: {{path: {folder}, place: engines}}}}"
    settings = (teachers, "teacher_key=school", f"data.train.path={data}", TOP, *TERM[1:], WITHOUT_VLLM)
    run = Run(tmp_path, "several", *settings, "rewards=[]", "validation.every=0", "grpo.num_steps=3")
    assert run.end() == 0, run.text()
    assert all(step["loss/teacher"] > 0 and step["rollouts/non_finite"] == 0 for step in run.steps())


@pytest.mark.long  # three runs
@pytest.mark.parametrize("policy", ["whole", "adapters"])
def test_an_adapter_over_its_base_teaches_on_engines(policy: str, tmp_path: Path) -> None:
    """The engines serve the adapter merged with its base."""
    base = RECIPES / "tiny/qwen3-tiny"
    lora = "lora={rank: 4, alpha: 8}"
    start = (f"model.path={base}", "model.random_init=false", "trainer.optimizer.lr=1e-2", "validation.every=0")
    adapter = Run(tmp_path, "adapter", *start, lora, "sft.num_steps=20", kind="sft")
    assert adapter.end() == 0, adapter.text()
    teacher = f"teacher={{path: {base}, lora: {adapter.path}}}"
    own = (lora, "trainer.optimizer.lr=1e-3") if policy == "adapters" else ()
    compare_places(tmp_path, (*DISTILLED, teacher, *own, "grpo.num_steps=2"))
