"""Contradictions of asynchronous runs and of the corrections they need, as (key, what is wrong, other keys)."""

from collections.abc import Iterator

from rlctl.config.schema import GrpoConfig
from rlctl.preflight.resolved import Resolved

Found = Iterator[tuple[str, str, tuple[str, ...]]]
# AReaL, arXiv 2505.24298, table 3: with the decoupled objective a lag of up to 4 cost no accuracy.
WISE_AGE = 4


def check_async(config: GrpoConfig) -> Found:
    """What does not go with `async.enabled`."""
    rules = config.async_
    if not rules.enabled:
        return
    if config.placement.colocated:
        what = "async.enabled trains and generates at the same time, on devices of their own; leave it null or false"
        yield "placement.colocated", what, ("async.enabled",)
    if rules.max_trajectory_age_steps > 1 and not rules.in_flight_weight_updates:
        what = (
            f"{rules.max_trajectory_age_steps} needs async.in_flight_weight_updates=true: when every rollout is "
            "drained before an update, a larger bound makes groups older and the generator no busier; set 1"
        )
        yield "async.max_trajectory_age_steps", what, ("async.in_flight_weight_updates",)
    loss, key = config.grpo.loss, "grpo.loss.proximal"
    if Resolved(config).proximal == "rollout" and rules.max_trajectory_age_steps > 1:
        what = (
            f"rollout clips around policies up to {rules.max_trajectory_age_steps} steps old, which lets training "
            "collapse (AReaL, arXiv 2505.24298, table 3); leave it auto, or set async.max_trajectory_age_steps=1"
        )
        yield key, what, ("async.max_trajectory_age_steps", "async.enabled")
    corrections = (loss.importance_cap, loss.importance_mask, loss.sequence_mask)
    if Resolved(config).proximal == "recompute" and all(each is None for each in corrections):
        what = "null without a mask leaves rollouts of older versions uncorrected; the default is 2.0"
        yield "grpo.loss.importance_cap", what, ("async.enabled",)


def check_corrections(config: GrpoConfig) -> Found:
    """Masks, and the pass that `force_on_policy_ratio` leaves out."""
    loss = config.grpo.loss
    for name, bounds in (("importance_mask", loss.importance_mask), ("sequence_mask", loss.sequence_mask)):
        key = f"grpo.loss.{name}"
        if bounds is None:
            continue
        if len(bounds) != 2 or bounds[0] >= bounds[1]:
            yield key, f"must be [low, high] with low below high, not {bounds}", ()
        if Resolved(config).proximal == "rollout":
            yield (
                key,
                "needs grpo.loss.proximal=recompute: with rollout there is no such ratio",
                ("grpo.loss.proximal",),
            )
    updates = config.grpo.updates_per_step
    if loss.force_on_policy_ratio and updates > 1:
        what = f"the second of {updates} updates a step is no longer of the policy that it starts from; use null"
        yield "grpo.loss.force_on_policy_ratio", what, ("grpo.updates_per_step",)
    if (lengths := config.generation.forced_lengths) is not None and len(lengths) != 2:
        yield "generation.forced_lengths", f"must be [mean, sigma], not {lengths}", ()
