"""What the values that follow others stand for. Pure."""

from typing import Literal

from rlctl.config.schema import GrpoConfig, RewardSection, RunConfig


def max_age(config: GrpoConfig) -> int:
    """Steps that a group's oldest token may lag behind: 0 in a synchronous run."""
    return config.async_.max_trajectory_age_steps if config.async_.enabled else 0


def colocated(config: GrpoConfig) -> bool:
    """Whether engines take turns with the trainer on its devices."""
    own = config.placement.colocated
    return not config.async_.enabled if own is None else own


def shares_devices(config: RunConfig) -> bool:
    """Whether engines stand on the trainer's devices; on a CPU they always do, and never sleep."""
    return isinstance(config, GrpoConfig) and colocated(config)


def needs_answers(config: GrpoConfig) -> bool:
    """Return True if a reward compares with the reference answer: the built-in ones do, a user's may score without."""
    return any(":" not in reward.name for reward in config.rewards)


def needs_log_probs(config: GrpoConfig) -> bool:
    """Whether a step computes log-probs, of the policy or of the reference, before its updates."""
    recomputed = proximal(config) == "recompute" and not on_policy_ratio(config)
    return recomputed or config.grpo.loss.kl_coef > 0


def streams_training(config: GrpoConfig) -> bool:
    """Whether a step's gradients begin before all of its groups are sampled: an update of its own, of what is known
    when a group is."""
    once = config.grpo.updates_per_step == 1 and not needs_log_probs(config)
    return config.async_.enabled and config.async_.streamed_training and once


def proximal(config: GrpoConfig) -> Literal["rollout", "recompute"]:
    """The old policy of the loss's ratio."""
    own = config.grpo.loss.proximal
    if own == "auto":
        return "recompute" if config.async_.enabled else "rollout"
    return own


def on_policy_ratio(config: GrpoConfig) -> bool:
    """Whether the policy before the update need not be computed apart, because it is the one being updated.

    With one update a step it is: proximal and current log-probs are of the same weights, the ratio is 1 and only its
    gradient counts.
    """
    own = config.grpo.loss.force_on_policy_ratio
    once = config.grpo.updates_per_step == 1
    return proximal(config) == "recompute" and (once if own is None else own)


def reward_names(rewards: list[RewardSection]) -> list[str]:
    """Name of each reward in metrics and rollouts: a function's own, without its module; the second regex: regex-2."""
    names = [reward.name.rpartition(":")[2] for reward in rewards]
    return [name if (n := names[:i].count(name)) == 0 else f"{name}-{n + 1}" for i, name in enumerate(names)]


def correctness(rewards: list[RewardSection]) -> tuple[int, float]:
    """(index, least value) of the reward that decides whether an answer is right: the first, at 1, unless told."""
    told = [(index, reward.correct_at) for index, reward in enumerate(rewards) if reward.correct_at is not None]
    return told[0] if told else (0, 1.0)


def sequences_per_update(config: RunConfig) -> int:
    """Rollouts or samples that one optimizer update trains on."""
    if not isinstance(config, GrpoConfig):
        return config.sft.batch_size
    rollouts = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    return rollouts // config.grpo.updates_per_step


def trainer_threads(config: RunConfig, cores: int, ranks: int, engines: int) -> int:
    """CPU threads of a trainer rank, one of `ranks` beside so many engines on a machine of `cores`.

    Engines that sample while it trains keep a core each: on two cores, two threads beside an engine made the tiny run's
    asynchronous step 0.63 s, one thread 0.57 s.
    """
    beside = engines if isinstance(config, GrpoConfig) and config.async_.enabled else 0
    return config.trainer.threads or max(1, (cores - beside) // ranks)
