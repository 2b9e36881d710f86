"""What several of these programs need: put in the place of the line that imports it (see `hosts.py`)."""

import json  # noqa: F401  (used by what is put behind a program)
from typing import Any


def lives(request: dict[str, Any]) -> bool:
    """Whether the node's first process runs, and not another that has its number now."""
    import psutil

    try:
        process = psutil.Process(request["pid"])
        same = abs(process.create_time() - request["create_time"]) < 1
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
