"""Whole runs with a divergence over the vocabulary or over a teacher's likeliest tokens: places, resume, parts."""

from pathlib import Path

import pytest

from tests.faults.runs import Run
from tests.faults.test_resume import check_a_kill_changes_nothing
from tests.system.test_distillation import DISTILLED, SHORT, make_teacher, weights_of

REWARDLESS = (*DISTILLED, "rewards=[]")
VOCABULARY = "grpo.loss.distillation={over: vocabulary}"
TOP = "grpo.loss.distillation={over: top_k, num_top_tokens: 5, divergence: forward_kl}"


def test_a_swapped_and_a_resident_teacher_train_the_same_weights(tmp_path: Path) -> None:
    weights = {}
    for place in ("resident", "swapped"):
        run = Run(tmp_path, place, *REWARDLESS, *SHORT, VOCABULARY, f"teacher.place={place}")
        assert run.end() == 0, run.text()
        assert all(step["loss/teacher"] > 0.1 and step["train/grad_norm"] > 0 for step in run.steps())
        # The teacher computes inside of the update.
        assert all(0 < step["train/teacher"] < step["time/train"] for step in run.steps())
        assert not any("time/teacher" in step for step in run.steps())
        assert run.undeclared_metrics() == set()
        weights[place] = weights_of(run, 2)
    assert weights["resident"] == weights["swapped"]


@pytest.mark.long  # three runs
@pytest.mark.parametrize("term", [VOCABULARY, TOP])
def test_a_killed_run_goes_on_bit_for_bit(term: str, tmp_path: Path) -> None:
    settings = (*REWARDLESS, term, "grpo.num_steps=4", "checkpoint={every: 1, keep_last: 9}")
    check_a_kill_changes_nothing(tmp_path, settings, last=4)


@pytest.mark.long  # a run each
@pytest.mark.parametrize("term", [VOCABULARY, TOP])
def test_another_architecture_teaches_adapters_in_an_asynchronous_run_of_bound_two(term: str, tmp_path: Path) -> None:
    folder = make_teacher(tmp_path / "teacher", "llama", hidden_size=64)
    settings = ("lora={rank: 4, alpha: 8}", "generation.engine=vllm", f"teacher.path={folder}", "grpo.num_steps=4")
    is_async = ("async.enabled=true", "async.max_trajectory_age_steps=2")
    run = Run(tmp_path, "other", *REWARDLESS, term, *settings, *is_async, "trainer.optimizer.lr=1e-2")
    assert run.end() == 0, run.text()
    kls = [step["loss/teacher"] for step in run.steps()]
    assert len(kls) == 4 and kls[-1] < kls[0]
