import runpy
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
import typer.main
import typer.testing

from rlctl.bench import workload
from rlctl.models import facts, model_files, model_sizes
from tests.unit import folders

# Derived facts by the name of their file; None for a refused model.
FACTS: dict[str, facts.ModelFacts | None] = {}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the current directory a folder that `folders.write` fills."""
    monkeypatch.chdir(folders.write(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module", autouse=True)
def models_are_made_here() -> Iterator[None]:
    """Run modules that write models in this process. It has torch already: 4 s of CPU less a model.

    `test_a_process_of_its_own_derives_facts_and_keeps_them` has such a process.
    """

    def run_module_here(module: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        out = StringIO()
        err = StringIO()
        code = 0
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "argv", [module, *arguments])
            try:
                # The module may be imported already, as a part of others.
                with warnings.catch_warnings(action="ignore"):
                    runpy.run_module(module, run_name="__main__")
            except Exception:
                traceback.print_exc()
                code = 1
        return subprocess.CompletedProcess([module, *arguments], code, out.getvalue(), err.getvalue())

    with pytest.MonkeyPatch.context() as patch:
        for user in (model_files, workload):
            patch.setattr(user, "run_module", run_module_here)
        yield


@pytest.fixture(scope="session", autouse=True)
def commands_are_built_once() -> Iterator[None]:
    """Build the command line once a process, as for a user: 11 ms of CPU."""
    get_command = cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", get_command)
        patch.setattr(typer.testing, "_get_command", get_command)
        yield


@pytest.fixture(scope="module", autouse=True)
def facts_are_known() -> Iterator[None]:
    """Know the facts of every model, as after `rlctl model check`: derive them here, without a process of 3 s each."""

    def know_facts(folder: Path) -> facts.ModelFacts | None:
        from rlctl.models.derive import derive_facts

        # The name by which rlctl itself keeps them. Deriving takes 45 ms of CPU, in thousands of tests.
        name = facts.facts_file(folder, weights=False).name
        if name not in FACTS:
            try:
                FACTS[name] = derive_facts(folder, weights=False)
            except facts.ModelError:
                FACTS[name] = None
        return FACTS[name]

    def derive_here(folder: Path) -> facts.ModelFacts:
        from rlctl.models.derive import load_facts

        return load_facts(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_sizes, "known_facts", know_facts)
        patch.setattr(facts, "derive_apart", derive_here)
        yield
