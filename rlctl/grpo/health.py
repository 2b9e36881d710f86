"""What a GRPO run's health is judged by. Pure; the bounds are the config's."""

from rlctl.config.schema import GrpoConfig
from rlctl.training.health import Ceiling, Check, Decline, Health, gradient_jump

# Of tokens that were sampled and compared under equal weights; in an asynchronous run the step's own
# `mismatch/token_mult_prob_error` holds the tokens' age too.
PARITY = "mismatch/parity"
MISMATCH = "mismatch/token_mult_prob_error"


def grpo_health(config: GrpoConfig) -> Health:
    """Return the checks of a run."""
    bounds = config.health
    mismatch = PARITY if config.async_.enabled else MISMATCH
    checks: list[Check] = [
        gradient_jump(bounds.max_grad_norm_ratio, bounds.grad_norm_window),
        Ceiling(
            "mismatch",
            mismatch,
            bounds.max_token_mult_prob_error,
            f"{mismatch} is {{value:.4g}}, at most {{bound:g}} (health.max_token_mult_prob_error): the engine computes "
            "other log-probs than the trainer does with the same weights",
        ),
        Decline(
            "accuracy",
            "validation/accuracy",
            bounds.max_accuracy_drop,
            -1,
            "held-out accuracy is {value:.1%}, {lost:.1%} below its start of {start:.1%}, at most {bound:.1%} "
            "(health.max_accuracy_drop)",
        ),
    ]
    return Health(checks, stop=bounds.stop)
