"""A family trains exactly, by the proof of `rlctl model check`, or is refused in the words that the zoo expects."""

import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rlctl
from rlctl.cli.main import app
from rlctl.config.errors import ConfigError
from rlctl.evaluation.model_facts import Finding
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
# Engines alone refuse families: all train. A proof of a family compares the gradients of packs too.
PACKED = [
    name if family.shows and family.refused else pytest.param(name, marks=pytest.mark.long)
    for name, family in FAMILIES.items()
]
DATA = sequences(6)
PACKAGE = Path(rlctl.__file__).parent
# A model_type of transformers and vLLM. No file of rlctl names it.
STRANGER = "jais2"


@pytest.mark.parametrize("name", CASES)
def test_a_family_is_proven(name: str, tmp_path: Path) -> None:
    assert_proven(findings(make_family(tmp_path / name, name), tmp_path / "check"), 9)


def assert_proven(all_findings: Iterable[Finding], num_proofs: int) -> None:
    """Assert that no finding fails, and count the proven ones."""
    all_findings = list(all_findings)
    assert [finding.text for finding in all_findings if finding.holds is False] == []
    assert len([finding for finding in all_findings if finding.holds]) == num_proofs


@pytest.mark.parametrize("name", PACKED)
def test_a_pack_has_its_sequences_gradients_and_a_resume_repeats_every_bit(name: str, tmp_path: Path) -> None:
    """With a large epsilon AdamW is smooth: equal gradients make equal weights."""
    norms = []
    trained_weights = []
    alone = [[sequence] for sequence in DATA]
    with open_trainer(make_family(tmp_path / name, name), tmp_path) as trainer:
        trainer.save(tmp_path / "state")
        for micro_batches in ([DATA], alone, [DATA]):
            trainer.load(tmp_path / "state")
            norms.append(trainer.train(micro_batches, WeightedLoss(), totals(DATA))["train/grad_norm"])
            trained_weights.append(weights(trainer))
    norm, norm_alone, norm_resumed = norms
    assert norm_alone == pytest.approx(norm, rel=1e-4)
    assert norm_resumed == norm
    weights_of_pack, weights_alone, weights_resumed = trained_weights
    assert_close(weights_alone, weights_of_pack, atol=1e-4)
    assert_close(weights_resumed, weights_of_pack, atol=0)


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
    warnings = [event["what"] for event in run.events() if event["kind"] == "warning"]
    assert len([warning for warning in warnings if "one sequence a row" in warning]) == 1


@pytest.mark.parametrize(
    "name", [name if name == "gpt2" else pytest.param(name, marks=pytest.mark.long) for name in KIN]
)
def test_gpt2_and_its_kin_train(name: str, tmp_path: Path) -> None:
    """The forward passes of GPT-2 read tokens for a warning, and gpt_neo has masks of its longest sequence."""
    assert_proven(findings(make_family(tmp_path / name, name), tmp_path / "check", engine=False), 4)


@pytest.mark.long
def test_a_family_that_no_table_has_is_proven(tmp_path: Path) -> None:
    sources = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.yaml")]
    assert STRANGER not in FAMILIES | KIN and not any(STRANGER in source.read_text() for source in sources)
    assert_proven(findings(make_model(tmp_path / "m", STRANGER), tmp_path / "check"), 9)


@pytest.mark.long
@pytest.mark.parametrize("name", REFUSED)
def test_every_other_family_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    try:
        all_findings = list(findings(make_family(tmp_path / name, name), tmp_path / "check"))
        reason = next((finding.text for finding in all_findings if finding.holds is False), "")
    except (ConfigError, RuntimeError, ValueError) as error:
        reason = str(error)
    assert re.search(FAMILIES[name].refused, reason), reason


def test_the_zoo_has_forty_families_of_which_twenty_five_train() -> None:
    assert len(FAMILIES) >= 40 and len(TRAINED) >= 25
    mechanisms = set(chain.from_iterable(FAMILIES[name].shows for name in SHOWN))
    assert {"window", "softcap", "logit scale", "experts", "buffers", "ties", "dropout"} <= mechanisms


def test_the_command_prints_each_line_with_its_figure_and_ends_with_0(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(app, ["model", "check", str(make_model(tmp_path / "m", "qwen2"))])
    assert outcome.exit_code == 0
    assert outcome.stdout.startswith("      model             Qwen2ForCausalLM, 2 layers, ")
    assert "ok    packed = alone    log-probs of 96 tokens differ by" in outcome.stdout
    assert "FAILS" not in outcome.stdout


def test_a_model_that_cannot_train_is_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "nothing_known"}')
    outcome = CliRunner().invoke(app, ["model", "check", str(folder)])
    # `main` turns a ConfigError into exit code 2; the command itself does so for a model that cannot be derived.
    assert outcome.exit_code == 2 or isinstance(outcome.exception, ConfigError)
