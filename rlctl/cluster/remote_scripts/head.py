"""Runs on the head, with its Ray and its rlctl.

query: asks Ray for its living nodes and their free resources. request: address, token_path (null: the token is in the
environment there), environment, timeout_s. The reply: nodes, each with address, name, alive, total and free; refused,
true where the token is not this cluster's. Ray's drivers say of a wrong token only that they failed to connect, and
after 21 s; its GCS client tells at once.

job: does one operation on a run that is a Ray job, see `jobs/head_agent.py`. request: op (accept, status, stop, runs),
dashboard (port), token_path, and the fields of the operation.
"""

import os
from typing import Any

from rlctl.utils.ray_token import use_token


def query(request: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(request["environment"])
    use_token(request["token_path"])
    # Ray logs an error to the terminal before it raises it.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError

    try:
        client = GcsClient(address=request["address"])
        infos = client.get_all_node_info(timeout=request["timeout_s"])
        usage = client.get_all_resource_usage(timeout=request["timeout_s"])
    except AuthenticationError:
        return {"refused": True, "nodes": []}
    free = {node.node_id: dict(node.resources_available) for node in usage.resource_usage_data.batch}
    nodes = [
        {
            "address": info.node_manager_address,
            "name": info.node_name,
            "alive": info.state == 0,
            "total": dict(info.resources_total),
            "free": free.get(info.node_id, {}),
        }
        for info in infos.values()
    ]
    return {"refused": False, "nodes": nodes}


def job(request: dict[str, Any]) -> dict[str, Any]:
    from rlctl.cluster.jobs.head_agent import OPERATIONS

    return OPERATIONS[request["op"]](request)
