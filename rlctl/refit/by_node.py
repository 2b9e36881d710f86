"""Refits of several nodes side by side: the engines of a node take weights from the trainer ranks of that node.

Ranks of all nodes hold the same boxes in the same order, so one plan serves all nodes. Its owners are counted from a
node's first rank, and so are ranks in messages of a node's processes.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from rlctl.refit.protocol import Checks, RefitError, RefitReport
from rlctl.refit.refit import EngineEnd, EnginesLost, Refit, RefitOptions, ask_holdings, make_plan
from rlctl.refit.sender import Holding, SendsWeights
from rlctl.workers.group import Worker, WorkerGroup

T = TypeVar("T")


class RefitByNode:
    """A `Refit` for each node, with the same calls. Engines are known by their places among those of all nodes."""

    def __init__(self, trainers: WorkerGroup, options: RefitOptions, folders: Mapping[str, str]) -> None:
        """Make the plan, and a refit for each node.

        folders: node id -> folder of weights in transit, in the order of the ranks. Raises RefitError if the ranks of
        two nodes hold different boxes.
        """
        self._trainers, self.options = trainers, options
        ranks = [[n for n, worker in enumerate(trainers.workers) if node_of(worker) == node] for node in folders]
        layout, holdings = ask_holdings(trainers, options.dtype, ranks[0])
        _verify_alike(holdings, ranks)
        planned = make_plan(layout, [holdings[rank] for rank in ranks[0]], options)
        self.plan, self.buffer_bytes = planned.plan, planned.buffer_bytes
        self._refits = {
            node: Refit(trainers.part(own), replace(options, folder=folder, first_rank=own[0]), planned)
            for (node, folder), own in zip(folders.items(), ranks)
        }

    def open(self, engines: list[EngineEnd]) -> list[Any]:
        """Connect both ends on every node, see `Refit.open`."""
        found = self._together(engines, lambda refit, own: list(zip(own, refit.open(own))))
        modes = {id(engine): mode for opened in found for engine, mode in opened}
        return [modes[id(engine)] for engine in engines]

    def run(self, engines: list[EngineEnd], version: int, checks: Checks | None = None) -> RefitReport:
        """Send `version` on every node, see `Refit.run`. The report is the slowest node's."""
        reports = self._together(engines, lambda refit, own: refit.run(own, version, checks))
        slowest = max(reports, key=lambda report: report.seconds)
        stall = max(report.stall for report in reports)
        return replace(slowest, pack=max(report.pack for report in reports), stall=stall)

    def resend(self, engines: list[EngineEnd], fresh: list[EngineEnd], behind: list[EngineEnd], version: int) -> None:
        """Bring engines to a version on the nodes that have such, see `Refit.resend`."""
        nodes = {node_of(each.worker) for each in (*fresh, *behind)}
        concerned = [each for each in engines if node_of(each.worker) in nodes]

        def send(refit: Refit, own: list[EngineEnd]) -> None:
            refit.resend(
                own, [each for each in own if each in fresh], [each for each in own if each in behind], version
            )

        try:
            self._together(concerned, send)
        except EnginesLost as error:
            raise EnginesLost({engines.index(concerned[n]): why for n, why in error.reasons.items()}) from error

    def catch_up(self, behind: list[EngineEnd], version: int) -> None:
        """Bring engines to `version` on the nodes that have such, see `Refit.catch_up`."""
        self._together(behind, lambda refit, own: refit.catch_up(own, version))

    def rest_trainers(self) -> None:
        """Have the trainers give the device's memory to engines that share it."""
        self._trainers.call(SendsWeights.rest)

    def _together(self, engines: list[EngineEnd], work: Callable[[Refit, list[EngineEnd]], T]) -> list[T]:
        """Return the results of all nodes that have engines, once all have ended.

        Raises EnginesLost with the lost engines of all nodes, or the first error that no engine caused.
        """
        places: dict[str, list[int]] = {}
        for place, engine in enumerate(engines):
            places.setdefault(node_of(engine.worker), []).append(place)
        lost, errors, results = dict[int, Exception](), list[Exception](), list[T]()
        with ThreadPoolExecutor(max(1, len(places)), "refit") as threads:
            calls = {n: threads.submit(work, self._refits[n], [engines[p] for p in own]) for n, own in places.items()}
        for node, call in calls.items():
            try:
                results.append(call.result())
            except EnginesLost as error:
                lost |= {places[node][index]: why for index, why in error.reasons.items()}
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        if lost:
            raise EnginesLost(dict(sorted(lost.items())))
        return results


def node_of(worker: Worker) -> str:
    """Return the id of a worker's node; empty where there is one machine alone."""
    return worker.spec.node.id if worker.spec.node else ""


def _verify_alike(holdings: Sequence[Holding], ranks: Sequence[Sequence[int]]) -> None:
    """Raise RefitError unless the ranks of every node hold the boxes that those of the first one hold."""
    for own in ranks[1:]:
        if len(own) != len(ranks[0]):
            raise RefitError(f"nodes have {len(ranks[0])} and {len(own)} trainer ranks: no plan serves both")
        for first, rank in zip(ranks[0], own):
            if holdings[first].boxes_digest != holdings[rank].boxes_digest:
                raise RefitError(f"trainer ranks {first} and {rank} hold different boxes: no plan serves both nodes")
