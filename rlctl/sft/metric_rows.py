"""Metrics of the SFT loss, on the training data and held out."""

from rlctl.telemetry.metrics import IN_SFT, LEARNING, Metric, PanelRow, ReportChart, rows_where

_LOSS = ReportChart(LEARNING, "Loss", 50)
# ruff must not split the rows of this table over more lines.
# fmt: off
NLL = Metric("loss/nll", "negative log-likelihood, nats a token", chart=_LOSS, panel=[PanelRow("loss", 40, "green")])
HELD_OUT_LOSS = Metric("validation/loss", "held-out loss, nats a token", chart=_LOSS,
    panel=[PanelRow("validation", 50, "magenta")])
METRICS = rows_where(
    IN_SFT, NLL, HELD_OUT_LOSS,
    Metric("validation/samples", "held-out samples (SFT)", chart=None),
)
# fmt: on
