"""Checks of GRPO's own parts: rewards, sampling, engines, asynchronous runs and the corrections they need.

`importance_cap` without `proximal: recompute` is a note (`notes.py`), not an error. The cap is in configs/grpo.yaml, so
that switching to `recompute` corrects by itself. Under `rollout` the ratio is already taken against the policy that
sampled, and nothing is left to correct. `updates_per_step` above 1 is fine with `rollout` for the same reason. `top_p`
or `top_k` with `rollout` is an error: the generator then returns log-probs of the cut distribution. They are larger
than the trainer's, so every ratio is below 1 before the policy has changed. With `recompute` the importance weight
holds the cut, and a mask's lower bound must leave room for it.
"""

from contextlib import suppress

from rlctl.config.errors import BrokenValueError
from rlctl.config.fields import keys_of, literals
from rlctl.config.grpo_schema import AdvantageSection, LossSection, UserClassSection, UserEngineSection
from rlctl.config.plugin_options import load_plugin, plugin_options
from rlctl.config.plugins import ADVANTAGE_BASE, ADVANTAGES, ENGINES, LOSS_BASE, LOSSES, OVERLONG, reward_names
from rlctl.config.schema import GrpoConfig
from rlctl.preflight.backend import Violation, Violations
from rlctl.preflight.check_inputs import check_reward, missing_plugin
from rlctl.preflight.declared_columns import ADVANTAGE, columns_problem
from rlctl.preflight.engine_rules import check_engine_options, engine_rules
from rlctl.preflight.settled import SettledGrpo
from rlctl.telemetry.metrics import rows_problem
from rlctl.utils.user_code import load_object

_PROXIMAL = "grpo.loss.proximal"
_ADVANTAGE = "grpo.advantage"


def check_rewards(config: GrpoConfig) -> Violations:
    """Find rewards that cannot work, alone or together."""
    played = config.has_turns
    if not config.rewards and not played:
        yield Violation("rewards", "is empty: at least one reward, for example `- name: exact`")
        return
    for index, reward in enumerate(config.rewards):
        with suppress(BrokenValueError):
            for key, what in check_reward(reward):
                yield Violation(f"rewards.{index}.{key}", what)
    told = [index for index, reward in enumerate(config.rewards) if reward.correct_at is not None]
    if len(told) > 1:
        what = f"one reward decides what is right; rewards.{told[0]} has a correct_at too: leave one at null"
        yield Violation(f"rewards.{told[1]}.correct_at", what)
    if not played and all(reward.weight == 0 for reward in config.rewards):
        yield Violation("rewards.0.weight", "the weights are all 0: nothing would be learnt")


def check_algorithm(settled: SettledGrpo, away: bool) -> Violations:
    """Find a missing loss or advantage, and wrong keys of a user's class, which is imported.

    away: the run is to be elsewhere, where the class is imported.
    """
    config = settled.config
    named: list[tuple[str, LossSection | AdvantageSection, dict[str, str], str]] = [
        ("grpo.loss", config.grpo.loss, LOSSES, LOSS_BASE),
        (_ADVANTAGE, config.grpo.advantage, ADVANTAGES, ADVANTAGE_BASE),
    ]
    for key, section, known, base in named:
        if what := missing_plugin(section.name, known, "Class"):
            yield Violation(f"{key}.name", what)
        elif isinstance(section, UserClassSection) and not away:
            plugin, what = load_plugin(section.name, base)
            if plugin is None:
                yield Violation(f"{key}.name", what)
                continue
            missing = dict(settled.missing_columns)
            if key == _ADVANTAGE:
                missing[ADVANTAGE.name] = "an advantage cannot read itself"
            if wrong := columns_problem(getattr(plugin, "columns", ()), missing):
                yield Violation(f"{key}.name", wrong)
            if wrong := rows_problem(getattr(plugin, "metrics", ())):
                yield Violation(f"{key}.name", wrong)
            problems = plugin_options(plugin, load_object(base), section.further, key)[1]
            yield from (Violation(each.key, each.what, (f"{key}.name",)) for each in problems)


def check_advantage(config: GrpoConfig) -> Violations:
    """Find an advantage under which no rollout would teach anything."""
    if found := config.grpo.advantage.teaches_nothing(config.grpo.num_generations_per_prompt):
        key, what = found
        others = "grpo.num_generations_per_prompt", "grpo.advantage.name"
        yield Violation(f"grpo.advantage.{key}", what, others)


def check_sampling(settled: SettledGrpo) -> Violations:
    """Find cuts of the distribution under which the loss's ratios are wrong."""
    config = settled.config
    if settled.proximal == "rollout":
        why = "with grpo.loss.proximal=rollout the ratios would be off; keep {}"
        if "recompute" in literals(keys_of(type(config.grpo.loss))["proximal"].type):
            why += " or set grpo.loss.proximal=recompute"
        if config.generation.top_p < 1:
            yield Violation("generation.top_p", why.format("1"), (_PROXIMAL,))
        if config.generation.top_k > 0:
            yield Violation("generation.top_k", why.format("0"), (_PROXIMAL,))


def check_overlong(config: GrpoConfig) -> Violations:
    """Find penalties that hit every answer, and names shared with a reward."""
    tokens, longest = config.grpo.overlong.penalty_tokens, config.generation.max_new_tokens
    if tokens is None:
        return
    if tokens >= longest:
        what = f"must be below generation.max_new_tokens={longest}, not {tokens}: every answer would lose reward"
        yield Violation("grpo.overlong.penalty_tokens", what, ("generation.max_new_tokens",))
    if OVERLONG in (names := reward_names(config.rewards)):
        what = f"{OVERLONG} is the name of the penalty of grpo.overlong.penalty_tokens in metrics; rename the function"
        yield Violation(f"rewards.{names.index(OVERLONG)}.name", what, ("grpo.overlong.penalty_tokens",))


def check_engines(settled: SettledGrpo, away: bool) -> Violations:
    """Find a missing engine, its wrong keys, and models that it does not sample from, or not on these devices.

    away: the run is to be elsewhere, where an engine of the user's is imported.
    """
    generation, sizes = settled.config.generation, settled.facts
    engine = generation.engine
    if what := missing_plugin(engine.name, ENGINES, "KIND"):
        yield Violation("generation.engine.name", what)
    elif isinstance(engine, UserEngineSection) and not away:
        yield from check_engine_options(engine)
    if sizes:
        yield from engine_rules(engine).check_model(generation, sizes, settled.machine.device)


def check_async(settled: SettledGrpo) -> Violations:
    """Find values that do not go with `async.enabled`."""
    config = settled.config
    rules = config.async_
    if not rules.enabled:
        return
    if config.placement.colocated:
        what = "async.enabled trains and generates at the same time, on devices of their own; leave it null or false"
        yield Violation("placement.colocated", what, ("async.enabled",))
    if rules.recompute_kv_cache_after_weight_updates and not config.generation.reset_prefix_cache_after_weight_updates:
        recomputes = "async.recompute_kv_cache_after_weight_updates"
        yield Violation(
            "generation.reset_prefix_cache_after_weight_updates",
            f"false keeps nothing with {recomputes}=true, which empties the cache; leave it true",
            (recomputes,),
        )
    loss = config.grpo.loss
    if settled.clips and settled.proximal == "rollout" and rules.max_trajectory_age_steps > 1:
        what = (
            f"rollout clips around policies up to {rules.max_trajectory_age_steps} steps old, which lets training "
            "collapse (AReaL, arXiv 2505.24298, table 3); leave it auto, or set async.max_trajectory_age_steps=1"
        )
        yield Violation(_PROXIMAL, what, ("async.max_trajectory_age_steps", "async.enabled"))
    corrections = (loss.importance_cap, loss.importance_mask, loss.sequence_mask)
    if settled.proximal == "recompute" and all(each is None for each in corrections):
        what = "null without a mask leaves rollouts of older versions uncorrected; the default is 2.0"
        yield Violation("grpo.loss.importance_cap", what, ("async.enabled",))


def check_corrections(settled: SettledGrpo) -> Violations:
    """Find masks without a range or a ratio, and a missing pass that is needed."""
    config = settled.config
    loss, updates = config.grpo.loss, config.grpo.updates_per_step
    for name, bounds in (("importance_mask", loss.importance_mask), ("sequence_mask", loss.sequence_mask)):
        key = f"grpo.loss.{name}"
        if bounds is None:
            continue
        if len(bounds) != 2 or bounds[0] >= bounds[1]:
            yield Violation(key, f"must be [low, high] with low below high, not {bounds}")
        if settled.proximal == "rollout":
            what = "needs grpo.loss.proximal=recompute: with rollout there is no such ratio"
            yield Violation(key, what, (_PROXIMAL,))
        if (kept := config.generation.top_p) < 1 and bounds[0] >= kept:
            what = f"the lower bound must be below generation.top_p={kept}, which takes proximal / rollout down to it"
            yield Violation(key, f"{what}, not {bounds[0]:g}", ("generation.top_p",))
    if loss.force_on_policy_ratio and updates > 1:
        what = f"the second of {updates} updates a step is no longer of the policy that it starts from; use null"
        yield Violation("grpo.loss.force_on_policy_ratio", what, ("grpo.updates_per_step",))
    if (lengths := config.generation.forced_lengths) is not None and len(lengths) != 2:
        yield Violation("generation.forced_lengths", f"must be [mean, sigma], not {lengths}")
