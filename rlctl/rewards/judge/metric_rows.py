"""Declarations of the metrics of judges, summed over the judges of a run. No aiohttp: a check reads them."""

from collections.abc import Mapping

from rlctl.rewards.judge.sections import has_judge
from rlctl.telemetry.metrics import LEARNING, Metric, PanelRow, ReportChart, grpo_where, rows_where

_WITH_JUDGE = grpo_where(lambda settled: has_judge(settled.config.rewards), "with a reward judge")
_REQUESTS = ReportChart(LEARNING, "Requests to judges", 180)
_TOKENS = ReportChart(LEARNING, "Tokens of judges", 190)
# A table: the formatter would put each argument on its own line.
# fmt: off
CALLS = Metric("judge/calls", "requests to judges since the step before, repeated ones too", chart=_REQUESTS,
    panel=[PanelRow("judged", 260)])
FOUND = Metric("judge/cached", "questions to judges that an earlier equal one had answered", chart=_REQUESTS)
FAILED = Metric("judge/failed",
    "questions to judges without a verdict: no request was answered, or the reply cannot be read", chart=_REQUESTS,
    panel=[PanelRow("no verdict", 35, "bold red", failure=True)])
RETRIES = Metric("judge/retries", "requests to judges that repeated one without an answer", chart=_REQUESTS)
INPUT_TOKENS = Metric("judge/input_tokens", "tokens of the requests to judges", chart=_TOKENS)
OUTPUT_TOKENS = Metric("judge/output_tokens", "tokens of the replies of judges", chart=_TOKENS)
COST = Metric("judge/cost", "price of the judges' tokens, by price_input and price_output",
    chart=ReportChart(LEARNING, "Cost of judges", 200), panel=[PanelRow("judge cost", 270, used=True)])
CALL_SECONDS = Metric("judge/seconds", "mean duration of a request to a judge", "seconds",
    chart=ReportChart(LEARNING, "Duration of a judge's request", 210), panel=[PanelRow("judge time", 280)])
METRICS = rows_where(
    _WITH_JUDGE, CALLS, FOUND, FAILED, RETRIES, INPUT_TOKENS, OUTPUT_TOKENS, COST, CALL_SECONDS,
)
# fmt: on


def judge_metrics(counts: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of judges. counts: sums by the names of metrics, of `Scorer.take_counts`."""
    metrics = {metric.name: counts.get(metric.name, 0.0) for metric in METRICS}
    metrics[CALL_SECONDS.name] /= max(1.0, metrics[CALLS.name])
    return metrics
