"""Every node looks for the files that nodes must share."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from rlctl.launch.runtime import must_share
from rlctl.preflight.placement import PlacementError


@dataclass
class Elsewhere:
    """A node that sees this machine's files, except below `hidden`."""

    name: str
    hidden: Path | None = None
    asked: list[str] = field(default_factory=list)

    def reads(self, path: str) -> str | None:
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
