"""A family trains exactly, by the proof of `rlctl model check`, or is refused in the words that the zoo expects."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rlctl
from rlctl.cli.main import app
from rlctl.config.errors import ConfigError
from rlctl.evaluation.model_check import check_model
from rlctl.evaluation.model_facts import Finding
from rlctl.evaluation.settings import checked_run
from rlctl.evaluation.target import find_target
from tests.system.training.scenario import WeightedLoss, assert_close, sequences, totals, trainer, weights
from tests.tiny_models import make_model
from tests.zoo import FAMILIES, make_family

# Imported once for all engines: a family then takes 4 s instead of 15.
IMPORTS = (
    "vllm.engine.arg_utils",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "rlctl.generation.vllm.engine",
    "rlctl.generation.vllm.worker",
)
TRAINED = [name for name, family in FAMILIES.items() if not family.refused]
REFUSED = [name for name, family in FAMILIES.items() if family.refused]
# One family for each mechanism; the others are long.
SHOWN = [name for name in TRAINED if FAMILIES[name].shows]
CASES = [name if name in SHOWN else pytest.param(name, marks=pytest.mark.long) for name in TRAINED]
# Engines alone refuse families: all train.
PACKED = [name if family.shows else pytest.param(name, marks=pytest.mark.long) for name, family in FAMILIES.items()]
DATA = sequences(6)
PACKAGE = Path(rlctl.__file__).parent
# model_type that transformers and vLLM know, and no file of ours.
STRANGER = "jais2"


def findings(folder: Path, scratch: Path) -> Iterator[Finding]:
    scratch.mkdir()
    run, files, placement = checked_run(find_target(str(folder), folder.parent), scratch)
    yield from check_model(run, files, placement, True, scratch, IMPORTS)


@pytest.mark.parametrize("name", CASES)
def test_a_family_is_proven(name: str, tmp_path: Path) -> None:
    found = list(findings(make_family(tmp_path / name, name), tmp_path / "check"))
    assert [each.text for each in found if each.holds is False] == []
    assert len([each for each in found if each.holds]) == 7


@pytest.mark.parametrize("name", PACKED)
def test_a_pack_has_its_sequences_gradients_and_a_resume_repeats_every_bit(name: str, tmp_path: Path) -> None:
    """With a large epsilon AdamW is smooth: equal gradients make equal weights."""
    with trainer(make_family(tmp_path / name, name), tmp_path) as one:
        one.save(tmp_path / "state")
        made = []
        for batches in ([DATA], [[each] for each in DATA], [DATA]):
            one.load(tmp_path / "state")
            made.append((one.train(batches, WeightedLoss(), totals(DATA))["train/grad_norm"], weights(one)))
        (norm, whole), (norm_alone, alone), (norm_again, again) = made
    assert norm_alone == pytest.approx(norm, rel=1e-4)
    assert_close(alone, whole, atol=1e-4)
    assert norm_again == norm
    assert_close(again, whole, atol=0)


@pytest.mark.long
def test_a_family_that_no_table_has_is_proven(tmp_path: Path) -> None:
    sources = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.yaml")]
    assert STRANGER not in FAMILIES and not any(STRANGER in each.read_text() for each in sources)
    found = list(findings(make_model(tmp_path / "m", STRANGER), tmp_path / "check"))
    assert [each.text for each in found if each.holds is False] == []
    assert len([each for each in found if each.holds]) == 7


@pytest.mark.long
@pytest.mark.parametrize("name", REFUSED)
def test_every_other_family_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    found: list[Finding] = []
    try:
        found += findings(make_family(tmp_path / name, name), tmp_path / "check")
        what = next((each.text for each in found if each.holds is False), "")
    except (ConfigError, RuntimeError, ValueError) as error:
        what = str(error)
    assert re.search(FAMILIES[name].refused, what), what


def test_the_zoo_has_forty_families_of_which_twenty_five_train() -> None:
    assert len(FAMILIES) >= 40 and len(TRAINED) >= 25
    assert {"window", "softcap", "logit scale", "experts", "buffers", "ties", "dropout"} <= {
        each for name in SHOWN for each in FAMILIES[name].shows
    }


def test_the_command_prints_each_line_with_its_figure_and_ends_with_0(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["model", "check", str(make_model(tmp_path / "m", "qwen2"))])
    assert result.exit_code == 0
    assert result.stdout.startswith("      model             Qwen2ForCausalLM, 2 layers, ")
    assert "ok    packed = alone    log-probs of 96 tokens differ by" in result.stdout
    assert "FAILS" not in result.stdout


def test_a_model_that_cannot_train_is_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "nothing_known"}')
    result = CliRunner().invoke(app, ["model", "check", str(folder)])
    # `main` turns a ConfigError into exit code 2; the command itself does so for a model that cannot be derived.
    assert result.exit_code == 2 or isinstance(result.exception, ConfigError)
