"""Runs on the head: asks Ray itself which nodes live and what they have free.

request: address, token_path (null: the token is in the environment there), environment. The reply: nodes, each with
address, name, alive, total and free; or refused, true where the token is not this cluster's. Ray's drivers say of a
wrong token only that they failed to connect, and after 21 s; its GCS client tells at once.
"""

import json  # noqa: F401  (used by what is put behind this program)
import os
from typing import Any


def run(request: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(request["environment"], RAY_AUTH_MODE="token")
    if request["token_path"]:
        os.environ.pop("RAY_AUTH_TOKEN", None)
        os.environ["RAY_AUTH_TOKEN_PATH"] = request["token_path"]
    # Ray logs to the terminal what it then raises.
    silence()
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError

    try:
        client = GcsClient(address=request["address"])
        infos = client.get_all_node_info(timeout=request["timeout_s"])
        usage = client.get_all_resource_usage(timeout=request["timeout_s"])
    except AuthenticationError:
        return {"refused": True, "nodes": []}
    by_id = {each.node_id: each for each in usage.resource_usage_data.batch}
    nodes = []
    for info in infos.values():
        use = by_id.get(info.node_id)
        nodes.append(
            {
                "address": info.node_manager_address,
                "name": info.node_name,
                "alive": info.state == 0,
                "total": dict(info.resources_total),
                "free": dict(use.resources_available) if use else {},
            }
        )
    return {"refused": False, "nodes": nodes}


def silence() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
