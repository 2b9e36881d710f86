"""Metrics of an update, as trainer ranks and their group measure them."""

from rlctl.preflight.roles import reads_divergence
from rlctl.telemetry.metrics import LEARNING, STEP_TIME, WEIGHT_UPDATES, Condition, Metric, PanelRow, ReportChart

_OFFLOADED = ReportChart(WEIGHT_UPDATES, "Offloaded, GB", 50)
TEACHER_CHART = ReportChart(LEARNING, "KL to the teacher", 65)
_WITH_TEACHER = Condition(
    lambda settled: settled.config.distillation is not None, "with grpo.loss.distillation or sft.loss.distillation"
)
_WITH_DIVERGENCE = Condition(
    lambda settled: reads_divergence(settled.config),
    "with a distillation over the vocabulary or the top k, from a teacher in the ranks",
)
# A table: each row fills its lines.
# fmt: off
GRAD_NORM = Metric("train/grad_norm", "gradient norm before clipping",
    chart=ReportChart(LEARNING, "Gradient norm", 110), panel=[PanelRow("grad norm", 90)])
LEARNING_RATE = Metric("train/lr", "learning rate", chart=ReportChart(LEARNING, "Learning rate", 120),
    panel=[PanelRow("learn rate", 260)])
# The loss's distillation term, in a run of either kind.
KL_TO_TEACHER = Metric("loss/teacher", "KL to the teacher, nats a token", chart=TEACHER_CHART,
    panel=[PanelRow("teacher KL", 85)], when=_WITH_TEACHER)
TEACHER_IN_UPDATE = Metric("train/teacher",
    "seconds of time/train in which the teacher computed its side of the divergence, with the copies of its weights, "
    "on the slowest rank", "seconds", chart=ReportChart(STEP_TIME, "Teacher within training", 30),
    panel=[PanelRow("teach time", 265)], over_updates="sum", when=_WITH_DIVERGENCE)
METRICS = (
    GRAD_NORM, LEARNING_RATE, KL_TO_TEACHER, TEACHER_IN_UPDATE,
    Metric("train/padding", "share of the computed tokens that fill rows up, for a model that is not packed", "share"),
    Metric("train/parts", "parts that the step was trained in, as its groups came"),
    Metric("offload/to_host_gb",
        "optimizer state and other state that a trainer rank moved to the host in the step, GB", chart=_OFFLOADED,
        over_updates="sum"),
    Metric("offload/to_device_gb", "the same back to the device, GB", chart=_OFFLOADED.with_place(51),
        over_updates="sum"),
    Metric("offload/seconds", "seconds of those copies; computing goes on during some of them", "seconds",
        chart=ReportChart(WEIGHT_UPDATES, "Offloading, seconds", 40), over_updates="sum"),
)
# fmt: on
