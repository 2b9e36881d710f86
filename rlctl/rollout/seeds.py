"""Seeds of rollouts: a pure function of the run's seed, the step and the prompt, so that a resume draws the same."""

import numpy as np

# Streams that must not share draws.
TRAIN, VALIDATION, PROBE, REDRAW = 0, 1, 2, 3


def rollout_seeds(seed: int, stream: int, step: int, count: int) -> list[int]:
    """One seed a prompt, below 2^31 with room for a group's offsets."""
    state = np.random.SeedSequence([seed, stream, step]).generate_state(count, np.uint32)
    return [int(value >> 2) for value in state]
