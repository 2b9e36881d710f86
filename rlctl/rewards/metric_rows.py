"""Names and descriptions of the metrics of rewards that are models."""

from rlctl.config.plugins import model_rewards
from rlctl.telemetry.metrics import LEARNING, SPEED, Metric, PanelRow, ReportChart, grpo_where, rows_where

_WITH_REWARD_MODEL = grpo_where(lambda settled: bool(model_rewards(settled.config.rewards)), "with a reward model")

# The formatter is off, so that each metric takes few lines.
# fmt: off
MODEL_TOKENS = Metric("reward_model/tokens", "tokens that reward models valued, each conversation of the step once",
    chart=ReportChart(SPEED, "Tokens of reward models", 80))
MODEL_SECONDS = Metric("reward_model/seconds", "seconds in which the step waited for values of reward models",
    "seconds", chart=ReportChart(SPEED, "Reward models", 81), panel=[PanelRow("rew model", 260)])
MODEL_TOO_LONG = Metric("reward_model/too_long",
    "rollouts that failed because their conversation was too long for a reward model (rewards.N.max_length)",
    chart=ReportChart(LEARNING, "Too long for reward models", 171))
METRICS = rows_where(_WITH_REWARD_MODEL, MODEL_TOKENS, MODEL_SECONDS, MODEL_TOO_LONG)
# fmt: on
