"""Schema of the bounds on a run's health, for all runs, GRPO runs and SFT runs."""

from dataclasses import dataclass

from rlctl.config.fields import share, spec


@dataclass
class HealthSection:
    stop: bool = spec(
        "A warning about the run's health stops the run, with a checkpoint. If false, it is printed and counted."
    )
    max_grad_norm_ratio: float = spec(
        "Warn if a gradient norm is above this many times the median of the steps before.", gt=1
    )
    grad_norm_window: int = spec(
        "The number of steps in that median. Norms are judged from half as many steps on.", ge=2
    )


@dataclass
class GrpoHealthSection(HealthSection):
    max_token_mult_prob_error: float = spec(
        "Warn if token_mult_prob_error is above this. A synchronous run judges all tokens of a step. An "
        "asynchronous one, and one with top_p or top_k, judges those of parity_every: the tokens of its steps are of "
        "older weights, or of a cut distribution. A model that rounds more, as run.probe finds, is held to twice that.",
        gt=1,
    )
    max_off_policy_kl: float = spec(
        "Only in an asynchronous run: warn if mismatch/kl is above this, in nats a token. The weights then move "
        "further between sampling and training than importance weights correct.",
        ge=0,
    )
    max_clipped_share: float = share(
        "Warn if the bounds of grpo.loss hold more than this share of the tokens in a step's first update. The policy "
        "has not moved there: they hold the gap between engine and trainer."
    )
    parity_every: int = spec(
        "Only in an asynchronous run, and with top_p or top_k: the steps between comparisons of trainer and engines on "
        "a few tokens that are sampled under equal weights, from the whole distribution. 0 compares never.",
        ge=0,
    )
    max_non_finite_rollouts: float = share(
        "Rollouts with a log-prob that is NaN or infinite are left out. The run stops, before the update, if they are "
        "more than this share of a step's rollouts."
    )
    max_accuracy_drop: float = share(
        "Warn if the held-out accuracy is more than this share below its value at the start."
    )
    max_failed_reward_share: float = share(
        "The run stops, with a checkpoint, if rewards failed for more than this share of a step's rollouts, in "
        "failed_reward_steps steps in a row. 1 stops it never."
    )
    failed_reward_steps: int = spec("The steps in a row that max_failed_reward_share needs.", ge=1)
    max_tool_raised_share: float = share(
        "Warn if the tools' own code raised in more than this share of a step's tool calls. The model reads such "
        "errors, and the episodes go on. 1 warns never."
    )
    max_malformed_call_share: float = share(
        "Warn if more than this share of a step's tool calls are malformed: turns that look like a call and are none. "
        "The model reads why, and the episodes go on. 1 warns never."
    )
    max_agent_turn_s: float = spec("Warn if an agent waited longer than this for a turn, in seconds.", gt=0)


@dataclass
class SftHealthSection(HealthSection):
    max_loss_rise: float = spec(
        "Warn if the held-out loss is above its value at the start by more than this, in nats a token.", ge=0
    )
