"""Checks that a config's trackers can start: package installed, login present, keys known to the tracker's class.

rlctl's own tracker classes are not imported. A user's class is.

A tracker that fails during a run does not stop the run: `telemetry/trackers/base.py` warns once for each cause.
"""

import netrc
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from rlctl.config.errors import Problem
from rlctl.config.plugin_options import call_options
from rlctl.config.plugins import TRACKER_ARGUMENTS, TRACKER_METHODS, TRACKERS
from rlctl.config.schema import RunConfig
from rlctl.config.telemetry_schema import (
    SwanlabSection,
    TrackerSection,
    TrackioSection,
    UserTrackerSection,
    WandbSection,
)
from rlctl.preflight.backend import Violation, Violations, unbroken
from rlctl.preflight.check_inputs import missing_plugin
from rlctl.utils.user_code import import_error, load_object

# Characters that wandb refuses in project names and run ids.
_NOT_IN_WANDB = "/\\#?%:"
_WITHOUT_LOGIN = ("offline", "dryrun", "disabled")
# Files that `wandb offline` and `wandb login --host` write, in the working directory and in the user's home.
_SETTINGS = ("wandb/settings", ".wandb/settings", "~/.config/wandb/settings")


def check_trackers(config: RunConfig) -> Violations:
    """Find trackers that cannot start."""
    sections = config.telemetry.trackers
    for index, tracker in enumerate(sections):
        # A broken value ends the checks of its tracker. Those of the other trackers go on.
        key = f"telemetry.trackers.{index}"
        yield from unbroken(_check_texts(tracker, key))
        yield from unbroken(_check_tracker(tracker, key, sections[:index]))


def _check_tracker(tracker: TrackerSection, key: str, earlier: Sequence[TrackerSection]) -> Violations:
    name = tracker.name
    message = missing_plugin(name, TRACKERS, "Class")
    if not message and name in TRACKERS and find_spec(name) is None:
        message = f"{name} is not installed: pip install 'rlctl[{name}]', or leave it out"
    elif name in TRACKERS and any(type(other) is type(tracker) for other in earlier):
        message = f"{name} is in the list twice"
    if message := message or _missing_login(tracker):
        yield Violation(f"{key}.name", message)
    elif isinstance(tracker, UserTrackerSection):
        for problem in _tracker_problems(tracker, key):
            yield Violation(problem.key, problem.what, (f"{key}.name",))


def _tracker_problems(tracker: UserTrackerSection, key: str) -> list[Problem]:
    """Import a user's tracker class. Return the problems of the class and of its keys."""
    try:
        plugin = load_object(tracker.name)
    except (Exception, SystemExit) as error:
        return [Problem("", f"{key}.name", import_error(error, __file__))]
    class_name = tracker.name.rpartition(":")[2]
    if not callable(plugin):
        return [Problem("", f"{key}.name", f"must be a class, not {type(plugin).__name__}: `class {class_name}:`")]
    _, problems = call_options(plugin, TRACKER_ARGUMENTS, tracker.further, key)
    # Methods are checked only on a plain class: a function may return any object, and `__getattr__` may give any
    # method.
    if isinstance(plugin, type) and not hasattr(plugin, "__getattr__"):
        missing_methods = [
            signature for name, signature in TRACKER_METHODS.items() if not callable(getattr(plugin, name, None))
        ]
        if missing_methods:
            message = f"{class_name} lacks {', '.join(missing_methods)}, which every tracker has"
            problems.append(Problem("", f"{key}.name", message))
    return problems


def _check_texts(tracker: TrackerSection, key: str) -> Violations:
    """Find project names and run ids that the tracker's package refuses when it starts."""
    for field in ("project", "experiment", "id"):
        text = getattr(tracker, field, None)
        if text is not None and not str(text).strip():
            yield Violation(f"{key}.{field}", "must not be empty")
        elif text is not None and isinstance(tracker, WandbSection) and set(text) & set(_NOT_IN_WANDB):
            yield Violation(f"{key}.{field}", f"must have none of {' '.join(_NOT_IN_WANDB)}, not {text}")


def _missing_login(tracker: TrackerSection) -> str:
    """Return the remedy if an installed tracker has no login; empty if it has one, or needs none."""
    if isinstance(tracker, WandbSection) and not _has_wandb_key(tracker.mode):
        return "no key for Weights & Biases: wandb login, or WANDB_API_KEY, or mode: offline"
    if isinstance(tracker, SwanlabSection) and tracker.mode == "online" and not _has_swanlab_key():
        return "no key for SwanLab: swanlab login, or SWANLAB_API_KEY, or mode: offline"
    if isinstance(tracker, TrackioSection) and tracker.space is not None and not _has_hugging_face_token():
        return f"no token for the Space {tracker.space}: hf auth login, or HF_TOKEN, or space: null"
    return ""


def _has_swanlab_key() -> bool:
    # SwanLab looks in the working directory first, then in the user's home.
    home = os.environ.get("SWANLAB_ROOT") or os.environ.get("SWANLAB_SAVE_DIR") or "~/.swanlab"
    if os.environ.get("SWANLAB_API_KEY"):
        return True
    return any(_file_text(f"{folder}/.netrc") for folder in (".swanlab", home))


def _has_hugging_face_token() -> bool:
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return bool(os.environ.get("HF_TOKEN") or _file_text(os.environ.get("HF_TOKEN_PATH") or f"{home}/token").strip())


def _has_wandb_key(mode: str | None) -> bool:
    """Return True if wandb starts without asking for a key, which nobody could type below the dashboard."""
    if (mode or os.environ.get("WANDB_MODE")) in _WITHOUT_LOGIN:
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    with suppress(OSError, netrc.NetrcParseError):
        file = netrc.netrc(os.environ.get("NETRC") or str(Path("~/.netrc").expanduser()))
        if file.authenticators(host) is not None:
            return True
    # By its settings wandb is offline, or uses another host, whose key is not looked for.
    return any("mode" in _file_text(path) or "base_url" in _file_text(path) for path in _SETTINGS)


def _file_text(path: str) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return Path(path).expanduser().read_text(encoding="utf-8")
    return ""
