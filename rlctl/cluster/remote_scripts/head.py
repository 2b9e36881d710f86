"""Programs on the head, run with its Ray and rlctl.

query: asks Ray for its nodes and their free resources. request: address, token_path (null: the token is in the
environment), environment, timeout_s. Reply: nodes, each with address, name, alive, total and free; refused, true if Ray
refuses the token. The GCS client is used because it reports a wrong token at once. A Ray driver would only report a
failed connection, after 21 s.

job: calls one operation of `jobs/head_agent.py`. request: op (accept, status, stop, runs), dashboard (port),
token_path, and the fields of the operation.
"""

import os
from typing import Any

from rlctl.utils.ray_token import use_token


def query(request: dict[str, Any]) -> dict[str, Any]:
    """Ask Ray for its nodes and their free resources, see above."""
    os.environ.update(request["environment"])
    use_token(request["token_path"])
    # Discard stderr: Ray logs an error there before it raises the error.
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
