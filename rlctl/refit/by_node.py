"""Concurrent refits of several nodes: the engines of a node receive weights from the trainer ranks of that node.

The trainer ranks of each node together have all weights, split in the same way. So one plan serves all nodes. The plan
numbers a node's ranks from 0, and so do the error messages of the node's processes.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from rlctl.refit.protocol import Checks, RefitError, RefitReport
from rlctl.refit.refit import EngineEnd, EnginesLost, Refit, RefitOptions, ask_holdings, make_plan
from rlctl.refit.sender import Holding, SendsWeights
from rlctl.workers.group import Worker, WorkerGroup

T = TypeVar("T")


class RefitByNode:
    """One `Refit` for each node, with the methods of `Refit`. Indices of engines count the engines of all nodes."""

    def __init__(self, trainers: WorkerGroup, options: RefitOptions, folders: Mapping[str, str]) -> None:
        """Make the plan, and a refit for each node.

        folders: node id -> folder in host memory (`TransportSpec.folder`), in the order of the ranks. Raises RefitError
        if the ranks of two nodes hold different boxes.
        """
        self._trainers = trainers
        self.options = options
        ranks_of_node: dict[str, list[int]] = {node: [] for node in folders}
        for rank, worker in enumerate(trainers.workers):
            node = node_of(worker)
            if node in ranks_of_node:
                ranks_of_node[node].append(rank)
        node_ranks = list(ranks_of_node.values())
        layout, holdings = ask_holdings(trainers, options.dtype, node_ranks[0])
        _verify_alike(holdings, node_ranks)
        planned = make_plan(layout, [holdings[rank] for rank in node_ranks[0]], options)
        self.plan = planned.plan
        self.buffer_bytes = planned.buffer_bytes
        self._refits: dict[str, Refit] = {}
        for node, ranks in ranks_of_node.items():
            node_options = replace(options, folder=folders[node], first_rank=ranks[0])
            self._refits[node] = Refit(trainers.part(ranks), node_options, planned)

    def open(self, engines: list[EngineEnd]) -> list[Any]:
        """Connect both ends on every node, see `Refit.open`."""
        modes: dict[int, Any] = {}

        def open_node(refit: Refit, node_engines: list[EngineEnd]) -> None:
            for engine, mode in zip(node_engines, refit.open(node_engines)):
                modes[id(engine)] = mode

        self._run_nodes(engines, open_node)
        return [modes[id(engine)] for engine in engines]

    def run(self, engines: list[EngineEnd], version: int, checks: Checks | None = None) -> RefitReport:
        """Send `version` on every node, see `Refit.run`. Return the report of the slowest node."""
        reports = self._run_nodes(engines, lambda refit, node_engines: refit.run(node_engines, version, checks))
        slowest = max(reports, key=lambda report: report.seconds)
        stall = max(report.stall for report in reports)
        return replace(slowest, pack=max(report.pack for report in reports), stall=stall)

    def resend(self, engines: list[EngineEnd], fresh: list[EngineEnd], behind: list[EngineEnd], version: int) -> None:
        """Bring the engines `fresh` and `behind` to a version on their nodes, see `Refit.resend`."""
        nodes = {node_of(engine.worker) for engine in fresh + behind}
        engines_of_nodes = [engine for engine in engines if node_of(engine.worker) in nodes]

        def resend_to_node(refit: Refit, node_engines: list[EngineEnd]) -> None:
            refit.resend(
                node_engines,
                fresh=[engine for engine in node_engines if engine in fresh],
                behind=[engine for engine in node_engines if engine in behind],
                version=version,
            )

        try:
            self._run_nodes(engines_of_nodes, resend_to_node)
        except EnginesLost as error:
            reasons = {engines.index(engines_of_nodes[index]): reason for index, reason in error.reasons.items()}
            raise EnginesLost(reasons) from error

    def catch_up(self, behind: list[EngineEnd], version: int) -> None:
        """Bring engines to `version` on their nodes, see `Refit.catch_up`."""
        self._run_nodes(behind, lambda refit, node_engines: refit.catch_up(node_engines, version))

    def rest_trainers(self) -> None:
        """Make the trainers free their device memory for the engines that share their devices."""
        self._trainers.call(SendsWeights.rest)

    def _run_nodes(self, engines: list[EngineEnd], run_node: Callable[[Refit, list[EngineEnd]], T]) -> list[T]:
        """Call `run_node` concurrently for all nodes with engines; return the results once all calls have ended.

        Raises EnginesLost with the lost engines of all nodes, or the first error that no engine caused.
        """
        indices_of_node: dict[str, list[int]] = {}
        for index, engine in enumerate(engines):
            indices_of_node.setdefault(node_of(engine.worker), []).append(index)
        calls: dict[str, Future[T]] = {}
        with ThreadPoolExecutor(max(1, len(indices_of_node)), "refit") as threads:
            for node, indices in indices_of_node.items():
                node_engines = [engines[index] for index in indices]
                calls[node] = threads.submit(run_node, self._refits[node], node_engines)
        lost: dict[int, Exception] = {}
        errors: list[Exception] = []
        results: list[T] = []
        for node, call in calls.items():
            try:
                results.append(call.result())
            except EnginesLost as error:
                lost |= {indices_of_node[node][index]: reason for index, reason in error.reasons.items()}
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        if lost:
            raise EnginesLost(dict(sorted(lost.items())))
        return results


def node_of(worker: Worker) -> str:
    """Return the id of a worker's node; empty if the cluster is a single machine."""
    return worker.spec.node.id if worker.spec.node else ""


def _verify_alike(holdings: Sequence[Holding], ranks: Sequence[Sequence[int]]) -> None:
    """Raise RefitError unless the ranks of every node hold the same boxes as the first node's ranks."""
    for node_ranks in ranks[1:]:
        if len(node_ranks) != len(ranks[0]):
            raise RefitError(f"nodes have {len(ranks[0])} and {len(node_ranks)} trainer ranks: no plan serves both")
        for first, rank in zip(ranks[0], node_ranks):
            if holdings[first].boxes_digest != holdings[rank].boxes_digest:
                raise RefitError(f"trainer ranks {first} and {rank} hold different boxes: no plan serves both nodes")
