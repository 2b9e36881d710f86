"""A family trains exactly, by the proof of `rlctl model check`, or is refused in the words that the zoo expects."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlctl.cli.main import app
from rlctl.config.errors import ConfigError
from rlctl.evaluation.model_check import Finding, check_model
from rlctl.evaluation.settings import checked_run
from rlctl.evaluation.target import find_target
from tests.tiny_models import KINDS, make_model

# Imported once for all engines: a family then takes 4 s instead of 15.
IMPORTS = (
    "vllm.engine.arg_utils",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "rlctl.generation.vllm.engine",
    "rlctl.generation.vllm.worker",
)


def findings(folder: Path, scratch: Path, engine: bool = True) -> Iterator[Finding]:
    scratch.mkdir()
    run, files, placement = checked_run(find_target(str(folder), folder.parent), scratch)
    yield from check_model(run, files, placement, engine, scratch, IMPORTS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_family_is_proven(kind: str, tmp_path: Path) -> None:
    found = list(findings(make_model(tmp_path / kind, kind), tmp_path / "check"))
    assert [each.text for each in found if each.holds is False] == []
    assert len(found) == 8


def test_the_command_prints_each_line_with_its_figure_and_ends_with_0(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["model", "check", str(make_model(tmp_path / "m", "qwen2"))])
    assert result.exit_code == 0
    first, *_ = result.stdout.splitlines()
    assert first.startswith("ok    packed = alone    log-probs of 96 tokens differ by")
    assert "FAILS" not in result.stdout


def test_a_model_that_cannot_train_is_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "nothing_known"}')
    result = CliRunner().invoke(app, ["model", "check", str(folder)])
    # `main` turns this error into exit code 2.
    assert isinstance(result.exception, ConfigError)
    assert "model_type nothing_known" in str(result.exception)
