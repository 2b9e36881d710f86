"""Metrics of a critic."""

from rlctl.telemetry.metrics import LEARNING, Metric, PanelRow, ReportChart, grpo_where, rows_where

_WITH_CRITIC = grpo_where(lambda settled: settled.config.critic is not None, "with critic")
_VALUES = ReportChart(LEARNING, "Values of the critic", 182)
# A table: each row fills its lines.
# fmt: off
EXPLAINED_VARIANCE = Metric("critic/explained_variance",
    "1 - variance of (return - value) / variance of the returns, before the critic learns from the step; 1 is exact",
    "share", chart=ReportChart(LEARNING, "Explained variance of the critic", 180), panel=[PanelRow("explained", 86)])
LOSS = Metric("critic/loss", "mean over tokens of half the clipped squared distance of values from returns",
    chart=ReportChart(LEARNING, "Loss of the critic", 181), panel=[PanelRow("value loss", 87)])
CLIPPED = Metric("critic/clipped", "share of tokens whose value is held by critic.value_clip", "share",
    chart=ReportChart(LEARNING, "Clipped values", 183))
MEAN_VALUE = Metric("critic/value", "mean value of the trained tokens", chart=_VALUES)
MEAN_RETURN = Metric("critic/return", "mean return of the trained tokens", chart=_VALUES.with_place(184))
GRAD_NORM = Metric("critic/grad_norm", "norm of the critic's gradient before clipping",
    chart=ReportChart(LEARNING, "Gradient norm of the critic", 185))
LEARNING_RATE = Metric("critic/lr", "learning rate of the critic", chart=None)
METRICS = rows_where(_WITH_CRITIC, EXPLAINED_VARIANCE, LOSS, CLIPPED, MEAN_VALUE, MEAN_RETURN, GRAD_NORM, LEARNING_RATE)
# fmt: on
