"""Names and descriptions of the metrics of rewards that are models, and of programs that rewards test."""

from rlctl.config.grpo_schema import ProgramRewardSection
from rlctl.config.plugins import model_rewards
from rlctl.telemetry.metrics import LEARNING, SPEED, Metric, PanelRow, ReportChart, grpo_where, rows_where

_WITH_REWARD_MODEL = grpo_where(lambda settled: bool(model_rewards(settled.config.rewards)), "with a reward model")
_WITH_PROGRAMS = grpo_where(
    lambda settled: any(isinstance(reward, ProgramRewardSection) for reward in settled.config.rewards),
    "with the reward python_tests",
)
_LIMITS = ReportChart(LEARNING, "Programs at a limit", 180)
_SANDBOXES = ReportChart(SPEED, "Sandboxes of a step", 60)

# The formatter is off, so that each metric takes few lines.
# fmt: off
MODEL_TOKENS = Metric("reward_model/tokens", "tokens that reward models valued, each conversation of the step once",
    chart=ReportChart(SPEED, "Tokens of reward models", 80))
MODEL_SECONDS = Metric("reward_model/seconds", "seconds in which the step waited for values of reward models",
    "seconds", chart=ReportChart(SPEED, "Reward models", 81), panel=[PanelRow("rew model", 260)])
MODEL_TOO_LONG = Metric("reward_model/too_long",
    "rollouts that failed because their conversation was too long for a reward model (rewards.N.max_length)",
    chart=ReportChart(LEARNING, "Too long for reward models", 171))
METRICS = (
    *rows_where(_WITH_REWARD_MODEL, MODEL_TOKENS, MODEL_SECONDS, MODEL_TOO_LONG),
    *rows_where(
    _WITH_PROGRAMS,
    Metric("programs/scored", "programs that were scored since the last step, held-out ones included",
        chart=_SANDBOXES.with_place(61)),
    Metric("programs/per_second", "programs scored in a second of scoring, those of the cache included",
        chart=ReportChart(SPEED, "Programs a second", 50), panel=[PanelRow("programs/s", 190)]),
    Metric("programs/cached", "share of programs whose result was known from an equal one", "share",
        chart=ReportChart(SPEED, "Programs from the cache", 70), panel=[PanelRow("cached", 191)]),
    Metric("programs/sandbox_seconds", "seconds of all sandboxes together, some of which ran at one time", "seconds",
        chart=ReportChart(SPEED, "Seconds in sandboxes", 55)),
    Metric("programs/sandboxes", "sandboxes that were started", chart=_SANDBOXES),
    Metric("programs/repeated", "programs that got a sandbox of their own, since one of their group ended abnormally",
        chart=_SANDBOXES.with_place(62)),
    Metric("programs/sandbox_failures", "calls of a sandbox that failed; each was tried once more",
        chart=_SANDBOXES.with_place(63), panel=[PanelRow("sandbox", 31, "bold red", failure=True)]),
    Metric("programs/near_limit", "share of programs that used at least 80% of the CPU time of a test", "share",
        chart=_LIMITS),
    Metric("programs/limit/NAME",
        "share of programs that a limit ended: cpu, wall, memory, processes, output, files", "share",
        chart=_LIMITS, panel=[PanelRow("", 192, used=True)]),
    ),
)
# fmt: on
