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
    settings = json.loads(file.read_text()) | keys
    file.write_text(json.dumps({key: setting for key, setting in settings.items() if setting is not None}))


def rewrite_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Rewrite the weights of a folder."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return folder


def make_unusual(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Pad the vocabulary, save the embedding again as the output, and cast all tensors to float16."""
    embedding = tensors[EMBEDDING]
    padded = torch.cat([embedding, 0.02 * torch.randn(64, embedding.shape[1])])
    changed = tensors | {EMBEDDING: padded, "lm_head.weight": padded}
    return {name: tensor.half().clone() for name, tensor in changed.items()}


def text_of(all_findings: list[Finding], subject: str) -> str:
    """Return the texts of the findings about a subject."""
    return " ".join(finding.text for finding in all_findings if finding.subject == subject)


def test_a_padded_float16_model_with_two_ends_no_pad_and_its_tie_saved_twice_is_proven(tmp_path: Path) -> None:
    folder = rewrite_weights(make_model(tmp_path / "m", "qwen3"), make_unusual)
    set_keys(folder, "config.json", vocab_size=128, dtype="float16", pad_token_id=None)
    set_keys(folder, "generation_config.json", eos_token_id=[1, 5], pad_token_id=None)
    set_keys(folder, "tokenizer_config.json", pad_token=None)
    # Code of a folder is never run: transformers knows the model.
    set_keys(folder, "config.json", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    (folder / "modeling_mine.py").write_text("raise SystemExit('this was run')")
    all_findings = list(findings(folder, tmp_path / "check"))
    assert [finding.text for finding in all_findings if finding.holds is False] == []
    assert len([finding for finding in all_findings if finding.holds]) == 9
    tokens = text_of(all_findings, "tokens")
    assert tokens.startswith("64; 64 rows of the vocabulary have none; an answer ends with <eos> 1 (")
    assert ", 2 5 (generation_config.json)" in tokens


def test_tokens_beyond_the_vocabulary_are_said(tmp_path: Path) -> None:
    """A token may be added with any id: the 65th has the number 70."""
    folder = make_model(tmp_path / "m", "qwen3")
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].append({"id": 70, "content": "<mine>", "special": True, **flags})
    file.write_text(json.dumps(tokenizer))
    all_findings = list(findings(folder, tmp_path / "check", engine=False))
    remark = "1 tokens beyond the model's vocabulary of 64: text that yields one is refused"
    assert remark in text_of(all_findings, ""), all_findings


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    def set_nan(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.norm.weight"][0] = torch.nan
        return tensors

    folder = rewrite_weights(make_model(tmp_path / "m", "qwen3"), set_nan)
    outcome = CliRunner().invoke(app, ["model", "check", str(folder), "--json"])
    assert outcome.exit_code == 1
    failures = [finding["text"] for finding in json.loads(outcome.stdout)["findings"] if finding["holds"] is False]
    assert failures == ["model.norm.weight has a number that is not finite: copy or download the weights again"]
