"""A run with a further frozen model, in one file of a user: its column reaches loss and advantage.

The same model is the teacher too, in the other place. So both columns must be equal to the last bit.
"""

from pathlib import Path

import pytest

from rlctl.config.builtin import RECIPES
from tests.faults.runs import WITHOUT_VLLM, Run

MODEL = RECIPES / "tiny/qwen3-sums"
# A further role costs this file alone.
OWN_FILE = """
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlctl.grpo.advantages.base import Advantage
from rlctl.grpo.losses.base import PolicyLoss, PolicyTerm
from rlctl.telemetry.metrics import Metric


@dataclass(frozen=True, kw_only=True)
class Judged(PolicyLoss):
    columns: ClassVar = ("novice_log_prob", "teacher_log_prob")
    metrics: ClassVar = (Metric("novice/log_prob", "of the novice"), Metric("novice/gap", "from the teacher"))

    def policy(self, tokens):
        novice = tokens.column("novice_log_prob")
        gap = (novice - tokens.teacher_log_prob).abs()
        return PolicyTerm(-tokens.ratio * tokens.advantage, metrics={"novice/log_prob": novice, "novice/gap": gap})


@dataclass(frozen=True)
class Contrast(Advantage):
    columns: ClassVar = ("rollout_log_prob", "novice_log_prob")

    def __call__(self, rollouts):
        pairs = zip(rollouts.columns["rollout_log_prob"], rollouts.columns["novice_log_prob"])
        return [np.clip(novice - own, -5, 5) for own, novice in pairs]
"""


@pytest.mark.long  # a run
def test_a_users_loss_and_advantage_read_a_further_model(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_FILE)
    settings = (
        WITHOUT_VLLM, f"roles.novice={{path: {MODEL}, place: swapped}}", f"teacher={{path: {MODEL}, place: resident}}",
        "grpo.loss=own.py:Judged", "grpo.advantage=own.py:Contrast", "grpo.num_steps=3", "validation.every=0",
    )  # fmt: skip
    run = Run(tmp_path, "novice", *settings)
    assert run.end() == 0, run.text()
    for step in run.steps():
        assert step["novice/gap"] == 0 and step["novice/log_prob"] < 0 and step["train/grad_norm"] > 0
    assert run.undeclared_metrics() == set()
    other = f"roles.novice.path={RECIPES / 'tiny/qwen3-tiny'}"
    refused = Run(tmp_path, "novice", other, "grpo.num_steps=4", resume=True)
    assert refused.end() == 2
    assert "not the weights of the roles.novice of the checkpoint of step 3" in refused.text()
