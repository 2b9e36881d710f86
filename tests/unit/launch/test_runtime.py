"""Every node checks for the files that nodes must share. If a node is lost, the run names a size that fits the rest."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlctl.launch.runtime import ClusterRuntime, must_share
from rlctl.preflight.placement import PlacementError, ResourceRequest
from rlctl.workers.errors import WorkerDied
from rlctl.workers.nodes import LiveNode, NodeRequest


@dataclass
class OtherNode:
    """A node that sees this machine's files, except below `hidden`."""

    name: str
    hidden: Path | None = None
    read_paths: list[str] = field(default_factory=list)

    def read_file(self, path: str) -> str | None:
        """Return the text of a file, or None if the node does not see it."""
        self.read_paths.append(path)
        is_hidden = self.hidden is not None and Path(path).is_relative_to(self.hidden)
        if is_hidden or not Path(path).exists():
            return None
        return Path(path).read_text()


def check_sharing(nodes: list[OtherNode], run: Path, model: Path | None) -> None:
    must_share(cast(Any, nodes), run, model)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make a run directory."""
    run = tmp_path / "run"
    run.mkdir()
    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Make a model folder."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


def test_every_node_is_asked_and_nothing_is_left(run: Path, model: Path) -> None:
    nodes = [OtherNode("a"), OtherNode("b")]
    check_sharing(nodes, run, model)
    assert [len(node.read_paths) for node in nodes] == [2, 2]
    assert not list(run.iterdir())


def test_a_run_directory_that_a_node_does_not_see_is_named(run: Path) -> None:
    with pytest.raises(PlacementError, match=f"run.dir: {run} is not seen from node b: put it on a file system"):
        check_sharing([OtherNode("a"), OtherNode("b", hidden=run)], run, None)
    assert not list(run.iterdir())


def test_a_model_that_a_node_does_not_see_is_named(run: Path, model: Path) -> None:
    with pytest.raises(PlacementError, match=f"model.path: {model} is not seen from node b"):
        check_sharing([OtherNode("a"), OtherNode("b", hidden=model)], run, model)
    check_sharing([OtherNode("b", hidden=model)], run, None)


def test_a_run_that_waited_in_vain_for_a_lost_node_says_what_fits_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [LiveNode(name, name, name, {"CPU": 2.0}, {"CPU": 2.0}) for name in ("a", "b")]
    monkeypatch.setattr("rlctl.workers.nodes.live_nodes", lambda: nodes)
    monkeypatch.setattr("rlctl.workers.nodes.Reservation", LocalReservation)
    for name in ("ray_session", "watch_node"):
        monkeypatch.setattr(f"rlctl.launch.local_ray.{name}", lambda *args, **kwargs: nullcontext())
    session: Any = SimpleNamespace(
        logs=Path(),
        attempts=1,
        interrupts=SimpleNamespace(is_requested=False),
        events=SimpleNamespace(emit=print),
        smaller=[],
        lose=print,
        give_up=print,
    )
    session.config = SimpleNamespace(placement=SimpleNamespace(wait_s=-1.0))
    runtime = ClusterRuntime(wait=False)
    request = ResourceRequest(2, 2, 1, colocated=True)
    with pytest.raises(WorkerDied), runtime.slots(session, request) as slots:
        assert len(slots.placement.used_nodes) == 2
        nodes.pop()
        raise WorkerDied("train", ["trainer-1"], "node b is gone")
    assert [(smaller.ranks, smaller.engines) for smaller in session.smaller] == [(1, 1)]
    session.attempts = 2
    session.smaller = []
    with (
        pytest.raises(TimeoutError, match=r"^no room within placement\.wait_s=-1: "),
        runtime.slots(session, request),
    ):
        pytest.fail("the run found room")
    assert [(smaller.ranks, smaller.engines) for smaller in session.smaller] == [(1, 1)]


class LocalReservation:
    """Stand-in for a reservation on a cluster, whose nodes do not exist."""

    def __init__(self, requests: list[NodeRequest], deadline_s: float) -> None:
        self.requests = requests
        self.nodes = [SimpleNamespace(memory=None) for _ in requests]
        for request in requests:
            request.node.free["CPU"] -= request.cpus

    def release(self) -> None:
        """Give the CPUs back."""
        for request in self.requests:
            request.node.free["CPU"] += request.cpus
