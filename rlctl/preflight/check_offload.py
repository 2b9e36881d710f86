"""Where optimizer state stands: switches that exclude each other, and switches that change nothing in this run."""

from collections.abc import Iterator

from rlctl.config.schema import RunConfig, SftConfig, TrainerSection
from rlctl.preflight.backend import backend_of
from rlctl.preflight.resolved import Resolved

LOG_PROBS, GENERATION = "trainer.offload_optimizer_for_logprob", "trainer.offload_optimizer_for_generation"
_ON_HOST = "trainer.megatron.optimizer_cpu_offload"


def check_offload(trainer: TrainerSection) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(key, what is wrong, other keys)."""
    moves = {LOG_PROBS: trainer.offload_optimizer_for_logprob, GENERATION: trainer.offload_optimizer_for_generation}
    for key, wanted in moves.items():
        if wanted and backend_of(trainer).optimizer_on_host(trainer):
            what = f"does not go with {_ON_HOST}=true, which keeps optimizer state on the host at all times; choose one"
            yield key, what, (_ON_HOST,)


def idle_offload(config: RunConfig) -> dict[str, str]:
    """Why a switch that is on changes nothing, by key."""
    trainer, idle = config.trainer, {}
    if trainer.offload_optimizer_for_logprob:
        if isinstance(config, SftConfig):
            idle[LOG_PROBS] = "kind is sft"
        elif not Resolved(config).needs_log_probs:
            idle[LOG_PROBS] = "no log-probs are computed before an update"
        elif trainer.offload_optimizer_for_generation and Resolved(config).shares_devices:
            idle[LOG_PROBS] = f"{GENERATION} keeps it on the host until the update"
    if trainer.offload_optimizer_for_generation and not Resolved(config).shares_devices:
        idle[GENERATION] = "kind is sft" if isinstance(config, SftConfig) else "engines have devices of their own"
    return idle
