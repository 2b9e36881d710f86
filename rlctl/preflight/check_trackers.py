"""Checks that a config's trackers can start: installed, and for Weights & Biases with a key. Imports none.

A tracker that fails in the middle of a run costs the run nothing: `telemetry/trackers/base.py` says so once.
"""

import netrc
import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from rlctl.config.plugins import TRACKERS
from rlctl.config.schema import RunConfig
from rlctl.preflight.backend import Violation, Violations
from rlctl.preflight.check_inputs import missing_plugin

_WITHOUT_LOGIN = ("offline", "dryrun", "disabled")
# Files in which `wandb offline` and `wandb login --host` leave their settings: the working directory's and the user's.
_SETTINGS = ("wandb/settings", ".wandb/settings", "~/.config/wandb/settings")


def check_trackers(config: RunConfig) -> Violations:
    """Find trackers that cannot start."""
    names = [tracker.name for tracker in config.telemetry.trackers]
    for index, name in enumerate(names):
        what = missing_plugin(name, TRACKERS, "Class")
        if not what and name in TRACKERS and find_spec(name) is None:
            what = f"{name} is not installed: pip install 'rlctl[{name}]', or leave it out"
        elif name in TRACKERS and name in names[:index]:
            what = f"{name} is in the list twice"
        elif name == "wandb" and not _may_log_in():
            what = "no key for Weights & Biases: wandb login, or WANDB_API_KEY, or WANDB_MODE=offline"
        if what:
            yield Violation(f"telemetry.trackers.{index}.name", what)


def _may_log_in() -> bool:
    """Return True unless wandb would have to ask for a key, which nobody could answer below the dashboard."""
    if os.environ.get("WANDB_MODE") in _WITHOUT_LOGIN:
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    with suppress(OSError, netrc.NetrcParseError):
        file = netrc.netrc(os.environ.get("NETRC") or str(Path("~/.netrc").expanduser()))
        if file.authenticators(host) is not None:
            return True
    return any("mode" in _text(path) or "base_url" in _text(path) for path in _SETTINGS)


def _text(path: str) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return Path(path).expanduser().read_text(encoding="utf-8")
    return ""
