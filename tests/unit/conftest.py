import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main
import typer.testing

from rlctl.models import facts, model_sizes
from tests.unit import folders

# Derived facts by the name of their file; None for a refused model.
FACTS: dict[str, facts.ModelFacts | None] = {}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, filled by `folders.write`."""
    monkeypatch.chdir(folders.write(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Have torch compute on one thread: more than one a core wait for each other, 49 s of CPU instead of 8 in packs."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def commands_are_built_once() -> Iterator[None]:
    """The command line is built once a process, as for a user: 11 ms of CPU."""
    built = cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", built)
        patch.setattr(typer.testing, "_get_command", built)
        yield


@pytest.fixture(scope="module", autouse=True)
def facts_are_known() -> Iterator[None]:
    """Facts of every model are known, as after `rlctl model check`: derived here, without a process of 3 s each."""

    def derived(folder: Path) -> facts.ModelFacts | None:
        from rlctl.models.derive import derive_facts

        # The name by which rlctl itself keeps them. Deriving takes 45 ms of CPU, in thousands of tests.
        name = facts.facts_file(folder, weights=False).name
        if name not in FACTS:
            try:
                FACTS[name] = derive_facts(folder, weights=False)
            except facts.ModelError:
                FACTS[name] = None
        return FACTS[name]

    def here(folder: Path) -> facts.ModelFacts:
        from rlctl.models.derive import load_facts

        return load_facts(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_sizes, "known_facts", derived)
        patch.setattr(facts, "derive_apart", here)
        yield
