import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlctl.models import facts, model_sizes
from tests.unit import folders


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


@pytest.fixture(scope="module", autouse=True)
def facts_are_known() -> Iterator[None]:
    """Facts of every model are known, as after `rlctl model check`: derived here, without a process of 3 s each."""

    def derived(folder: Path) -> facts.ModelFacts | None:
        from rlctl.models.derive import derive_facts

        try:
            return derive_facts(folder, weights=False)
        except facts.ModelError:
            return None

    def here(folder: Path) -> facts.ModelFacts:
        from rlctl.models.derive import load_facts

        return load_facts(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_sizes, "known_facts", derived)
        patch.setattr(facts, "derive_apart", here)
        yield
