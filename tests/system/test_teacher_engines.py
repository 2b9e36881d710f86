"""Whole runs with a teacher on separate engines: the losses of a teacher in the trainer's ranks, and a lost engine."""

from pathlib import Path

import psutil
import pytest

from rlctl.config.builtin import RECIPES
from tests.faults.runs import WITHOUT_VLLM, Run

TEACHER = f"teacher.path={RECIPES / 'tiny/qwen3-sums'}"
TERM = ("grpo.loss.distillation={}", "grpo.num_generations_per_prompt=1", "grpo.num_prompts_per_step=16")
DISTILLED = (TEACHER, *TERM, "rewards=[]", "validation.every=0", "checkpoint={every: 0, at_end: true}")
ON_ENGINES = "teacher.place=engines"


@pytest.mark.long  # two runs
@pytest.mark.parametrize("engine", ["vllm", "torch"])
def test_a_teacher_on_engines_teaches_as_one_in_the_trainers_ranks(engine: str, tmp_path: Path) -> None:
    settings = (*DISTILLED, "grpo.num_steps=2") + ((WITHOUT_VLLM,) if engine == "torch" else ())
    in_ranks = Run(tmp_path, "ranks", *settings, "teacher.place=resident")
    assert in_ranks.end() == 0, in_ranks.text()
    on_engines = Run(tmp_path, "engines", *settings, ON_ENGINES)
    assert on_engines.end() == 0, on_engines.text()
    for expected, step in zip(in_ranks.steps(), on_engines.steps(), strict=True):
        assert step["loss/teacher"] == pytest.approx(expected["loss/teacher"], rel=1e-4)
        assert step["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-3)
        assert step["rollouts/non_finite"] == 0
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
