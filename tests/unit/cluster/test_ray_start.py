"""The start of Ray nodes: they listen on loopback by default, and on fixed ports for a firewall. GPUs count once."""

from typing import Any

from rlctl.cluster.ray_start import Place, join_address, start_request
from rlctl.cluster.state import ClusterNode, ClusterState
from rlctl.config.load_cluster import load_cluster

# Arguments that only the head node gets.
OF_THE_HEAD = ("--port=6379", "--dashboard-port=8265")


def start_requests(
    cluster: str, overrides: list[str], addresses: list[str], shm: int = 32 << 30
) -> list[dict[str, Any]]:
    config = load_cluster(cluster, overrides)
    hosts = [f"h{index}" if cluster == "ssh" else "" for index in range(len(addresses))]
    nodes = [
        ClusterNode(f"n{index}", host, f"/tmp/rlctl-{index}", index == 0, address)
        for index, (host, address) in enumerate(zip(hosts, addresses))
    ]
    state = ClusterState("x", config.kind, "starting", "python", "", False, 0.0, address="10.0.0.1:6379", nodes=nodes)
    places = [Place(node.name, node.host, node.address, "/tmp", shm, True) for node in nodes]
    return [start_request(config, state, node, place, "secret") for node, place in zip(nodes, places)]


def test_a_local_cluster_is_on_loopback_alone() -> None:
    head, other = start_requests("local", ["nodes=2"], ["127.0.0.1"] * 2)
    assert {"--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", "--port={port}"} <= set(head["arguments"])
    for request in (head, other):
        assert request["environment"]["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
        assert not any("secret" in argument for argument in request["arguments"])
    assert (head["joins_loopback"], other["joins_loopback"]) == (False, True)
    assert "--num-gpus=0" in other["arguments"]
    assert not any(argument.startswith("--num-gpus") for argument in head["arguments"])
    assert "--include-log-monitor=false" in other["arguments"]


def test_a_head_misses_a_lost_host_soon_and_jobs_have_time_to_save() -> None:
    head, other = start_requests("ssh", ["hosts=[h0, h1]"], ["10.0.0.1", "10.0.0.2"])
    period_ms = int(head["environment"]["RAY_health_check_period_ms"])
    timeout_ms = int(head["environment"]["RAY_health_check_timeout_ms"])
    failures = int(head["environment"]["RAY_health_check_failure_threshold"])
    assert 8_000 <= (period_ms + timeout_ms) * failures <= 12_000
    assert not any("health" in name for name in other["environment"])
    for request in (head, other):
        assert request["environment"]["RAY_JOB_STOP_WAIT_TIME_S"] == "600"


def test_hosts_keep_the_dashboard_on_loopback_and_have_all_their_gpus() -> None:
    head, other = start_requests("ssh", ["hosts=[h0, h1]"], ["10.0.0.1", "10.0.0.2"])
    assert {"--port=6379", "--dashboard-port=8265", "--dashboard-host=127.0.0.1"} <= set(head["arguments"])
    assert "--address=10.0.0.1:6379" in other["arguments"]
    assert not any(argument.startswith(("--num-gpus", "--include-log")) for argument in other["arguments"])
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in other["environment"]


def test_only_who_asks_listens_on_all_interfaces() -> None:
    (head,) = start_requests("ssh", ["hosts=[h0]", "listen_on_all=true"], ["10.0.0.1"])
    assert "--dashboard-host=0.0.0.0" in head["arguments"]


def test_a_firewall_can_be_told_every_port() -> None:
    head, other = start_requests("ssh", ["hosts=[h0, h1]", "other_ports=[7000, 7100]"], ["10.0.0.1", "10.0.0.2"])
    for request in (head, other):
        arguments = [argument for argument in request["arguments"] if argument not in OF_THE_HEAD]
        ports = [argument for argument in arguments if "-port=" in argument]
        assert ports[0] == "--node-manager-port=7000"
        assert ports[-2:] == ["--min-worker-port=7005", "--max-worker-port=7100"]


def test_metrics_which_ask_for_no_token_are_served_nowhere() -> None:
    for request in start_requests("ssh", ["hosts=[h0, h1]"], ["10.0.0.1", "10.0.0.2"]):
        environment = request["environment"]
        assert environment["RAY_enable_metrics_collection"] == "0"
        assert (environment["AUTOSCALER_METRIC_PORT"], environment["DASHBOARD_METRIC_PORT"]) == ("-1", "-1")


def test_the_object_store_fits_into_shared_memory() -> None:
    (head,) = start_requests("local", [], ["127.0.0.1"], shm=1 << 30)
    assert f"--object-store-memory={1 << 29}" in head["arguments"]


def test_an_address_of_ipv6_has_brackets() -> None:
    assert (join_address("10.0.0.1", 1), join_address("fd00::1", 1)) == ("10.0.0.1:1", "[fd00::1]:1")
