"""A family trains exactly, by the proof of `rlctl model check`, or is refused in the words that the zoo expects."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rlctl
from rlctl.cli.main import app
from rlctl.config.errors import ConfigError
from tests.faults.runs import Run
from tests.system.training.scenario import WeightedLoss, assert_close, open_trainer, sequences, totals, weights
from tests.tiny_models import make_model
from tests.zoo import FAMILIES, KIN, make_family
from tests.zoo_table import findings

TRAINED = [name for name, family in FAMILIES.items() if not family.refused]
REFUSED = [name for name, family in FAMILIES.items() if family.refused]
# One family for each mechanism; the others are long.
SHOWN = [name for name in TRAINED if FAMILIES[name].shows]
CASES = [name if name in SHOWN else pytest.param(name, marks=pytest.mark.long) for name in TRAINED]
# Engines alone refuse families: all train. Families that are proven have their packs' gradients compared there.
PACKED = [
    name if family.shows and family.refused else pytest.param(name, marks=pytest.mark.long)
    for name, family in FAMILIES.items()
]
DATA = sequences(6)
PACKAGE = Path(rlctl.__file__).parent
# A model_type that transformers and vLLM know, and that no file here names.
STRANGER = "jais2"


@pytest.mark.parametrize("name", CASES)
def test_a_family_is_proven(name: str, tmp_path: Path) -> None:
    found = list(findings(make_family(tmp_path / name, name), tmp_path / "check"))
    assert [each.text for each in found if each.holds is False] == []
    assert len([each for each in found if each.holds]) == 9


@pytest.mark.parametrize("name", PACKED)
def test_a_pack_has_its_sequences_gradients_and_a_resume_repeats_every_bit(name: str, tmp_path: Path) -> None:
    """With a large epsilon AdamW is smooth: equal gradients make equal weights."""
    with open_trainer(make_family(tmp_path / name, name), tmp_path) as one:
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
@pytest.mark.parametrize("name", ["stablelm", "gptj"])
def test_a_model_of_one_sequence_a_row_trains_by_grpo(name: str, tmp_path: Path) -> None:
    """The attention of stablelm drops the arguments of a pack; that of gptj cannot be replaced."""
    (tmp_path / "mine.py").write_text(
        "def spread(prompt, completion, answer, row):\n    return sum(map(ord, completion)) % 17 / 17\n"
    )
    folder = make_family(tmp_path / name, name)
    settings = ("model.random_init=false", "grpo.num_steps=3", "validation.every=0", "rewards=[{name: 'mine:spread'}]")
    run = Run(tmp_path, "rows", f"model.path={folder}", *settings)
    assert run.end() == 0, run.text()
    assert len(run.steps()) == 3
    for step in run.steps():
        assert step["mismatch/token_mult_prob_error"] < 1.001 and step["train/grad_norm"] > 0
        assert 0 < step["train/padding"] < 0.5
    said = [event["what"] for event in run.events() if event["kind"] == "warning"]
    assert len([what for what in said if "one sequence a row" in what]) == 1


@pytest.mark.parametrize(
    "name", [name if name == "gpt2" else pytest.param(name, marks=pytest.mark.long) for name in KIN]
)
def test_gpt2_and_its_kin_train(name: str, tmp_path: Path) -> None:
    """The forward passes of GPT-2 read tokens for a warning, and gpt_neo has masks of its longest sequence."""
    found = list(findings(make_family(tmp_path / name, name), tmp_path / "check", engine=False))
    assert [each.text for each in found if each.holds is False] == []
    assert len([each for each in found if each.holds]) == 4


@pytest.mark.long
def test_a_family_that_no_table_has_is_proven(tmp_path: Path) -> None:
    sources = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.yaml")]
    assert STRANGER not in FAMILIES | KIN and not any(STRANGER in each.read_text() for each in sources)
    found = list(findings(make_model(tmp_path / "m", STRANGER), tmp_path / "check"))
    assert [each.text for each in found if each.holds is False] == []
    assert len([each for each in found if each.holds]) == 9


@pytest.mark.long
@pytest.mark.parametrize("name", REFUSED)
def test_every_other_family_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    try:
        found = list(findings(make_family(tmp_path / name, name), tmp_path / "check"))
        reason = next((each.text for each in found if each.holds is False), "")
    except (ConfigError, RuntimeError, ValueError) as error:
        reason = str(error)
    assert re.search(FAMILIES[name].refused, reason), reason


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
