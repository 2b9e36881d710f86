"""Metrics of the SFT loss, on the training data and held out."""

from rlctl.telemetry.metrics import IN_SFT, LEARNING, Condition, Metric, PanelRow, ReportChart, rows_where
from rlctl.training.metric_rows import TEACHER_CHART

_LOSS = ReportChart(LEARNING, "Loss", 50)
_WITH_TEACHER = Condition(
    lambda settled: settled.sft is not None and settled.config.distillation is not None, "with sft.loss.distillation"
)
# ruff must not split the rows of this table over more lines.
# fmt: off
NLL = Metric("loss/nll", "negative log-likelihood, nats a token", chart=_LOSS, panel=[PanelRow("loss", 40, "green")])
HELD_OUT_LOSS = Metric("validation/loss", "held-out loss, nats a token", chart=_LOSS,
    panel=[PanelRow("validation", 50, "magenta")])
HELD_OUT_KL_TO_TEACHER = Metric("validation/teacher", "held-out divergence from the teacher, nats a token",
    chart=TEACHER_CHART.with_place(66), when=_WITH_TEACHER)
METRICS = rows_where(
    IN_SFT, NLL, HELD_OUT_LOSS, HELD_OUT_KL_TO_TEACHER,
    Metric("validation/samples", "held-out samples (SFT)", chart=None),
)
# fmt: on
