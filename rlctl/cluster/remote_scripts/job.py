"""Runs on the head, with its rlctl: takes in a run as a Ray job, says how it is, stops it. See jobs/head.py.

request: op (accept, status, stop, runs), dashboard (port), token_path, and what the operation takes.
"""

import json  # noqa: F401  (used by what is put behind this program)
from typing import Any


def run(request: "dict[str, Any]") -> "dict[str, Any]":
    from rlctl.cluster.jobs import head_agent

    operations = {
        "accept": head_agent.accept,
        "status": head_agent.status,
        "stop": head_agent.stop,
        "runs": head_agent.runs,
    }
    return operations[request["op"]](request)
