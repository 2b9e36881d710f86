"""Health checks of a GRPO run: bounds on a step's metrics, from the config's section `health`. Pure functions."""

from collections.abc import Callable
from dataclasses import dataclass

from rlctl.environments.metric_rows import LONGEST_TURN, MALFORMED_CALLS, TOOL_RAISED
from rlctl.grpo.losses.sections import MISMATCH_KL, STEP_MISMATCH, DppoLossSection
from rlctl.grpo.metric_rows import FAILED_SHARE, FIRST_CLIPPED, HELD_OUT_ACCURACY, NON_FINITE, PARITY
from rlctl.preflight.settled import SettledGrpo
from rlctl.run.health import Ceiling, Decline, Finding, Health, HealthCheck, Metrics, failed_validation, gradient_jump


@dataclass
class FailedShare(Ceiling):
    """Ceiling on the share of a step's rollouts or tool calls in which the user's code failed."""

    # Returns the most common error, for the message.
    cause: Callable[[], str] = str

    def find(self, metrics: Metrics) -> Finding:
        finding = super().find(metrics)
        if finding is None:
            return None
        value, bound, text = finding
        return value, bound, f"{text}; most of them {self.cause()}"


def grpo_health(
    settled: SettledGrpo,
    cause: Callable[[], str] = str,
    tool_cause: Callable[[], str] = str,
    mismatch_bound: float | None = None,
) -> Health:
    """Return all checks of a run. cause, tool_cause: return the most common error of rewards, and of tools.

    mismatch_bound: used instead of health.max_token_mult_prob_error, for a model that rounds more than that allows.
    None: the config's bound.
    """
    config = settled.config
    bounds = config.health
    # A user's loss is named by a path, which may contain braces. The text below is a format string.
    loss = config.grpo.loss.name.replace("{", "{{").replace("}", "}}")
    checks: list[HealthCheck] = [
        gradient_jump(bounds.max_grad_norm_ratio, bounds.grad_norm_window),
        _mismatch_ceiling(settled, mismatch_bound),
        Ceiling(
            "clipped",
            FIRST_CLIPPED.name,
            bounds.max_clipped_share,
            f"{loss} clips {{value:.0%}} of the tokens before the policy has moved, at most {{bound:.0%}} "
            "(health.max_clipped_share): its bounds hold the gap between engine and trainer; "
            f"{_bounds_remedy(settled)}",
        ),
        FailedShare(
            "tool_raised",
            TOOL_RAISED.name,
            bounds.max_tool_raised_share,
            "tools raised in {value:.0%} of their calls, at most {bound:.0%} (health.max_tool_raised_share)",
            cause=tool_cause,
        ),
        Ceiling(
            "malformed_calls",
            MALFORMED_CALLS.name,
            bounds.max_malformed_call_share,
            "{value:.0%} of the tool calls are malformed, at most {bound:.0%} (health.max_malformed_call_share): "
            "rlctl runs rollouts shows them; environment.tool_format names the format that is parsed",
        ),
        Ceiling(
            "agent_turn",
            LONGEST_TURN.name,
            bounds.max_agent_turn_s,
            "an agent waited {value:.0f} s for a turn, at most {bound:g} (health.max_agent_turn_s): clients of OpenAI "
            "and Anthropic end a request after 600 s, and give up after three; lower generation.max_new_tokens, play "
            "fewer rollouts at a time, or raise the client's timeout",
        ),
        FailedShare(
            "failed_rewards",
            FAILED_SHARE.name,
            bounds.max_failed_reward_share,
            "rewards failed for {value:.0%} of the rollouts, in {steps} steps in a row for more than {bound:.0%} "
            "(health.max_failed_reward_share)",
            fatal=True,
            patience=bounds.failed_reward_steps,
            cause=cause,
        ),
        Ceiling(
            "non_finite",
            NON_FINITE.name,
            0,
            "rollouts left out because a log-prob of theirs is not finite: {value:.0f}",
        ),
        failed_validation(bounds.max_failed_reward_share),
        Decline(
            "accuracy",
            HELD_OUT_ACCURACY.name,
            bounds.max_accuracy_drop,
            "held-out accuracy is {value:.1%}, {lost:.1%} below its start of {start:.1%}, at most {bound:.1%} "
            "(health.max_accuracy_drop)",
            worse=-1,
        ),
    ]
    if config.async_.enabled:
        checks.append(_off_policy(bounds.max_off_policy_kl))
    return Health(checks, stop=bounds.stop)


def _off_policy(bound: float) -> Ceiling:
    """Return the check of the distance between the weights that sampled a step and those that are trained."""
    return Ceiling(
        "off_policy",
        MISMATCH_KL.name,
        bound,
        f"{MISMATCH_KL.name} is {{value:.2g}} nats a token, at most {{bound:g}} (health.max_off_policy_kl): the "
        "weights move further between sampling and training than importance weights correct; lower "
        "trainer.optimizer.lr or async.max_trajectory_age_steps",
    )


def _mismatch_ceiling(settled: SettledGrpo, bound: float | None) -> Ceiling:
    configured = settled.config.health.max_token_mult_prob_error
    allowed = configured if bound is None else bound
    source = "" if allowed == configured else f"={configured:g}, and twice the rounding that the probe found"
    # In an asynchronous run, or with top_p or top_k, a step's tokens have a mismatch for other causes too: older
    # weights, or renormalized probabilities. Such runs sample and compare a few tokens for this check.
    metric = PARITY.name if settled.config.compares_apart else STEP_MISMATCH.name
    return Ceiling(
        "mismatch",
        metric,
        allowed,
        f"{metric} is {{value:.4g}}, at most {{bound:.4g}} (health.max_token_mult_prob_error{source}): the engine "
        "computes other log-probs than the trainer does with the same weights",
    )


def _bounds_remedy(settled: SettledGrpo) -> str:
    """Return the advice for a loss that clips tokens because of the mismatch between engine and trainer."""
    if isinstance(settled.config.grpo.loss, DppoLossSection):
        return "raise grpo.loss.mask_low and grpo.loss.mask_high"
    if settled.proximal == "rollout":
        return "set grpo.loss.proximal=recompute"
    return "set grpo.updates_per_step=1, or raise grpo.loss.clip_low and grpo.loss.clip_high"
