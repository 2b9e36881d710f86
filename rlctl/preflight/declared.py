"""Declarations of a run's loss and advantage: by the section of one of rlctl's, by the class of one of the user's.

A check imports no torch for a loss of rlctl's. Its section declares the same as its class, which a test holds.
"""

from functools import cache
from typing import Any

from rlctl.config.grpo_schema import AdvantageSection, LossSection, UserClassSection
from rlctl.utils.plugins import load_object


def declared(section: LossSection | AdvantageSection, name: str) -> Any:
    """Return a declaration; None where the user's class has none or cannot be imported, which a check says."""
    return getattr(user_class(section.name) if isinstance(section, UserClassSection) else section, name, None)


@cache
def user_class(name: str) -> Any:
    """Return a user's class of a loss or advantage; None if it cannot be imported."""
    try:
        return load_object(name)
    except Exception:
        return None
