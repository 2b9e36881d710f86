"""`rlctl model check` of folders as people have them: one works as it should, or ends with one clear line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from rlctl.cli.main import app
from rlctl.evaluation.model_facts import Finding
from tests.tiny_models import make_model
from tests.zoo_table import findings

EMBEDDING = "model.embed_tokens.weight"


def set_keys(folder: Path, name: str, **keys: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    file = folder / name
    values = json.loads(file.read_text()) | keys
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def with_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Rewrite the weights of a folder."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return folder


def unusual(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A padded vocabulary whose embedding is saved again as the output, in float16."""
    held = tensors[EMBEDDING]
    padded = torch.cat([held, 0.02 * torch.randn(64, held.shape[1])])
    changed = tensors | {EMBEDDING: padded, "lm_head.weight": padded}
    return {name: each.half().clone() for name, each in changed.items()}


def lines(found: list[Finding], subject: str) -> str:
    return " ".join(each.text for each in found if each.subject == subject)


def test_a_padded_float16_model_with_two_ends_no_pad_and_its_tie_saved_twice_is_proven(tmp_path: Path) -> None:
    folder = with_tensors(make_model(tmp_path / "m", "qwen3"), unusual)
    set_keys(folder, "config.json", vocab_size=128, dtype="float16", pad_token_id=None)
    set_keys(folder, "generation_config.json", eos_token_id=[1, 5], pad_token_id=None)
    set_keys(folder, "tokenizer_config.json", pad_token=None)
    # Code of a folder is never run: transformers knows the model.
    set_keys(folder, "config.json", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    (folder / "modeling_mine.py").write_text("raise SystemExit('this was run')")
    found = list(findings(folder, tmp_path / "check"))
    assert [each.text for each in found if each.holds is False] == []
    assert len([each for each in found if each.holds]) == 9
    assert lines(found, "tokens").startswith("64; 64 rows of the vocabulary have none; an answer ends with <eos> 1 (")
    assert ", 2 5 (generation_config.json)" in lines(found, "tokens")


def test_tokens_beyond_the_vocabulary_are_said(tmp_path: Path) -> None:
    """A token may be added with any id: the 65th has the number 70."""
    folder = make_model(tmp_path / "m", "qwen3")
    file = folder / "tokenizer.json"
    value = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    value["added_tokens"].append({"id": 70, "content": "<mine>", "special": True, **flags})
    file.write_text(json.dumps(value))
    found = list(findings(folder, tmp_path / "check", engine=False))
    assert "1 tokens beyond the model's vocabulary of 64: text that yields one is refused" in lines(found, ""), found


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    def with_nan(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.norm.weight"][0] = torch.nan
        return tensors

    folder = with_tensors(make_model(tmp_path / "m", "qwen3"), with_nan)
    result = CliRunner().invoke(app, ["model", "check", str(folder), "--json"])
    assert result.exit_code == 1
    (wrong,) = (each["text"] for each in json.loads(result.stdout)["findings"] if each["holds"] is False)
    assert wrong == "model.norm.weight has a number that is not finite: copy or download the weights again"
