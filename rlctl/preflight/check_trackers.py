"""Whether the trackers that a config asks for can start: installed, and for Weights & Biases with a key. Imports none.

A tracker that fails later, in the middle of a run, costs the run nothing: `telemetry/trackers/base.py` says so once.
"""

import netrc
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from rlctl.config.plugins import TRACKERS
from rlctl.config.schema import TrackerSection
from rlctl.preflight.check_inputs import missing_plugin

_WITHOUT_LOGIN = ("offline", "dryrun", "disabled")
# Where wandb keeps what `wandb offline` and `wandb login --host` say: the working directory's and the user's.
_SETTINGS = ("wandb/settings", ".wandb/settings", "~/.config/wandb/settings")


def check_trackers(trackers: Sequence[TrackerSection]) -> Iterator[tuple[int, str]]:
    """Yield (index, what is wrong with the tracker of this name)."""
    names = [tracker.name for tracker in trackers]
    for index, name in enumerate(names):
        if what := missing_plugin(name, TRACKERS, "Class"):
            yield index, what
        elif name in TRACKERS and find_spec(name) is None:
            yield index, f"{name} is not installed: pip install 'rlctl[{name}]', or leave it out"
        elif name in TRACKERS and name in names[:index]:
            yield index, f"{name} is in the list twice"
        elif name == "wandb" and not _may_log_in():
            yield index, "no key for Weights & Biases: wandb login, or WANDB_API_KEY, or WANDB_MODE=offline"


def _may_log_in() -> bool:
    """True unless wandb would have to ask for a key, which nobody could answer below the dashboard."""
    if os.environ.get("WANDB_MODE") in _WITHOUT_LOGIN:
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    return _in_netrc() or any("mode" in _text(path) or "base_url" in _text(path) for path in _SETTINGS)


def _in_netrc() -> bool:
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    with suppress(OSError, netrc.NetrcParseError):
        return (
            netrc.netrc(os.environ.get("NETRC") or str(Path("~/.netrc").expanduser())).authenticators(host) is not None
        )
    return False


def _text(path: str) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return Path(path).expanduser().read_text(encoding="utf-8")
    return ""
