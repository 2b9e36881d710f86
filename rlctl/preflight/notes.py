"""Notes on a config, no reason to stop: overrides without effect, lost best checkpoints.

A checkpoint is ranked by metrics of the saved weights alone, in its step's record or its validation. Pure.
"""

from rlctl.config.errors import did_you_mean
from rlctl.config.provenance import Origin
from rlctl.config.schema import GrpoConfig
from rlctl.preflight.backend import backend_of
from rlctl.preflight.check_adapters import adapter_notes
from rlctl.preflight.check_recipe import recipe_notes
from rlctl.preflight.check_trainer import GENERATION, LOG_PROBS
from rlctl.preflight.declared_columns import users_metrics
from rlctl.preflight.settled import Settled, SettledGrpo
from rlctl.telemetry.metrics import Metric, MetricTable, installed

# AReaL, arXiv 2505.24298, table 3: with the decoupled objective a lag of up to 4 cost no accuracy.
WISE_AGE = 4
_HELD_OUT = "validation/"


def notes(settled: Settled, origins: dict[str, Origin]) -> list[str]:
    """Return the notes. Only overrides are said to change nothing: a resolved config writes every value."""
    config, grpo, sft = settled.config, settled.grpo, settled.sft
    given = {key: origin for key, origin in origins.items() if origin.override}
    idle: dict[str, str | bool | None] = {**backend_of(config.trainer).idle_keys(config.trainer)}
    idle |= _idle_offload(settled)
    if grpo:
        idle |= _idle_grpo(grpo)
        if not grpo.config.async_.enabled:
            idle |= dict.fromkeys((key for key in given if key.startswith("async.")), "async.enabled is false")
    said = [f"{given[key]}: no effect while {why}" for key, why in idle.items() if why and key in given]
    if grpo:
        said += _age_notes(grpo.config, given.get("async.max_trajectory_age_steps")) + _advantage_notes(grpo.config)
    if sft:
        said += recipe_notes(sft.config)
    return [*said, *adapter_notes(settled), *_best_checkpoints(settled)]


def _age_notes(config: GrpoConfig, given: Origin | None) -> list[str]:
    """Return notes on a bound on age that costs more than it brings. given: the override that sets it."""
    rules, said = config.async_, []
    if given and rules.max_age > WISE_AGE:
        said.append(f"{given}: a lag above {WISE_AGE} steps costs accuracy (AReaL, arXiv 2505.24298, table 3)")
    if rules.max_age > 1 and not rules.in_flight_weight_updates:
        what = "rollouts end before each update, so a bound above 1 makes groups older and engines no busier; set 1"
        key = f"async.max_trajectory_age_steps={rules.max_trajectory_age_steps}"
        said.append(f"{key}: async.in_flight_weight_updates is false: {what}")
    return said


def _idle_grpo(settled: SettledGrpo) -> dict[str, str | bool | None]:
    """Return key -> the reason why it has no effect, if it has none."""
    config = settled.config
    loss, schedule, updates = config.grpo.loss, config.trainer.optimizer.schedule, config.grpo.updates_per_step
    sampling, overlong = config.grpo.dynamic_sampling, config.grpo.overlong
    rollout = settled.proximal == "rollout" and "grpo.loss.proximal is rollout"
    whole: str | None = None
    if config.async_.streamed_training and not settled.streams_training:
        whole = f"{', '.join(settled.computed_columns)} is computed for the whole step before its update"
        if settled.advantage_scope == "batch":
            whole = f"grpo.advantage.name is {config.grpo.advantage.name}, which depends on all groups of the step"
        if updates > 1:
            whole = f"grpo.updates_per_step is {updates}"
    # The policy is its own old policy then, and a clipped surrogate has nothing to clip.
    one = settled.on_policy_ratio and "the ratio is 1: proximal recompute with one update a step"
    return {
        **dict.fromkeys((f"grpo.loss.{key}" for key in ("clip_low", "clip_high", "dual_clip")), one),
        **dict.fromkeys(("grpo.loss.kl_estimator", "grpo.loss.kl_max"), loss.kl_coef == 0 and "grpo.loss.kl_coef is 0"),
        "grpo.loss.force_on_policy_ratio": rollout,
        "grpo.loss.importance_cap": rollout,
        "grpo.dynamic_sampling.max_extra": sampling.filter is None and "grpo.dynamic_sampling.filter is null",
        "grpo.overlong.penalty": overlong.penalty_tokens is None and "grpo.overlong.penalty_tokens is null",
        "async.streamed_training": whole,
        "refit.num_buffers": config.refit.transport == "shm" and "refit.transport is shm",
        "trainer.optimizer.min_lr_ratio": schedule == "constant" and "the schedule is constant",
        "health.parity_every": not config.compares_apart and "a step's own tokens tell the mismatch",
        "validation.temperature": config.validation.every == 0 and "validation.every is 0",
    }


def _advantage_notes(config: GrpoConfig) -> list[str]:
    """Return notes on an advantage that adds nothing to a simpler one, or leaves out too many groups."""
    name, by = config.grpo.advantage.name, config.grpo.dynamic_sampling.filter
    key, said = f"grpo.advantage.name={name}", []
    if name == "gdpo" and len(config.rewards) == 1 and config.grpo.overlong.penalty_tokens is None:
        said.append(f"{key}: with one reward it is group_mean with normalize_std, normalised over the step once more")
    plain = name == "batch_normalized" and getattr(config.grpo.advantage, "baseline", "") == "none"
    if by and (name == "gdpo" or plain):
        what = "rewards differ though their sums are equal" if name == "gdpo" else "all rewards are equal"
        said.append(f"{key}: grpo.dynamic_sampling.filter={by} leaves out groups whose {what}, which would teach")
    return said


def _idle_offload(settled: Settled) -> dict[str, str]:
    """Return key -> reason for switches that are on and move nothing in this run."""
    trainer, idle = settled.config.trainer, {}
    if trainer.offload_optimizer_for_logprob:
        if settled.sft:
            idle[LOG_PROBS] = "kind is sft"
        elif not settled.computed_columns:
            idle[LOG_PROBS] = "no log-probs are computed before an update"
        elif trainer.offload_optimizer_for_generation and settled.shares_devices:
            idle[LOG_PROBS] = f"{GENERATION} keeps it on the host until the update"
    if trainer.offload_optimizer_for_generation and not settled.shares_devices:
        idle[GENERATION] = "engines have devices of their own" if settled.sampling else "kind is sft"
    return idle


def _best_checkpoints(settled: Settled) -> list[str]:
    """Return a note if the best checkpoints cannot be told: their metric is never measured, or not at their steps."""
    saved, validated = settled.config.checkpoint, settled.config.validation.every
    metric = saved.metric.removeprefix("-")
    if not saved.keep_best:
        return []
    if unmeasured := _unmeasured(settled, metric):
        return [f"checkpoint.metric={saved.metric}: {unmeasured}; no best checkpoint is kept"]
    if not settled.validates or not metric.startswith(_HELD_OUT):
        return []
    on_the_way = range(saved.every, settled.config.num_steps, saved.every) if saved.every else range(0)
    if missed := sum(step % validated > 0 for step in on_the_way):
        uneven = f"checkpoint.every={saved.every} is no multiple of validation.every={validated}"
        lost = f"{missed} of {len(on_the_way)} checkpoints on the way have no {metric}"
        return [f"{uneven}: {lost} and can never be the best"]
    return []


def _unmeasured(settled: Settled, name: str) -> str:
    """Return the reason why such a run does not measure a metric; empty if it does."""
    users = users_metrics(settled.grpo.config) if settled.grpo else []
    table = MetricTable([*installed().rows, *users])
    row = table.find(name)
    if row is None or not _has_part(settled, row, name):
        known = [each for row in table.rows if _is_measured(settled, row) for each in _names(settled, row)]
        return f"no such metric is measured{did_you_mean(name, known)}"
    if row.when and not row.when.holds(settled):
        return f"it is measured only {row.when.where}"
    return ""


def _is_measured(settled: Settled, row: Metric) -> bool:
    return row.when is None or row.when.holds(settled)


def _names(settled: Settled, row: Metric) -> list[str]:
    """Return the names that a row stands for in such a run; none if they are not known yet."""
    if not row.is_family:
        return [row.name]
    parts = row.parts(settled) if row.parts else ()
    return [row.name_of(part) for part in parts]


def _has_part(settled: Settled, row: Metric, name: str) -> bool:
    """Return True if the name is one that the row stands for in such a run, were it measured."""
    if row.parts is None or not _is_measured(settled, row):
        return True
    return name in _names(settled, row)
