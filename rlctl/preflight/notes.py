"""Notes on a config that can run, for example on overrides without effect. Pure.

A note on `checkpoint.metric` tells that no best checkpoint can be found. The metric must be measured with the saved
weights: in the record of the checkpoint's step, or in its validation.
"""

from rlctl.config.builtin import is_shipped
from rlctl.config.errors import did_you_mean
from rlctl.config.provenance import Origin
from rlctl.config.schema import GrpoConfig, RunConfig
from rlctl.preflight.backend import backend_of
from rlctl.preflight.check_adapters import adapter_notes
from rlctl.preflight.check_recipe import recipe_notes
from rlctl.preflight.check_trainer import GENERATION, LOG_PROBS
from rlctl.preflight.declared_columns import users_metrics
from rlctl.preflight.settled import Settled, SettledGrpo
from rlctl.preflight.written_roles import written_roles
from rlctl.telemetry.metrics import Metric, MetricTable, installed_rows

# Largest bound on age without a note. AReaL (arXiv 2505.24298, table 3): with the decoupled objective a lag of up to 4
# steps cost no accuracy.
WISE_AGE = 4
_HELD_OUT = "validation/"


def notes(settled: Settled, origins: dict[str, Origin]) -> list[str]:
    """Return the notes on a config. Only overrides get "no effect" notes, because a resolved config has every key."""
    config = settled.config
    grpo = settled.grpo
    overrides = {key: origin for key, origin in origins.items() if origin.override}
    idle_keys = backend_of(config.trainer).idle_keys(config.trainer) | _idle_offload_keys(settled)
    idle_keys |= _idle_teacher_keys(config)
    if grpo:
        idle_keys |= _idle_grpo_keys(grpo)
        if not grpo.config.async_.enabled:
            async_keys = (key for key in overrides if key.startswith("async."))
            idle_keys |= dict.fromkeys(async_keys, "async.enabled is false")
    lines = [f"{overrides[key]}: no effect while {reason}" for key, reason in idle_keys.items() if key in overrides]
    if grpo:
        lines += _age_notes(grpo.config, overrides.get("async.max_trajectory_age_steps"))
        lines += _advantage_notes(grpo.config)
    if settled.sft:
        lines += recipe_notes(settled.sft.config)
    lines += adapter_notes(settled)
    lines += _held_out_notes(settled, origins)
    lines += _checkpoint_notes(settled)
    return lines


def _age_notes(config: GrpoConfig, override: Origin | None) -> list[str]:
    """Return notes on a bound on the age of rollouts that does harm. override: the override that sets the bound, if
    any.
    """
    rules = config.async_
    lines = []
    if override and rules.max_age > WISE_AGE:
        lines.append(f"{override}: a lag above {WISE_AGE} steps costs accuracy (AReaL, arXiv 2505.24298, table 3)")
    if rules.max_age > 1 and not rules.in_flight_weight_updates:
        effect = "rollouts end before each update, so a bound above 1 makes groups older and engines no busier; set 1"
        key = f"async.max_trajectory_age_steps={rules.max_trajectory_age_steps}"
        lines.append(f"{key}: async.in_flight_weight_updates is false: {effect}")
    return lines


def _idle_teacher_keys(config: RunConfig) -> dict[str, str]:
    """Return dotted key -> reason, of the keys of teachers and of their term that have no effect in this run."""
    reasons: dict[str, str] = {}
    for name, role in written_roles(config).items():
        if role.place != "engines":
            keys = (f"{name}.num_engines", f"{name}.tensor_parallel_size")
            reasons |= dict.fromkeys(keys, f"{name}.place is {role.place}")
    term = config.distillation
    if term is None:
        return reasons
    section = f"{config.kind}.loss.distillation"
    if term.over == "sampled":
        reasons |= dict.fromkeys((f"{section}.divergence", f"{section}.beta"), f"{section}.over is sampled")
    else:
        reasons[f"{section}.log_ratio_floor"] = f"{section}.over is {term.over}"
        if term.divergence != "jensen_shannon":
            reasons[f"{section}.beta"] = f"{section}.divergence is {term.divergence}"
    if term.over != "top_k":
        reasons |= dict.fromkeys((f"{section}.num_top_tokens", f"{section}.rest"), f"{section}.over is {term.over}")
    return reasons


def _idle_grpo_keys(settled: SettledGrpo) -> dict[str, str]:
    """Return dotted key -> reason, of the GRPO keys that have no effect in this run."""
    config = settled.config
    grpo = config.grpo
    reasons: dict[str, str] = {}
    if settled.on_policy_ratio:
        # The proximal policy is the policy itself, so the ratio is 1 and is never clipped.
        clip_keys = ("grpo.loss.clip_low", "grpo.loss.clip_high", "grpo.loss.dual_clip")
        reasons |= dict.fromkeys(clip_keys, "the ratio is 1: proximal recompute with one update a step")
    if grpo.loss.kl_coef == 0:
        reasons |= dict.fromkeys(("grpo.loss.kl_estimator", "grpo.loss.kl_max"), "grpo.loss.kl_coef is 0")
    if "reference" not in settled.frozen_roles:
        reasons |= dict.fromkeys(("reference.path", "reference.place"), "grpo.loss.kl_coef is 0")
    if grpo.loss.distillation is not None and not settled.learns_from_rewards:
        reasons["grpo.advantage.name"] = "no reward has a weight"
    if settled.proximal == "rollout":
        ratio_keys = ("grpo.loss.force_on_policy_ratio", "grpo.loss.importance_cap")
        reasons |= dict.fromkeys(ratio_keys, "grpo.loss.proximal is rollout")
    if grpo.dynamic_sampling.filter is None:
        reasons["grpo.dynamic_sampling.max_extra"] = "grpo.dynamic_sampling.filter is null"
    if grpo.overlong.penalty_tokens is None:
        reasons["grpo.overlong.penalty"] = "grpo.overlong.penalty_tokens is null"
    if config.async_.streamed_training and not settled.streams_training:
        reasons["async.streamed_training"] = _why_not_streamed(settled)
    if config.refit.transport == "shm":
        reasons["refit.num_buffers"] = "refit.transport is shm"
    if config.trainer.optimizer.schedule == "constant":
        reasons["trainer.optimizer.min_lr_ratio"] = "the schedule is constant"
    if not config.compares_apart:
        reasons["health.parity_every"] = "a step's own tokens tell the mismatch"
    if config.validation.every == 0:
        reasons["validation.temperature"] = "validation.every is 0"
    return reasons


def _why_not_streamed(settled: SettledGrpo) -> str:
    """Return why training cannot begin before all groups of a step are sampled."""
    grpo = settled.config.grpo
    if grpo.updates_per_step > 1:
        return f"grpo.updates_per_step is {grpo.updates_per_step}"
    if settled.advantage_scope == "batch":
        return f"grpo.advantage.name is {grpo.advantage.name}, which depends on all groups of the step"
    if not settled.computed_columns:
        return "a reward model values the rollouts of a step together"
    return f"{', '.join(settled.computed_columns)} is computed for the whole step before its update"


def _advantage_notes(config: GrpoConfig) -> list[str]:
    """Return notes on an advantage that equals a simpler one, or on a filter that drops useful groups."""
    name = config.grpo.advantage.name
    filter_name = config.grpo.dynamic_sampling.filter
    key = f"grpo.advantage.name={name}"
    lines = []
    if name == "gdpo" and len(config.rewards) == 1 and config.grpo.overlong.penalty_tokens is None:
        lines.append(f"{key}: with one reward it is group_mean with normalize_std, normalised over the step once more")
    has_no_baseline = name == "batch_normalized" and getattr(config.grpo.advantage, "baseline", "") == "none"
    if filter_name and (name == "gdpo" or has_no_baseline):
        groups = "rewards differ though their sums are equal" if name == "gdpo" else "all rewards are equal"
        effect = f"leaves out groups whose {groups}, which would teach"
        lines.append(f"{key}: grpo.dynamic_sampling.filter={filter_name} {effect}")
    return lines


def _idle_offload_keys(settled: Settled) -> dict[str, str]:
    """Return dotted key -> reason, of the offload switches that are on and move nothing in this run."""
    trainer = settled.config.trainer
    reasons = {}
    if trainer.offload_optimizer_for_logprob:
        if settled.sft:
            reasons[LOG_PROBS] = "kind is sft"
        elif "log_probs" not in settled.phases:
            reasons[LOG_PROBS] = "no log-probs are computed before an update"
        elif trainer.offload_optimizer_for_generation and settled.shares_devices:
            reasons[LOG_PROBS] = f"{GENERATION} keeps it on the host until the update"
    if trainer.offload_optimizer_for_generation and not settled.shares_devices:
        reasons[GENERATION] = "engines have devices of their own" if settled.sampling else "kind is sft"
    return reasons


def _held_out_notes(settled: Settled, origins: dict[str, Origin]) -> list[str]:
    """Return a note if data.train is the user's own, and a shipped recipe's held-out rows measure it."""
    train_origin = origins.get("data.train.path", Origin())
    held_out_origin = origins.get("data.validation.path", Origin())
    data = settled.config.data
    is_own = train_origin.override > 0 or (train_origin.file is not None and not is_shipped(train_origin.file))
    is_recipes = held_out_origin.file is not None and is_shipped(held_out_origin.file)
    if not (settled.validates and data.train.path and data.validation.path and is_own and is_recipes):
        return []
    remedy = "data.validation.path=null data.validation.fraction=0.05 holds rows of data.train out"
    return [f"data.validation.path: {held_out_origin}: validation measures that recipe's own rows; {remedy}"]


def _checkpoint_notes(settled: Settled) -> list[str]:
    """Return a note if the best checkpoints cannot be found, because their metric is never measured, or not at their
    steps.
    """
    section = settled.config.checkpoint
    validation_interval = settled.config.validation.every
    metric = section.metric.removeprefix("-")
    if not section.keep_best:
        return []
    if reason := _why_not_measured(settled, metric):
        return [f"checkpoint.metric={section.metric}: {reason}; no best checkpoint is kept"]
    if not settled.validates or not metric.startswith(_HELD_OUT):
        return []
    saved_steps = range(section.every, settled.config.num_steps, section.every) if section.every else range(0)
    unvalidated = sum(step % validation_interval > 0 for step in saved_steps)
    if unvalidated == 0:
        return []
    uneven = f"checkpoint.every={section.every} is no multiple of validation.every={validation_interval}"
    lost = f"{unvalidated} of {len(saved_steps)} checkpoints on the way have no {metric}"
    return [f"{uneven}: {lost} and can never be the best"]


def _why_not_measured(settled: Settled, name: str) -> str:
    """Return why this run does not measure the metric `name`; empty if it does."""
    users_rows = users_metrics(settled.grpo.config) if settled.grpo else []
    table = MetricTable([*installed_rows().rows, *users_rows])
    metric = table.find(name)
    if metric is None or not _has_part(settled, metric, name):
        measured_names: list[str] = []
        for row in table.rows:
            if _is_measured(settled, row):
                measured_names += _metric_names(settled, row)
        return f"no such metric is measured{did_you_mean(name, measured_names)}"
    if metric.when and not metric.when.holds(settled):
        return f"it is measured only {metric.when.where}"
    return ""


def _is_measured(settled: Settled, row: Metric) -> bool:
    return row.when is None or row.when.holds(settled)


def _metric_names(settled: Settled, row: Metric) -> list[str]:
    """Return the metric names of one table row in this run. A row of a family has several; none if they are not known
    yet.
    """
    if not row.is_family:
        return [row.name]
    parts = row.parts(settled) if row.parts else ()
    return [row.name_of(part) for part in parts]


def _has_part(settled: Settled, row: Metric, name: str) -> bool:
    """Return True if `name` is one of the row's metrics in this run, or if this run does not measure the row."""
    if row.parts is None or not _is_measured(settled, row):
        return True
    return name in _metric_names(settled, row)
