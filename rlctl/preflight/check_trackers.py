"""Checks that a config's trackers can start: installed, and with a key where they send. Imports none.

A tracker that fails in the middle of a run costs the run nothing: `telemetry/trackers/base.py` says so once a cause.
"""

import netrc
import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from rlctl.config.plugins import TRACKERS
from rlctl.config.schema import RunConfig
from rlctl.config.telemetry_schema import SwanlabSection, TrackerSection, TrackioSection, WandbSection
from rlctl.preflight.backend import Violation, Violations
from rlctl.preflight.check_inputs import missing_plugin

_WITHOUT_LOGIN = ("offline", "dryrun", "disabled")
# Files in which `wandb offline` and `wandb login --host` leave their settings: the working directory's and the user's.
_SETTINGS = ("wandb/settings", ".wandb/settings", "~/.config/wandb/settings")


def check_trackers(config: RunConfig) -> Violations:
    """Find trackers that cannot start."""
    names = [tracker.name for tracker in config.telemetry.trackers]
    for index, tracker in enumerate(config.telemetry.trackers):
        name = tracker.name
        what = missing_plugin(name, TRACKERS, "Class")
        if not what and name in TRACKERS and find_spec(name) is None:
            what = f"{name} is not installed: pip install 'rlctl[{name}]', or leave it out"
        elif name in TRACKERS and name in names[:index]:
            what = f"{name} is in the list twice"
        if what := what or _missing(tracker):
            yield Violation(f"telemetry.trackers.{index}.name", what)


def _missing(tracker: TrackerSection) -> str:
    """Return the missing part of an installed tracker; empty if none."""
    if isinstance(tracker, WandbSection) and not _has_wandb_key(tracker.mode):
        return "no key for Weights & Biases: wandb login, or WANDB_API_KEY, or mode: offline"
    if isinstance(tracker, SwanlabSection) and tracker.mode == "online" and not _has_swanlab_key():
        return "no key for SwanLab: swanlab login, or SWANLAB_API_KEY, or mode: offline"
    if isinstance(tracker, TrackioSection) and tracker.space is not None and not _has_hugging_face_token():
        return f"no token for the Space {tracker.space}: hf auth login, or HF_TOKEN, or space: null"
    return ""


def _has_swanlab_key() -> bool:
    # SwanLab's own order: the working directory's folder, then the user's.
    home = os.environ.get("SWANLAB_ROOT") or os.environ.get("SWANLAB_SAVE_DIR") or "~/.swanlab"
    return bool(os.environ.get("SWANLAB_API_KEY") or any(_text(f"{each}/.netrc") for each in (".swanlab", home)))


def _has_hugging_face_token() -> bool:
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return bool(os.environ.get("HF_TOKEN") or _text(os.environ.get("HF_TOKEN_PATH") or f"{home}/token").strip())


def _has_wandb_key(mode: str | None) -> bool:
    """Return True unless wandb would have to ask for a key, which nobody could answer below the dashboard."""
    if (mode or os.environ.get("WANDB_MODE")) in _WITHOUT_LOGIN:
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
