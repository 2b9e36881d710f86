from dataclasses import dataclass

import torch

from rlctl.grpo.losses.base import PolicyLoss, PolicyTerm, PolicyTokens
from rlctl.telemetry.metrics import LEARNING, Metric, PanelRow, ReportChart

GATE = Metric("sapo/gate", "mean of the gate", chart=ReportChart(LEARNING, "Gate"), panel=[PanelRow("gate")])


@dataclass(frozen=True)
class Sapo(PolicyLoss):
    """-4 / tau sigmoid(tau (r - 1)) A, a soft clip of r with one tau for each sign of A (SAPO, arXiv 2511.20347)."""

    metrics = (GATE,)

    tau_up: float = 1.0
    tau_down: float = 1.05

    def policy(self, tokens: PolicyTokens) -> PolicyTerm:
        tau = torch.where(tokens.advantage > 0, self.tau_up, self.tau_down)
        gate = 4 / tau * torch.sigmoid(tau * (tokens.ratio - 1))
        return PolicyTerm(-gate * tokens.advantage, metrics={GATE.name: gate})
