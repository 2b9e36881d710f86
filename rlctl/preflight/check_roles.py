"""Checks of the models besides the policy: the reference and teachers."""

from rlctl.preflight.backend import Violation, Violations
from rlctl.preflight.settled import SettledGrpo


def check_roles(settled: SettledGrpo) -> Violations:
    """Find keys of roles that no part of rlctl reads yet."""
    config = settled.config
    written_keys = {
        "reference.path": config.reference.path is not None,
        "reference.place": config.reference.place not in ("auto", "swapped"),
        "teacher": config.teacher is not None,
        "teachers": bool(config.teachers),
        "teacher_key": config.teacher_key is not None,
        "grpo.loss.distillation": config.grpo.loss.distillation is not None,
        "grpo.num_generations_per_prompt": config.grpo.num_generations_per_prompt < 2,
    }
    for key, is_written in written_keys.items():
        if is_written:
            yield Violation(key, "is not supported by this version")
