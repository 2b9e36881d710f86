"""What the policy learns: one row a metric with its course, most telling first."""

from collections.abc import Callable
from dataclasses import dataclass

from rlctl.dashboard.formats import error_factor, number, percent
from rlctl.dashboard.panels.canvas import Row, box, row
from rlctl.dashboard.panels.draw import spark
from rlctl.dashboard.state import RunState

MISMATCH, PARITY = "mismatch/token_mult_prob_error", "mismatch/parity"


@dataclass(frozen=True)
class Metric:
    label: str
    name: str
    show: Callable[[float | None], str] = number
    style: str = "cyan"
    # Shown only while it is above 0, and then before all others.
    trouble: bool = False


METRICS = {
    "grpo": (
        Metric("rew failed", "reward/failed_share", percent, "bold red", trouble=True),
        Metric("val failed", "validation/failed_rewards", style="bold red", trouble=True),
        Metric("reward", "reward/mean", style="green"),
        Metric("accuracy", "reward/accuracy", percent, "green"),
        Metric("held-out", "validation/accuracy", percent, "magenta"),
        Metric("loss", "loss/policy"),
        Metric("KL", "loss/kl"),
        Metric("grad norm", "train/grad_norm"),
        Metric("length", "length/mean"),
        Metric("truncated", "length/truncated", percent),
        Metric("mismatch", MISMATCH, error_factor),
        Metric("parity", PARITY, error_factor),
        Metric("entropy", "loss/entropy"),
        Metric("clip low", "ratio/clipped_low", percent),
        Metric("clip high", "ratio/clipped_high", percent),
        Metric("uniform", "groups/uniform", percent),
        Metric("pass@k", "validation/pass_at_k", percent, "magenta"),
        Metric("learn rate", "train/lr"),
    ),
    "sft": (
        Metric("loss", "loss/nll", style="green"),
        Metric("held-out", "validation/loss", style="magenta"),
        Metric("grad norm", "train/grad_norm"),
        Metric("learn rate", "train/lr"),
        Metric("tokens", "tokens/trained"),
    ),
}
# What is not plain from its name, in one line: the longest that fits.
LEGENDS = {
    "grpo": (
        "mismatch: token probability, engine to trainer, 1 is exact · uniform: groups of equal rewards, nothing to "
        "learn · effective: end to end",
        "mismatch 1: exact · uniform: rewards all equal · effective: end to end",
    ),
    "async": (
        "off-policy: token probability, engine to trainer, with the tokens' age · parity: under equal weights, 1 is "
        "exact · effective: end to end",
        "off-policy: mismatch with age · parity: without, 1 is exact",
    ),
}


def metrics_of(state: RunState) -> list[Metric]:
    """Troubles while they last, then the rows that have a value."""
    listed = METRICS.get(state.algorithm, METRICS["grpo"])
    troubles = [metric for metric in listed if metric.trouble and (state.latest(metric.name) or 0) > 0]
    known = [metric for metric in listed if not metric.trouble and state.latest(metric.name) is not None]
    return [*troubles, *known]


def legend(state: RunState, width: int) -> str:
    """Explain the metrics that need it within `width` cells; empty where that is too narrow, or none does."""
    kind = "async" if "age/max" in state.last else state.algorithm
    return next((text for text in LEGENDS.get(kind, ()) if len(text) <= width), "")


def learning(state: RunState, width: int, height: int) -> list[Row]:
    rows = [_line(state, metric, width - 4) for metric in metrics_of(state)[: height - 2]]
    return box("Learning", rows, width, height)


def _line(state: RunState, metric: Metric, width: int) -> Row:
    value = state.latest(metric.name)
    # Tokens of older weights differ from the trainer's by what it has learnt since, so the bound is on others, sampled
    # under equal weights: the parity. The ages panel shows the older ones apart.
    asynchronous = "age/max" in state.last
    judged = metric.name == (PARITY if asynchronous else MISMATCH)
    alarmed = metric.trouble or (judged and value is not None and value > state.mismatch_bound)
    colour = "bold red" if alarmed else metric.style
    label = "off-policy" if metric.name == MISMATCH and asynchronous else metric.label
    values = state.values(metric.name)
    # What changes by less than is shown is constant to who reads it.
    constant = bool(values) and metric.show(min(values)) == metric.show(max(values))
    return row(
        (f"{label:<10}", "bright_black"),
        (f"{metric.show(value):>9}", "bold red" if alarmed else "bold"),
        (" ▲" if alarmed else "  ", colour),
        (spark([0.0] * len(values) if constant else values, min(width - 21, 40)), colour),
    )
