"""rlctl from Python: the functions behind the commands, with the same recipes, overrides and errors.

`import rlctl` takes a few milliseconds. The names below are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlctl.api.functions import CheckedConfig, Interrupted, RunFailed, check, evaluate, load_run, train
    from rlctl.api.run_records import (
        MetricColumns,
        RecordedCheckpoint,
        RecordedGroup,
        RecordedRollout,
        RecordedRun,
    )
    from rlctl.config.errors import ConfigError

    __version__: str

__all__ = [
    "CheckedConfig",
    "ConfigError",
    "Interrupted",
    "MetricColumns",
    "RecordedCheckpoint",
    "RecordedGroup",
    "RecordedRollout",
    "RecordedRun",
    "RunFailed",
    "check",
    "evaluate",
    "load_run",
    "train",
]
_FUNCTIONS = ("CheckedConfig", "Interrupted", "RunFailed", "check", "evaluate", "load_run", "train")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("rlctl.preflight.version").own_version()
    if name not in __all__:
        near = import_module("rlctl.config.errors").did_you_mean(name, __all__)
        raise AttributeError(f"module 'rlctl' has no attribute {name!r}{near}")
    if name == "ConfigError":
        module = "rlctl.config.errors"
    else:
        module = "rlctl.api.functions" if name in _FUNCTIONS else "rlctl.api.run_records"
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
