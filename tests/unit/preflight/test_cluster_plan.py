"""A run is planned for a cluster that is not there, from its size alone."""

from typing import Any

import pytest

from rlctl.config.errors import ConfigError
from rlctl.preflight.cluster_plan import capacity_rows, planned_cluster, settle_on_cluster
from rlctl.preflight.load import load
from rlctl.preflight.plan import make_plan


def capacity_of(*overrides: str) -> dict[str, str]:
    """Return the rows of a run on 4 nodes of 8 GPUs: (subject, demand)."""
    settled = load("grpo", None, ["placement.nodes=4x8", "async.enabled=true", *overrides]).settled
    assert settled.config.placement.nodes
    cluster = planned_cluster(settled.config.placement.nodes)
    settled = settle_on_cluster(settled, cluster)
    plan = make_plan(settled, cluster.resources)
    assert plan.placement, plan.misplaced
    return dict(capacity_rows(settled, plan))


def overrides_of(**values: Any) -> list[str]:
    return [f"{key.replace('__', '.')}={value}" for key, value in values.items()]


def test_the_size_is_nodes_by_gpus_with_the_memory_of_one() -> None:
    cluster = planned_cluster("32x8x141")
    assert (cluster.nodes, cluster.gpus, cluster.memory) == (32, 8, 141 << 30)
    assert [node.name for node in cluster.resources][:2] == ["node-01", "node-02"]
    assert planned_cluster("2x4").memory == 79 << 30


@pytest.mark.parametrize("text", ["32", "0x8", "x8", "32x8x", "a32x8"])
def test_a_size_that_cannot_be_read_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match="must be nodes x GPUs as 32x8"):
        load("grpo", None, [f"placement.nodes={text}"])


def test_a_run_over_nodes_names_its_links_driver_and_disk() -> None:
    rows = capacity_of(*overrides_of(trainer__num_ranks=16, generation__num_engines=8))
    assert "between nodes" in rows["refit, at least"]
    assert rows["communicators"] == "2 on a GPU of an engine, of 12 ranks each: at most 3.2 GiB, in the forecast"
    assert "to 1 rank of each of 16 shards" in rows["from the driver"]
    assert "steps stop for" in rows[""]


def test_a_run_within_a_node_asks_nothing_of_links_between_nodes() -> None:
    rows = capacity_of(*overrides_of(trainer__num_ranks=4, generation__num_engines=4))
    assert "between nodes" not in rows["refit, at least"]
    assert rows["communicators"] == "2 on a GPU of an engine, of 6 ranks each: at most 1.0 GiB, in the forecast"


def test_a_checkpoint_that_steps_wait_for_says_so() -> None:
    rows = capacity_of(*overrides_of(trainer__num_ranks=4, checkpoint__beside_training="false"))
    assert "while it is written" in rows[""]
