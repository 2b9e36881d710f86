"""The runtime of a driver that is a job of a cluster: it reserves slots on the cluster's nodes for this run."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.launch.ray_session import ray_session
from rlctl.launch.runtime import Allocation, Announce, must_share
from rlctl.preflight.placement import NodeResources, Placement, PlacementError, ResourceRequest, place
from rlctl.preflight.resolved import Device
from rlctl.run.run_dir import RunDir

if TYPE_CHECKING:
    from rlctl.launch.session import Session
    from rlctl.workers.nodes import LiveNode, Reservation

_RESERVE_S = 120.0
_POLL_S = 3.0


class ClusterRuntime:
    """The cluster that RAY_ADDRESS of this process names. wait: wait for room already at the first attempt."""

    def __init__(self, wait: bool) -> None:
        self._wait = wait

    def refuse(self, run: RunDir) -> None:
        """Refuse nothing: the submitter of the job has checked the run."""

    @contextmanager
    def allocation(self, session: "Session", resources: ResourceRequest, announce: Announce) -> Iterator[Allocation]:
        """Reserve slots, see `Runtime.allocation`.

        Raises PlacementError with the arithmetic if there is too little room and it must not wait, TimeoutError after
        `placement.wait_s`.
        """
        with ExitStack() as stack:
            stack.enter_context(ray_session(session.logs, address="auto"))
            placement, reservation = self._reserved(session, resources)
            stack.callback(reservation.release)
            announce(placement)
            nodes = dict(zip(placement.used, reservation.nodes))
            model = Path(session.config.model.path)
            others = [node for node in reservation.nodes if not node.is_the_drivers]
            must_share(others, session.run_dir.path.resolve(), model if model.is_dir() else None)
            # Weights in transit are on the node of the processes, which need not be the driver's.
            folder = reservation.nodes[0].folder
            yield Allocation(placement, [nodes.get(index) for index in range(len(placement.nodes))], folder)

    def _reserved(self, session: "Session", resources: ResourceRequest) -> tuple[Placement, "Reservation"]:
        from rlctl.workers.nodes import NodeRequest, NoRoom, Reservation, live_nodes

        patient = self._wait or session.attempts > 1
        end, told = time.monotonic() + session.config.placement.wait_s, ""
        while True:
            found = live_nodes()
            try:
                placement = _placed(found, resources)
                shares = [NodeRequest(found[n], placement.gpus_on(n), placement.cpus_on(n)) for n in placement.used]
                return placement, Reservation(shares, _RESERVE_S)
            except (PlacementError, NoRoom) as error:
                why = str(error)
                if not patient:
                    raise PlacementError(f"{why}; --wait waits for it") from None
            if time.monotonic() > end:
                raise TimeoutError(f"no room within placement.wait_s={session.config.placement.wait_s:g}: {why}")
            if session.interrupts.asked:
                raise KeyboardInterrupt
            if why != told:
                told = why
                session.events.emit("warning", what=f"waiting for room: {why}")
            time.sleep(_POLL_S)


def _placed(found: "list[LiveNode]", resources: ResourceRequest) -> Placement:
    """Place the run on free resources. A cluster with GPUs does not train on its CPUs."""
    device: Device = "cuda" if any(each.total.get("GPU") for each in found) else "cpu"
    return place([NodeResources.of(each.name, each.free) for each in found], resources, device)
