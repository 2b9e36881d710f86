"""Checks of the GRPO keys: rewards, sampling, engines, asynchronous runs and their off-policy corrections.

`importance_cap` without `proximal: recompute` is a note (`notes.py`), not an error. The cap is in configs/grpo.yaml, so
that setting `recompute` is enough to correct. With `rollout` the ratio is taken to the policy that sampled, so there is
nothing to correct, and `updates_per_step` above 1 is allowed. `top_p` or `top_k` with `rollout` is an error: the engine
then returns log-probs of the truncated distribution. They are larger than the trainer's, so every ratio is below 1
before the policy has changed. With `recompute` the importance weight contains the truncation, so the lower bound of a
mask must be below `top_p`.
"""

from contextlib import suppress

from rlctl.config.errors import BrokenValueError
from rlctl.config.fields import keys_of, literals
from rlctl.config.grpo_schema import AdvantageSection, LossSection, UserClassSection, UserEngineSection
from rlctl.config.plugin_options import load_plugin, plugin_options
from rlctl.config.plugins import (
    ADVANTAGE_BASE,
    ADVANTAGES,
    ENGINES,
    LOSS_BASE,
    LOSSES,
    OVERLONG,
    model_rewards,
    reward_names,
)
from rlctl.config.schema import GrpoConfig
from rlctl.preflight.backend import Violation, Violations
from rlctl.preflight.check_inputs import check_reward, missing_plugin
from rlctl.preflight.declared_columns import ADVANTAGE, columns_problem, missing_columns
from rlctl.preflight.engine_rules import check_engine_options, engine_rules
from rlctl.preflight.settled import SettledGrpo
from rlctl.telemetry.metrics import rows_problem
from rlctl.utils.user_code import load_object

_PROXIMAL = "grpo.loss.proximal"
_ADVANTAGE = "grpo.advantage"


def check_rewards(config: GrpoConfig) -> Violations:
    """Find rewards with wrong keys, and contradictions between several rewards."""
    needs_reward = not config.has_turns and config.grpo.loss.distillation is None
    if not config.rewards and needs_reward:
        message = "is empty: at least one reward, for example `- name: exact`, or grpo.loss.distillation with a teacher"
        yield Violation("rewards", message, ("grpo.loss.distillation",))
        return
    for index, reward in enumerate(config.rewards):
        with suppress(BrokenValueError):
            for key, message in check_reward(reward):
                yield Violation(f"rewards.{index}.{key}", message)
    if model_rewards(config.rewards) and config.grpo.dynamic_sampling.filter is not None:
        message = "must be null with a reward model: its values come once all groups of a step are sampled"
        yield Violation("grpo.dynamic_sampling.filter", message, ("rewards",))
    deciding = [index for index, reward in enumerate(config.rewards) if reward.correct_at is not None]
    if len(deciding) > 1:
        message = f"one reward decides what is right; rewards.{deciding[0]} has a correct_at too: leave one at null"
        yield Violation(f"rewards.{deciding[1]}.correct_at", message)
    if needs_reward and all(reward.weight == 0 for reward in config.rewards):
        yield Violation("rewards.0.weight", "the weights are all 0: nothing would be learnt")


def check_algorithm(settled: SettledGrpo, away: bool) -> Violations:
    """Find a missing loss or advantage. Import a user's class and find its wrong keys.

    away: the run will be on another machine, so that the class is not imported here.
    """
    config = settled.config
    class_sections: list[tuple[str, LossSection | AdvantageSection, dict[str, str], str]] = [
        ("grpo.loss", config.grpo.loss, LOSSES, LOSS_BASE),
        (_ADVANTAGE, config.grpo.advantage, ADVANTAGES, ADVANTAGE_BASE),
    ]
    for key, section, known_names, base in class_sections:
        if message := missing_plugin(section.name, known_names, "Class"):
            yield Violation(f"{key}.name", message)
        elif isinstance(section, UserClassSection) and not away:
            plugin, message = load_plugin(section.name, base)
            if plugin is None:
                yield Violation(f"{key}.name", message)
                continue
            missing = missing_columns(config)
            if key == _ADVANTAGE:
                missing[ADVANTAGE.name] = "an advantage cannot read itself"
            if problem := columns_problem(getattr(plugin, "columns", ()), missing, config.roles):
                yield Violation(f"{key}.name", problem)
            if problem := rows_problem(getattr(plugin, "metrics", ())):
                yield Violation(f"{key}.name", problem)
            _, option_problems = plugin_options(plugin, load_object(base), section.further, key)
            for option_problem in option_problems:
                yield Violation(option_problem.key, option_problem.what, (f"{key}.name",))


def check_advantage(settled: SettledGrpo) -> Violations:
    """Find an advantage that is 0 for every rollout, for example because groups are too small."""
    config = settled.config
    if not settled.learns_from_rewards:
        if config.grpo.dynamic_sampling.filter == "rewards":
            message = "rewards leaves out every group of a run without rewards: set null"
            yield Violation("grpo.dynamic_sampling.filter", message, ("rewards",))
        return
    key = "grpo.num_generations_per_prompt"
    is_of_group = not isinstance(config.grpo.advantage, UserClassSection) and config.critic is None
    if config.grpo.num_generations_per_prompt == 1 and is_of_group:
        message = "must be at least 2, not 1: a rollout's advantage is its distance from others of its group"
        yield Violation(key, message, ("rewards", "grpo.advantage.name"))
        return
    problem = config.grpo.advantage.teaches_nothing(config.grpo.num_generations_per_prompt)
    if problem is not None:
        advantage_key, message = problem
        other_keys = (key, "grpo.advantage.name")
        yield Violation(f"grpo.advantage.{advantage_key}", message, other_keys)


def check_sampling(settled: SettledGrpo) -> Violations:
    """Find `top_p` and `top_k` that make the loss's ratios wrong."""
    config = settled.config
    if settled.proximal == "rollout":
        message = "with grpo.loss.proximal=rollout the ratios would be off; keep {}"
        # Not every loss can recompute.
        if "recompute" in literals(keys_of(type(config.grpo.loss))["proximal"].type):
            message += " or set grpo.loss.proximal=recompute"
        if config.generation.top_p < 1:
            yield Violation("generation.top_p", message.format("1"), (_PROXIMAL,))
        if config.generation.top_k > 0:
            yield Violation("generation.top_k", message.format("0"), (_PROXIMAL,))


def check_overlong(config: GrpoConfig) -> Violations:
    """Find an overlong penalty that reduces every reward, or a reward with the penalty's name."""
    key = "grpo.overlong.penalty_tokens"
    penalty_tokens = config.grpo.overlong.penalty_tokens
    longest = config.generation.max_new_tokens
    if penalty_tokens is None:
        return
    if penalty_tokens >= longest:
        message = f"must be below generation.max_new_tokens={longest}, not {penalty_tokens}"
        yield Violation(key, f"{message}: every answer would lose reward", ("generation.max_new_tokens",))
    names = reward_names(config.rewards)
    if OVERLONG in names:
        message = f"{OVERLONG} is the name of the penalty of {key} in metrics; rename the function"
        yield Violation(f"rewards.{names.index(OVERLONG)}.name", message, (key,))


def check_engines(settled: SettledGrpo, away: bool) -> Violations:
    """Find a missing engine, wrong keys of an engine, and models that it cannot sample from on these devices.

    away: the run will be on another machine, so that a user's engine is not imported here.
    """
    generation = settled.config.generation
    sizes = settled.facts
    engine = generation.engine
    if message := missing_plugin(engine.name, ENGINES, "KIND"):
        yield Violation("generation.engine.name", message)
    elif isinstance(engine, UserEngineSection) and not away:
        yield from check_engine_options(engine)
    if sizes:
        yield from engine_rules(engine).check_model(generation, sizes, settled.machine.device)


def check_async(settled: SettledGrpo) -> Violations:
    """Find values that contradict `async.enabled`."""
    config = settled.config
    rules = config.async_
    if not rules.enabled:
        return
    if config.placement.colocated:
        message = "async.enabled trains and generates at the same time, on devices of their own"
        yield Violation("placement.colocated", f"{message}; leave it null or false", ("async.enabled",))
    if rules.recompute_kv_cache_after_weight_updates and not config.generation.reset_prefix_cache_after_weight_updates:
        recomputes = "async.recompute_kv_cache_after_weight_updates"
        yield Violation(
            "generation.reset_prefix_cache_after_weight_updates",
            f"false keeps nothing with {recomputes}=true, which empties the cache; leave it true",
            (recomputes,),
        )
    loss = config.grpo.loss
    if settled.clips and settled.proximal == "rollout" and rules.max_trajectory_age_steps > 1:
        message = (
            f"rollout clips around policies up to {rules.max_trajectory_age_steps} steps old, which lets training "
            "collapse (AReaL, arXiv 2505.24298, table 3); leave it auto, or set async.max_trajectory_age_steps=1"
        )
        yield Violation(_PROXIMAL, message, ("async.max_trajectory_age_steps", "async.enabled"))
    corrections = (loss.importance_cap, loss.importance_mask, loss.sequence_mask)
    if settled.proximal == "recompute" and all(correction is None for correction in corrections):
        message = "null without a mask leaves rollouts of older versions uncorrected; the default is 2.0"
        yield Violation("grpo.loss.importance_cap", message, ("async.enabled",))


def check_corrections(settled: SettledGrpo) -> Violations:
    """Find wrong bounds of the importance masks, and masks without the `recompute` pass that gives their ratio."""
    config = settled.config
    loss = config.grpo.loss
    updates = config.grpo.updates_per_step
    top_p = config.generation.top_p
    for name, bounds in (("importance_mask", loss.importance_mask), ("sequence_mask", loss.sequence_mask)):
        key = f"grpo.loss.{name}"
        if bounds is None:
            continue
        if len(bounds) != 2 or bounds[0] >= bounds[1]:
            yield Violation(key, f"must be [low, high] with low below high, not {bounds}")
        if settled.proximal == "rollout":
            message = "needs grpo.loss.proximal=recompute: with rollout there is no such ratio"
            yield Violation(key, message, (_PROXIMAL,))
        if top_p < 1 and bounds[0] >= top_p:
            message = f"the lower bound must be below generation.top_p={top_p}, which takes proximal / rollout down to"
            yield Violation(key, f"{message} it, not {bounds[0]:g}", ("generation.top_p",))
    if loss.force_on_policy_ratio and updates > 1:
        message = f"the second of {updates} updates a step is no longer of the policy that it starts from; use null"
        yield Violation("grpo.loss.force_on_policy_ratio", message, ("grpo.updates_per_step",))
    forced_lengths = config.generation.forced_lengths
    if forced_lengths is not None and len(forced_lengths) != 2:
        yield Violation("generation.forced_lengths", f"must be [mean, sigma], not {forced_lengths}")
