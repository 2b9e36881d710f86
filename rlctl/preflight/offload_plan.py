"""Table of where a trainer's state is in each phase of a step, for any backend. Pure.

A backend moves its tensors by this table (`training.offload`), the forecast counts by it, `--dry-run` prints it.
"""

from typing import Literal

from rlctl.config.schema import RunConfig, TrainerSection
from rlctl.preflight.backend import State, backend_of
from rlctl.preflight.resolved import Resolved

Phase = Literal["generate", "log_probs", "train", "refit", "checkpoint"]
# none: freed, and allocated again when it is needed.
Place = Literal["device", "host", "none"]
Residency = dict[Phase, dict[State, Place]]

PHASES: tuple[Phase, ...] = ("generate", "log_probs", "train", "refit", "checkpoint")


def residency(trainer: TrainerSection, shared: bool) -> Residency:
    """Return the table. shared: engines are on the trainer's devices and sleep while it trains.

    generate: engines are awake, the trainer rests. A refit and a checkpoint come while engines are awake or wake up, so
    state on the host stays there. log_probs: the pass of policy and reference before the update; state that was away
    until then comes back for the update alone.
    """
    pinned = backend_of(trainer).optimizer_on_host(trainer)
    for_engines = pinned or (shared and trainer.offload_optimizer_for_generation)
    for_log_probs = for_engines or trainer.offload_optimizer_for_logprob
    hosted: dict[Phase, bool] = {
        "generate": for_engines,
        "log_probs": for_log_probs,
        "train": pinned,
        "refit": for_engines,
        "checkpoint": for_engines,
    }
    return {
        phase: {
            "parameters": "device",
            "gradients": "device" if phase == "train" else "none",
            "optimizer": "host" if hosted[phase] else "device",
        }
        for phase in PHASES
    }


def phases(config: RunConfig) -> tuple[Phase, ...]:
    """Return the phases of a run in the order of a step. Without shared devices nothing waits for engines."""
    left_out: set[Phase] = set()
    if Resolved(config).sampling is None:
        left_out.add("refit")
    if not Resolved(config).shares_devices:
        left_out.add("generate")
    if not Resolved(config).computed_columns:
        left_out.add("log_probs")
    return tuple(phase for phase in PHASES if phase not in left_out)
