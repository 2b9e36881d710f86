"""Node and device of each process, and the transport that follows from them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.config.schema import GrpoConfig
from rlctl.launch.runtime import Allocation
from rlctl.launch.worker_specs import engine_slots
from rlctl.preflight.load import load
from rlctl.preflight.machine import Device, RunMachine
from rlctl.preflight.placement import (
    NodeResources,
    Placement,
    PlacementError,
    PlacementSlot,
    ResourceRequest,
    Strategy,
    place,
    refit_way,
    requested_resources,
    smaller_runs,
    this_machine,
    transport_of,
    usual_transport,
)
from rlctl.preflight.settled import SettledGrpo, settle
from rlctl.utils.devices import count_gpus
from rlctl.workers.waits import Waits

few = st.integers(1, 6)
strategies = st.sampled_from(["pack", "spread"])
NODES = [NodeResources("a", 4, 8.0), NodeResources("b", 4, 8.0), NodeResources("c", 4, 8.0)]

WAITS = Waits(60.0, print)


def devices_of(slots: list[PlacementSlot]) -> list[tuple[int, int]]:
    """Return (node, device) of all slots."""
    devices = list[tuple[int, int]]()
    for slot in slots:
        devices += [(slot.node, device) for device in slot.devices]
    return devices


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), few, few, few, st.booleans(), strategies, strategies)
def test_every_part_has_devices_of_its_own_on_one_node_or_the_error_says_how_many_are_needed(
    gpus: list[int], ranks: int, engines: int, size: int, shared: bool, trainer: Strategy, generator: Strategy
) -> None:
    nodes = [NodeResources(f"n{index}", count) for index, count in enumerate(gpus)]
    engine_devices = engines * size
    needed_devices = max(ranks, engine_devices) if shared else ranks + engine_devices
    request = ResourceRequest(
        ranks=ranks,
        engines=engines,
        tensor_parallel_size=size,
        colocated=shared,
        trainer=trainer,
        generator=generator,
    )
    try:
        placement = place(nodes, request, "cuda")
    except ValueError as error:
        if not str(error).startswith(f"{needed_devices} GPUs needed, "):
            assert needed_devices <= sum(gpus)
            names_size = str(error).startswith(f"generation.tensor_parallel_size={size}: the workers of an engine are ")
            assert names_size == (size > max(gpus))
            in_parts = "share GPUs (placement.colocated), but not in equal parts on nodes with room" in str(error)
            assert names_size or (in_parts and shared and max(gpus) < needed_devices)
            return
        assert str(error).startswith(f"{needed_devices} GPUs needed, ")
        # A sufficient total is too few only where engines take several GPUs of one node.
        assert sum(gpus) < needed_devices or (size > 1 and not shared)
        return
    trainer_devices = devices_of(placement.trainers)
    generator_devices = devices_of(placement.engines)
    assert [len(slot.devices) for slot in placement.engines] == [size] * engines
    assert len(set(trainer_devices)) == len(trainer_devices) == ranks == placement.trainer_devices
    assert len(set(generator_devices)) == len(generator_devices) == engine_devices == placement.generator_devices
    assert shared or not set(trainer_devices) & set(generator_devices)
    all_devices = trainer_devices + generator_devices
    assert all(index < gpus[node] for node, index in all_devices)
    # Reserved GPUs of a node are counted from 0, without gaps.
    for node in placement.used_nodes:
        devices_of_node = {index for other_node, index in all_devices if other_node == node}
        assert devices_of_node == set(range(placement.gpus_on(node)))
    assert placement.shared == shared


@given(st.lists(st.integers(0, 8), min_size=1, max_size=4), few, few, st.sampled_from([0.5, 1.0, 2.0]), strategies)
def test_processes_on_cpus_take_no_more_than_a_node_has(
    cpus: list[int], ranks: int, engines: int, cpus_per_process: float, strategy: Strategy
) -> None:
    nodes = [NodeResources(f"n{index}", 0, float(count)) for index, count in enumerate(cpus)]
    most_processes = sum(int(count / cpus_per_process) for count in cpus)
    resources = ResourceRequest(ranks, engines, trainer=strategy, generator=strategy, cpus_per_process=cpus_per_process)
    if ranks + engines > most_processes:
        needed_cpus = (ranks + engines) * cpus_per_process
        with pytest.raises(ValueError, match=rf"^{needed_cpus:g} CPUs needed for .* the cluster has"):
            place(nodes, resources)
        return
    placement = place(nodes, resources)
    assert (placement.device, placement.shared) == ("cpu", True)
    assert all(placement.cpus_on(node) <= cpus[node] for node in placement.used_nodes)


def test_on_a_cpu_everything_shares_the_one_machine() -> None:
    placement = place(this_machine(0), ResourceRequest(ranks=2, engines=3, colocated=False))
    assert (placement.device, placement.shared) == ("cpu", True)
    assert (len(placement.trainers), len(placement.engines)) == (2, 3)
    assert (placement.trainer_devices, placement.generator_devices, placement.all_devices) == (1, 1, 1)


def test_colocated_engines_take_the_trainers_devices() -> None:
    placement = place(this_machine(4), ResourceRequest(ranks=4, engines=2, tensor_parallel_size=2, colocated=True))
    assert placement.trainers == [
        PlacementSlot(0, (0,)),
        PlacementSlot(0, (1,)),
        PlacementSlot(0, (2,)),
        PlacementSlot(0, (3,)),
    ]
    assert placement.engines == [PlacementSlot(0, (0, 1)), PlacementSlot(0, (2, 3))]
    assert (placement.shared, placement.all_devices) == (True, 4)


def test_engines_apart_stand_behind_the_trainers() -> None:
    placement = place(this_machine(8), ResourceRequest(ranks=4, engines=2, tensor_parallel_size=2, colocated=False))
    assert placement.engines == [PlacementSlot(0, (4, 5)), PlacementSlot(0, (6, 7))]
    assert (placement.trainer_devices, placement.generator_devices, placement.all_devices) == (4, 4, 8)


def test_too_few_devices_are_an_error_with_the_arithmetic() -> None:
    resources = ResourceRequest(ranks=2, engines=2, tensor_parallel_size=2, colocated=False)
    with pytest.raises(ValueError, match=r"6 GPUs needed, apart for 2 trainer ranks and 2 engines x 2 .* has 4$"):
        place(this_machine(4), resources)
    with pytest.raises(ValueError, match=r"the cluster has 5 GPUs free: a 4, b 1$"):
        place([NodeResources("a", 4), NodeResources("b", 1)], resources)
    with pytest.raises(ValueError, match=r"6 GPUs free: a 3, b 3; an engine's are of one node$"):
        place([NodeResources("a", 3), NodeResources("b", 3)], resources)


def test_pack_fills_a_node_that_holds_them_all_and_spread_takes_turns() -> None:
    packed = place(NODES, ResourceRequest(ranks=4, engines=4, colocated=False))
    assert [slot.node for slot in packed.trainers] == [0, 0, 0, 0]
    assert [slot.node for slot in packed.engines] == [1, 1, 1, 1]
    spread = place(NODES, ResourceRequest(ranks=4, engines=3, colocated=False, trainer="spread", generator="spread"))
    assert [slot.node for slot in spread.trainers] == [0, 0, 1, 2]
    assert [slot.node for slot in spread.engines] == [0, 1, 2]
    larger = place([NodeResources("a", 2), NodeResources("b", 8)], ResourceRequest(ranks=6, engines=2, colocated=False))
    assert {slot.node for slot in larger.trainers} == {1}


def test_colocated_engines_stay_on_one_node_with_the_trainer() -> None:
    assert place(NODES, ResourceRequest(ranks=4, engines=2, tensor_parallel_size=2)).used_nodes == [0]
    assert place(
        [NodeResources("a", 2), NodeResources("b", 4)], ResourceRequest(ranks=2, engines=2, tensor_parallel_size=2)
    ).used_nodes == [1]
    assert place(NODES, ResourceRequest(ranks=6)).used_nodes == [0, 1]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), few, few, few, st.sampled_from(["cuda", "cpu"]), strategies)
def test_several_nodes_with_engines_on_the_trainers_devices_have_equal_shares(
    devices_by_node: list[int], ranks: int, engines: int, size: int, device: Device, strategy: Strategy
) -> None:
    nodes = [NodeResources(f"n{index}", count, float(count)) for index, count in enumerate(devices_by_node)]
    try:
        placement = place(nodes, ResourceRequest(ranks, engines, size, trainer=strategy), device)
    except PlacementError:
        return
    shares = [placement.processes_on(node) for node in placement.used_nodes]
    if placement.by_node:
        assert len(shares) > 1 and len(set(shares)) == 1
    else:
        assert len(shares) == 1 or device == "cpu"


def test_ranks_and_engines_that_make_no_equal_shares_are_refused_in_a_line() -> None:
    placement = place(NODES, ResourceRequest(ranks=6, engines=2))
    assert (placement.used_nodes, placement.by_node, placement.ranks_by_node) == ([0, 1], True, (3, 3))
    assert [slot.node for slot in placement.engines] == [0, 1]
    with pytest.raises(ValueError, match=r"^7 trainer ranks and 2 engines x 1 share GPUs .* a 4, b 4, c 4$"):
        place(NODES, ResourceRequest(ranks=7, engines=2))


@pytest.mark.parametrize(("ranks", "colocated"), [(8, True), (4, False)])
def test_an_engine_over_two_nodes_is_refused_with_the_reason_and_the_remedy(ranks: int, colocated: bool) -> None:
    with pytest.raises(PlacementError) as caught:
        place(NODES, ResourceRequest(ranks, engines=1, tensor_parallel_size=8, colocated=colocated))
    assert str(caught.value) == (
        "generation.tensor_parallel_size=8: the workers of an engine are processes of one node, and the largest has 4 "
        "GPUs: at most 4; a model that 4 cannot hold needs larger ones; the cluster has 12 GPUs free: a 4, b 4, c 4"
    )


def test_a_run_fits_the_nodes_that_are_left_with_the_processes_of_as_many() -> None:
    def count_processes(
        nodes: list[NodeResources], request: ResourceRequest, former_nodes: int, device: Device
    ) -> list[tuple[int, int]]:
        return [(run.ranks, run.engines) for run in smaller_runs(nodes, request, former_nodes, device)]

    colocated = ResourceRequest(ranks=12, engines=6, tensor_parallel_size=2)
    assert count_processes(NODES, colocated, 3, "cuda") == [(12, 6), (8, 4), (4, 2)]
    assert count_processes(NODES[:2], colocated, 3, "cuda") == [(8, 4), (4, 2)]
    assert count_processes([NodeResources("a", 1)], colocated, 3, "cuda") == []
    apart = ResourceRequest(ranks=8, engines=1, colocated=False, cpus_per_process=2.0)
    assert count_processes(NODES[:2], apart, 3, "cpu") == [(5, 1), (2, 1)]
    supervised = ResourceRequest(ranks=8)
    assert count_processes(NODES[:1], supervised, 2, "cuda") == [(4, 0)]


def test_weights_stay_on_nodes_that_hold_a_copy_each() -> None:
    nodes = [NodeResources("a", 2, 4.0), NodeResources("b", 2, 4.0)]

    def place_run(device: Device, replicas: int) -> tuple[SettledGrpo, Placement]:
        processes = ["trainer.num_ranks=4", "generation.num_engines=4"]
        config = load("grpo", None, [*processes, f"trainer.replicas={replicas}"]).config
        assert isinstance(config, GrpoConfig)
        placement = place(nodes, requested_resources(settle(config, RunMachine(device), None)), device)
        return settle(config, RunMachine(device, None, placement.ranks_by_node), None), placement

    way = "ipc within each of 2 nodes, whose 2 ranks hold all weights"
    assert refit_way(*place_run("cuda", replicas=2)) == refit_way(*place_run("cuda", replicas=4)) == way
    assert refit_way(*place_run("cpu", replicas=2)) == way.replace("ipc", "shm")
    assert refit_way(*place_run("cpu", replicas=1)) == "broadcast between 2 nodes"
    with pytest.raises(PlacementError, match=r"a node's 2 ranks hold a part .* 4 ranks share a copy"):
        refit_way(*place_run("cuda", replicas=1))


def test_a_cluster_with_gpus_is_not_trained_on_by_its_cpus() -> None:
    with pytest.raises(ValueError, match="1 GPUs needed"):
        place([NodeResources("a", 0, 16.0)], ResourceRequest(ranks=1), "cuda")


def test_a_process_gets_the_devices_that_the_driver_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,3,GPU-1a")
    placement = place(
        this_machine(count_gpus()), ResourceRequest(ranks=1, engines=1, tensor_parallel_size=2, colocated=False)
    )
    allocation = Allocation(placement, [None], lambda prefix, root: "")
    assert allocation.devices(placement.trainers[0]) == ["6"]
    assert allocation.devices(placement.engines[0]) == ["3", "GPU-1a"]


def test_an_engine_sees_the_devices_of_its_node_that_it_reads_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,3,GPU-1a,2")
    apart = place(this_machine(4), ResourceRequest(ranks=2, engines=1, colocated=False))
    config = settle(load("grpo", None, []).config, RunMachine("cuda"), None)
    pair = place(this_machine(4), ResourceRequest(ranks=1, engines=1, colocated=False))
    (slot,) = engine_slots(config, Allocation(pair, [None], lambda prefix, root: ""), WAITS)
    assert slot.environment["CUDA_VISIBLE_DEVICES"] == "3,6"
    (slot,) = engine_slots(config, Allocation(apart, [None], lambda prefix, root: ""), WAITS)
    assert slot.environment["CUDA_VISIBLE_DEVICES"] == "GPU-1a", "by broadcast it reads no other's memory"
    shared = place(this_machine(4), ResourceRequest(ranks=2, engines=2, colocated=True))
    slots = engine_slots(config, Allocation(shared, [None], lambda prefix, root: ""), WAITS)
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["6,3", "3,6"]
    two_nodes = [NodeResources("a", 2), NodeResources("b", 2)]
    over_nodes = place(two_nodes, ResourceRequest(ranks=2, engines=2, colocated=False))
    assert [over_nodes.peer_devices(slot) for slot in over_nodes.engines] == [(), ()]


@pytest.mark.parametrize(
    ("ranks", "engines", "shared", "num_nodes", "expected"),
    [
        (1, 1, False, 1, "ipc"),
        (3, 1, False, 1, "broadcast"),
        (2, 2, False, 1, "broadcast"),
        (2, 2, True, 1, "ipc"),
        (8, 8, False, 4, "broadcast"),
    ],
)
def test_weights_go_by_what_was_measured_to_be_fastest(
    ranks: int, engines: int, shared: bool, num_nodes: int, expected: str
) -> None:
    nodes = [NodeResources(f"n{index}", 4) for index in range(num_nodes)]
    placement = place(nodes, ResourceRequest(ranks, engines, colocated=shared), "cuda")
    assert usual_transport(placement, engines) == expected


def test_on_a_cpu_weights_go_through_shared_memory() -> None:
    assert usual_transport(place([NodeResources("", 0, 4.0)], ResourceRequest(2, 2), "cpu"), 2) == "shm"


@pytest.mark.parametrize(
    ("recipe", "gpus", "shared", "transport"),
    [
        ("grpo-qwen3-0.6b-1gpu", 1, True, "ipc"),
        ("grpo-qwen3-0.6b-2gpu", 2, False, "ipc"),
        ("grpo-tiny", 0, True, "shm"),
    ],
)
def test_a_recipe_uses_as_many_gpus_as_its_name_says(recipe: str, gpus: int, shared: bool, transport: str) -> None:
    run = load("grpo", recipe, []).settled
    placement = place(this_machine(gpus), requested_resources(run))
    assert (placement.all_devices, placement.shared) == (max(1, gpus), shared)
    assert transport_of(run.settle_on(RunMachine(placement.device), None), placement) == transport


def test_a_transport_that_stays_on_a_node_is_refused_over_several(home: Path) -> None:
    run = load("grpo", "grpo.recipe.yaml", ["refit.transport=ipc", "placement.colocated=false"]).settled
    nodes = [NodeResources("a", 1), NodeResources("b", 1)]
    message = "refit.transport=ipc stays on a node, the run is on a, b: broadcast, or auto"
    with pytest.raises(PlacementError, match=message):
        transport_of(run.settle_on(RunMachine("cuda"), None), place(nodes, requested_resources(run)))
