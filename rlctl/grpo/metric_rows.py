"""Names and descriptions of the metrics of a GRPO step and of validation. `metrics.py` computes the values.

Metrics of losses are in `losses/sections.py`.
"""

from typing import TYPE_CHECKING

from rlctl.config.plugins import ENVIRONMENT_REWARD, OVERLONG, reward_names
from rlctl.preflight.declared_columns import phase_of
from rlctl.preflight.roles import TEACHER, scoring_roles
from rlctl.telemetry.clock import PHASES
from rlctl.telemetry.metrics import (
    AGES,
    GROUPS,
    IN_ASYNC,
    IN_GRPO,
    LEARNING,
    MISMATCH,
    SPEED,
    WITH_SAMPLES,
    Condition,
    Metric,
    PanelRow,
    ReportChart,
    ages_of_run,
    grpo_where,
    rows_where,
)
from rlctl.telemetry.resource_monitor import MEMORY
from rlctl.telemetry.throughput import IDLE

if TYPE_CHECKING:
    from rlctl.preflight.settled import Settled


def _list_scored(settled: "Settled") -> list[str]:
    """Return the names of the roles that engines of their own score."""
    return [role.name for role in scoring_roles(settled.config)]


def _with_passes(phase: str) -> Condition:
    """Return the condition that the trainer's ranks compute columns in this phase."""

    def holds(settled: "Settled") -> bool:
        models = {role for role in settled.frozen_roles if phase_of(role) == phase}
        if models and models <= {*_list_scored(settled)}:
            return False
        return phase in map(phase_of, settled.computed_columns.values())

    return grpo_where(holds, f"with a column that the trainer's ranks compute in the phase {phase}")


def _rewards(settled: "Settled") -> list[str]:
    """Return the names of a run's rewards, including the length penalty and the environment's reward."""
    assert settled.grpo
    config = settled.grpo.config
    names = reward_names(config.rewards)
    if config.grpo.overlong.penalty_tokens:
        names.append(OVERLONG)
    if config.has_turns:
        names.append(ENVIRONMENT_REWARD)
    return names


_WITH_FILTER = grpo_where(
    lambda settled: settled.config.grpo.dynamic_sampling.filter is not None, "with grpo.dynamic_sampling.filter"
)
_WITH_MASK = grpo_where(lambda settled: settled.config.grpo.overlong.mask, "with grpo.overlong.mask=true")
_WITH_PARITY = grpo_where(
    lambda settled: settled.config.compares_apart, "with async.enabled=true, generation.top_p or generation.top_k"
)
_WITH_ENGINES = grpo_where(
    lambda settled: settled.config.generation.num_engines > 1, "with generation.num_engines above 1"
)
_WITH_SEVERAL_ANSWERS = Condition(
    lambda settled: settled.sampling is not None and settled.sampling.config.validation.num_generations > 1,
    "with validation.num_generations above 1",
)
_ACCURACY = ReportChart(LEARNING, "Accuracy", 10)
_REWARD = ReportChart(LEARNING, "Reward", 20)
_LENGTH = ReportChart(LEARNING, "Response length", 80)
_NOTHING = ReportChart(LEARNING, "Nothing to learn", 100)
_ADVANTAGE = ReportChart(LEARNING, "Advantages", 150)
_FAILED = ReportChart(LEARNING, "Failed rewards", 160)
_GROUPS = ReportChart(GROUPS, "Groups of a step", 20)
_TOKENS = ReportChart(GROUPS, "Tokens of a step", 10)
_UNTRAINED = ReportChart(GROUPS, "Tokens not trained", 40)
_LEFT_OUT = ReportChart(GROUPS, "Rollouts left out", 60)
_AGE = ReportChart(AGES, "Age, steps", 30)
_ENGINE_RATES = ReportChart(SPEED, "An engine while it samples, tokens/s", 30)

_TEACHER_ON_ENGINES = grpo_where(
    lambda settled: TEACHER in map(phase_of, _list_scored(settled)), "with teacher.place=engines"
)
_ON_ENGINES = grpo_where(lambda settled: bool(_list_scored(settled)), "with a teacher or reward model on engines")

# The formatter is off, so that each metric takes few lines.
# fmt: off
REWARD = Metric("reward/mean", "mean reward of the step's rollouts that were scored", chart=_REWARD,
    panel=[PanelRow("reward", 40, "green")])
FAILED_REWARDS = Metric("reward/failed",
    "rollouts without a score, because a reward raised, timed out or gave no finite number", chart=_FAILED)
FAILED_SHARE = Metric("reward/failed_share",
    "share of the step's rollouts without a score (health.max_failed_reward_share)", "share",
    chart=ReportChart(LEARNING, "Share of failed rewards", 170),
    panel=[PanelRow("rew failed", 10, "bold red", failure=True)])
ACCURACY = Metric("reward/accuracy",
    "share of scored rollouts answered right, by the reward that decides (rewards.N.correct_at)", "share",
    chart=_ACCURACY, panel=[PanelRow("accuracy", 50, "green")])
HELD_OUT_ACCURACY = Metric("validation/accuracy",
    "share of scored held-out answers that are right, by the reward that decides", "share", chart=_ACCURACY,
    panel=[PanelRow("validation", 60, "magenta", algorithm="grpo"),
        PanelRow("accuracy", 60, "magenta", algorithm="sft")])
PASS_AT_K = Metric("validation/pass_at_k",
    "share of held-out prompts with at least one right answer among k; prompts without a score do not count", "share",
    chart=_ACCURACY,
    panel=[PanelRow("pass@k", 250, "magenta", algorithm="grpo"), PanelRow("pass@k", 70, "magenta", algorithm="sft")],
    when=_WITH_SEVERAL_ANSWERS)
HELD_OUT_REWARD = Metric("validation/reward", "mean reward of the held-out answers that were scored", chart=_REWARD,
    panel=[PanelRow("reward", 80, "magenta", algorithm="sft")])
HELD_OUT_PROMPTS = Metric("validation/prompts", "held-out prompts", chart=None)
PARITY = Metric("mismatch/parity",
    "mismatch/token_mult_prob_error of a few tokens that are sampled without top_p and top_k and compared under equal "
    "weights", "factor", chart=ReportChart(MISMATCH, "Mismatch", 11),
    panel=[PanelRow("parity", 130)], when=_WITH_PARITY)
FIRST_CLIPPED = Metric("ratio/clipped_first",
    "share of tokens clipped or masked in a step's first update, before the policy has moved", "share")
NON_FINITE = Metric("rollouts/non_finite", "rollouts that are not trained because a log-prob is NaN or infinite",
    chart=_LEFT_OUT)
LENGTH = Metric("length/mean", "mean length of a response, tokens", chart=_LENGTH, panel=[PanelRow("length", 100)])
UNIFORM_GROUPS = Metric("groups/uniform", "share of groups whose rewards are all equal", "share", chart=_NOTHING,
    panel=[PanelRow("uniform", 220)])
PROMPT_TOKENS = Metric("tokens/prompt", "prompt tokens of the step's rollouts", chart=_TOKENS)
GENERATED_TOKENS = Metric("tokens/generated",
    "generated tokens of the step's rollouts, including groups that were replaced", chart=_TOKENS.with_place(11))
SAMPLED_TOKENS = Metric("tokens/sampled", "tokens that the generator sampled during the step, for this or later steps",
    chart=_TOKENS.with_place(13))
AGE = Metric("age/mean", "mean age of the trained groups: steps since the weights that sampled the oldest token",
    chart=_AGE)
GREATEST_AGE = Metric("age/max", "greatest age of a trained group, never above async.max_trajectory_age_steps",
    chart=_AGE.with_place(31))
MIXED_VERSIONS = Metric("age/mixed", "share of rollouts whose tokens come from more than one weight version", "share",
    chart=ReportChart(AGES, "Mixed versions", 40))
IDLEST_ENGINE = Metric("engines/idle_most",
    "share of the step in which the most idle of several engines sampled nothing", "share",
    chart=ReportChart(SPEED, "Idle", 41))
GENERATOR_SEQUENCES = Metric("generator/sequences", "mean number of sequences that an engine decodes in one step",
    chart=ReportChart(SPEED, "Engine's batch", 60))
DECODE_STEP = Metric("generator/decode_step",
    "mean seconds in which an engine samples one token of each of its sequences", "seconds",
    chart=ReportChart(SPEED, "Step of an engine", 70))
SLOWEST_ENGINE = Metric("engines/slowest", "number of the slowest engine, N in engine-N")
REPLACED_GROUPS = Metric("groups/replaced", "groups that teach nothing and that another sampled group replaced",
    chart=_GROUPS.with_place(23))
SURPLUS_GROUPS = Metric("groups/surplus", "groups that a synchronous step began in reserve and left to the next step",
    chart=ReportChart(GROUPS, "Groups put off", 30))
SURPLUS_TOKENS = Metric("tokens/surplus", "generated tokens of groups that were put off", chart=_UNTRAINED)
WASTED_TOKENS = Metric("tokens/wasted",
    "share of all generated tokens in groups that teach nothing or were put off", "share",
    chart=ReportChart(GROUPS, "Wasted tokens", 50), panel=[PanelRow("wasted", 230)])
_ROLE_ROWS = (
    Metric("time/log_probs", "seconds of the passes of the policy and of the reference", "seconds", chart=PHASES,
        when=_with_passes("log_probs")),
    Metric("time/teacher", "seconds of the teacher's passes in the trainer's ranks, before the update", "seconds",
        chart=PHASES, when=_with_passes("teacher")),
    Metric("time/critic", "seconds of the critic's passes and of its updates", "seconds", chart=PHASES,
        when=_with_passes("critic")),
    Metric("time/roles", "seconds of the passes of further models in the trainer's ranks", "seconds", chart=PHASES,
        when=_with_passes("roles")),
    Metric("time/idle_teacher", "seconds in which the trainer waited for scores of the teacher's engines", "seconds",
        chart=PHASES, when=_TEACHER_ON_ENGINES),
    *rows_where(
        _ON_ENGINES,
        Metric("idle/NAME", "share of the step in which the engines of a frozen model scored nothing", "share",
            chart=IDLE.with_place(42), parts=_list_scored),
        Metric("memory/NAME_gib", "memory of an engine that scores with a frozen model, GiB", chart=MEMORY,
            parts=_list_scored),
    ),
)
_LEARNING_ROWS = (
    REWARD,
    Metric("reward/std", "standard deviation of the rewards of the step's rollouts that were scored",
        chart=ReportChart(LEARNING, "Spread of rewards", 40)),
    ACCURACY, FAILED_REWARDS, FAILED_SHARE,
    Metric("reward/NAME/mean", "mean of one reward, before its weight",
        chart=ReportChart(LEARNING, "Rewards by name", 30), parts=_rewards),
    Metric("reward/NAME/failed", "rollouts for which one reward failed", chart=_FAILED.with_place(161),
        parts=_rewards),
    Metric("source/NAME/share", "share of the step's groups whose task is from one source (data.train.sources)",
        "share"),
    Metric("source/NAME/accuracy", "reward/accuracy of the tasks from one source", "share"),
    Metric("source/NAME/reward", "reward/mean of the tasks from one source"),
    Metric("advantage/mean",
        "mean advantage of the trained rollouts, each averaged over its tokens", chart=_ADVANTAGE),
    Metric("advantage/std", "standard deviation of the trained rollouts' advantages", chart=_ADVANTAGE),
    Metric("advantage/zero", "share of the trained rollouts whose advantage is 0, which teach nothing", "share",
        chart=_NOTHING.with_place(101)),
    FIRST_CLIPPED, NON_FINITE,
    Metric("rollouts/masked", "rollouts that are not trained because they were cut at the limit (grpo.overlong.mask)",
        chart=_LEFT_OUT, when=_WITH_MASK),
    LENGTH,
    Metric("length/p90", "90th percentile of response lengths, tokens", chart=_LENGTH.with_place(81)),
    Metric("length/max", "longest response, tokens", chart=_LENGTH.with_place(82)),
    Metric("length/truncated", "share of responses cut at the limit", "share",
        chart=ReportChart(LEARNING, "Truncated", 90), panel=[PanelRow("truncated", 110)]),
    PARITY,
    Metric("generator/prefix_hit_share",
        "share of the prompt tokens of all turns that the engines found in their prefix caches", "share"),
)
_HELD_OUT_ROWS = (
    HELD_OUT_ACCURACY, PASS_AT_K, HELD_OUT_REWARD, HELD_OUT_PROMPTS,
    Metric("validation/length", "mean length of a held-out response, tokens", chart=_LENGTH.with_place(83)),
    Metric("validation/NAME/share", "share of the held-out groups whose task is from one source (data.train.sources)",
        "share"),
    Metric("validation/NAME/accuracy", "validation/accuracy of the tasks from one source", "share"),
    Metric("validation/NAME/reward", "validation/reward of the tasks from one source"),
)
_GROUP_ROWS = (
    UNIFORM_GROUPS,
    PROMPT_TOKENS,
    GENERATED_TOKENS,
    *rows_where(
        _WITH_FILTER,
        Metric("groups/trained", "groups that the step trained on", chart=_GROUPS),
        Metric("groups/missing", "groups that the step lacked to be full", chart=_GROUPS.with_place(21),
            panel=[PanelRow("missing", 240)]),
        Metric("groups/filtered", "groups that teach nothing (grpo.dynamic_sampling.filter)",
            chart=_GROUPS.with_place(22)),
        REPLACED_GROUPS, SURPLUS_GROUPS,
        Metric("tokens/filtered", "generated tokens of groups that teach nothing", chart=_UNTRAINED),
        SURPLUS_TOKENS, WASTED_TOKENS,
    ),
)
_ASYNC_ROWS = (
    SAMPLED_TOKENS,
    Metric("length/sampled_mean", "mean length of all responses sampled during the step, trained or not, tokens"),
    Metric("length/sampled_p90", "90th percentile of the lengths of all responses sampled during the step, tokens"),
    AGE, GREATEST_AGE,
    Metric("age/token_mean", "mean age of the trained tokens, steps", chart=_AGE.with_place(32)),
    MIXED_VERSIONS,
    Metric("age/groups_K", "trained groups of age K",
        chart=ReportChart(AGES, "Trained groups by age", 10, stacked=True), parts=ages_of_run),
    Metric("buffer/age_K", "groups in the rollout buffer at the step's end that were admitted K steps before",
        chart=ReportChart(AGES, "Groups on their way, by age", 20, stacked=True), parts=ages_of_run),
    Metric("buffer/target", "number of groups that the rollout buffer keeps, to keep the trainer busy (async.prefetch)",
        chart=ReportChart(AGES, "Groups kept on their way", 50)),
    GENERATOR_SEQUENCES, DECODE_STEP,
)
MEDIAN_ENGINE_RATE = Metric("engines/rate_median",
    "tokens/s of the median engine while it sampled", chart=_ENGINE_RATES)
SLOWEST_ENGINE_RATE = Metric("engines/rate_slowest", "tokens/s of the slowest engine while it sampled",
    chart=_ENGINE_RATES)
_ENGINE_ROWS = (
    MEDIAN_ENGINE_RATE, SLOWEST_ENGINE_RATE, SLOWEST_ENGINE, IDLEST_ENGINE,
)
METRICS = (
    *rows_where(IN_GRPO, *_LEARNING_ROWS),
    *rows_where(IN_GRPO, *_GROUP_ROWS),
    *_ROLE_ROWS,
    *rows_where(WITH_SAMPLES, *_HELD_OUT_ROWS),
    *rows_where(IN_ASYNC, *_ASYNC_ROWS),
    *rows_where(_WITH_ENGINES, *_ENGINE_ROWS),
)
# fmt: on
