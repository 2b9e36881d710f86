"""The learning rate of an update: a pure function of its number."""

import math

from rlctl.config.schema import OptimizerSection


def learning_rate(update: int, section: OptimizerSection, total_updates: int) -> float:
    """Learning rate of update number `update`, counted from 0.

    Linear warm-up over `warmup_steps` updates, reaching `lr` with the last of them; then constant, or down a line
    or a half cosine to `min_lr_ratio * lr`, which update `total_updates` would have, the first not made.
    """
    if update < section.warmup_steps:
        return section.lr * (update + 1) / section.warmup_steps
    done = min(1.0, (update - section.warmup_steps) / max(1, total_updates - section.warmup_steps))
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[section.schedule]
    return section.lr * (section.min_lr_ratio + (1 - section.min_lr_ratio) * left)
