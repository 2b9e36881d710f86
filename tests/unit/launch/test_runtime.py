"""Every node looks for the files that nodes must share; a run whose node is lost says what fits the others."""

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
class Elsewhere:
    """A node that sees this machine's files, except below `hidden`."""

    name: str
    hidden: Path | None = None
    asked: list[str] = field(default_factory=list)

    def read_file(self, path: str) -> str | None:
        """The file, if it is seen."""
        self.asked.append(path)
        seen = self.hidden is None or not Path(path).is_relative_to(self.hidden)
        return Path(path).read_text() if seen and Path(path).exists() else None


def _share(nodes: list[Elsewhere], run: Path, model: Path | None) -> None:
    must_share(cast(Any, nodes), run, model)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """(run directory, model folder)."""
    run, model = tmp_path / "run", tmp_path / "model"
    run.mkdir()
    model.mkdir()
    (model / "config.json").write_text("{}")
    return run, model


def test_every_node_is_asked_and_nothing_is_left(folders: tuple[Path, Path]) -> None:
    run, model = folders
    nodes = [Elsewhere("a"), Elsewhere("b")]
    _share(nodes, run, model)
    assert [len(node.asked) for node in nodes] == [2, 2]
    assert not list(run.iterdir())


def test_a_run_directory_that_a_node_does_not_see_is_named(folders: tuple[Path, Path]) -> None:
    run, _ = folders
    with pytest.raises(PlacementError, match=f"run.dir: {run} is not seen from node b: put it on a file system"):
        _share([Elsewhere("a"), Elsewhere("b", hidden=run)], run, None)
    assert not list(run.iterdir())


def test_a_model_that_a_node_does_not_see_is_named(folders: tuple[Path, Path]) -> None:
    run, model = folders
    with pytest.raises(PlacementError, match=f"model.path: {model} is not seen from node b"):
        _share([Elsewhere("a"), Elsewhere("b", hidden=model)], run, model)
    _share([Elsewhere("b", hidden=model)], run, None)


def test_a_run_that_waited_in_vain_for_a_lost_node_says_what_fits_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [LiveNode(name, name, name, {"CPU": 2.0}, {"CPU": 2.0}) for name in ("a", "b")]
    monkeypatch.setattr("rlctl.workers.nodes.live_nodes", lambda: nodes)
    monkeypatch.setattr("rlctl.workers.nodes.Reservation", Held)
    for name in ("ray_session", "watch_node"):
        monkeypatch.setattr(f"rlctl.launch.local_ray.{name}", lambda *given, **more: nullcontext())
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
    run, whole = ClusterRuntime(wait=False), ResourceRequest(2, 2, 1, colocated=True)
    for attempt, error in enumerate((WorkerDied("train", ["trainer-1"], "node b is gone"), None), 1):
        session.attempts, session.smaller = attempt, []
        with pytest.raises((WorkerDied, TimeoutError)) as raised, run.slots(session, whole) as held:
            assert len(held.placement.used_nodes) == 2 and error
            nodes.pop()
            raise error
        assert [(each.ranks, each.engines) for each in session.smaller] == [(1, 1)]
    assert str(raised.value).startswith("no room within placement.wait_s=-1: ")


class Held:
    """A reservation of shares of nodes that are not there."""

    def __init__(self, shares: list[NodeRequest], deadline_s: float) -> None:
        self.shares = shares
        self.nodes = [SimpleNamespace(memory=None) for _ in shares]
        for share in shares:
            share.node.free["CPU"] -= share.cpus

    def release(self) -> None:
        """Give the shares back."""
        for share in self.shares:
            share.node.free["CPU"] += share.cpus
