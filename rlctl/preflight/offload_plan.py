"""Table of where a trainer's state is in each phase of a step, for any backend. Pure.

A backend moves its tensors by this table (`training.offload`), the forecast counts by it, `--dry-run` prints it.
"""

from typing import Literal

from rlctl.config.trainer_schema import TrainerSection
from rlctl.preflight.backend import State, backend_of

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
