"""Facts of a model are derived from transformers' class and kept; the driver reads them without torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.config.errors import ModelError
from rlctl.models import facts as facts_module
from rlctl.models.derive import derive_facts
from rlctl.models.derive import main as derive_main
from rlctl.models.facts import ModelFacts, derive_apart, facts_file, find_facts, known_facts
from rlctl.models.meta_model import skeleton
from tests.size_formulas import sizes_by_formula
from tests.tiny_models import KINDS, make_model

SIZES = {"hidden_size": 40, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64, "head_dim": 16}
MOE = {"num_experts": 4, "moe_intermediate_size": 48, "num_experts_per_tok": 2}


def write_config(folder: Path, kind: str, **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **SIZES, **options}))
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
        ("qwen3_moe", MOE),
        ("qwen3_moe", MOE | {"decoder_sparse_step": 2}),
        ("qwen3_moe", MOE | {"mlp_only_layers": [1], "norm_topk_prob": True, "num_experts_per_tok": 1}),
    ],
)
def test_derived_sizes_are_those_of_the_formulas(
    tmp_path: Path, kind: str, options: dict[str, Any], tied: bool
) -> None:
    folder = write_config(tmp_path, kind, **options, tie_word_embeddings=tied)
    expected = sizes_by_formula(json.loads((folder / "config.json").read_text()))
    sizes = derive_facts(folder).sizes
    assert {name: getattr(sizes, name) for name in vars(expected)} == vars(expected)


@pytest.mark.parametrize(
    ("kind", "options", "layers", "width"),
    [
        ("olmo2", {}, "model.layers", 96),
        ("gpt_neox", {}, "gpt_neox.layers", 64),
        ("qwen2_moe", MOE | {"shared_expert_intermediate_size": 30}, "model.layers", 126),
    ],
)
def test_other_families_are_counted_as_transformers_builds_them(
    tmp_path: Path, kind: str, options: dict[str, Any], layers: str, width: int
) -> None:
    folder = write_config(tmp_path, kind, **options, tie_word_embeddings=False)
    facts = derive_facts(folder)
    lm = skeleton(folder, torch.device("cpu"))
    assert facts.layers == layers and facts.architecture == type(lm).__name__
    assert facts.sizes.parameters == sum(parameter.numel() for parameter in lm.parameters())
    assert facts.sizes.mlp_width == width


def test_windows_and_scales_are_recorded(tmp_path: Path) -> None:
    mistral = derive_facts(write_config(tmp_path / "mistral", "mistral", sliding_window=8))
    assert list(mistral.attention) == [(64.0, 8)] * 3
    granite = derive_facts(write_config(tmp_path / "granite", "granite", logits_scaling=4.0, attention_multiplier=0.5))
    assert granite.kinds.logits.scale == 0.25
    assert {attention.scale for attention in granite.kinds.attention} == {0.5}


def test_computed_buffers_are_those_that_transformers_computes(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_model(tmp_path / "m", "gemma2", more={"sliding_window": 8})
    expected = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_buffers())
    for name, buffer in skeleton(folder, torch.device("cpu")).named_buffers():
        assert torch.equal(buffer, expected[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_facts_go_through_json(tmp_path: Path, kind: str) -> None:
    facts = derive_facts(make_model(tmp_path, kind))
    assert ModelFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_process_of_its_own_derives_facts_and_keeps_them(tmp_path: Path, empty_cache: Path) -> None:
    folder = make_model(tmp_path / "m", "qwen3")
    assert known_facts(folder) is None
    facts = derive_apart(folder)
    assert facts == derive_facts(folder) == known_facts(folder)
    code = "import sys; from pathlib import Path; from rlctl.models.facts import find_facts as find; find(Path('{}'));"
    check = f"{code.format(folder)} assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_facts_are_kept_by_config_weights_and_release(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "a", "qwen3", seed=0)
    file = facts_file(folder)
    assert facts_file(make_model(tmp_path / "b", "qwen3", seed=1)) == file
    assert facts_file(make_model(tmp_path / "c", "qwen3", layers=1)) != file
    facts_module._derivation.cache_clear()
    monkeypatch.setattr(facts_module, "version", lambda name: "9.0")
    assert facts_file(folder) != file
    facts_module._derivation.cache_clear()


def test_a_refusal_comes_from_the_other_process_in_one_line(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The facts are derived in this process here. The test above starts the separate process."""

    def derive_in_this_process(module: str, folder: str) -> "subprocess.CompletedProcess[str]":
        assert module == "rlctl.models.derive"
        derive_main(Path(folder))
        return subprocess.CompletedProcess([], 0, capsys.readouterr().out, "")

    monkeypatch.setattr(facts_module, "run_module", derive_in_this_process)
    with pytest.raises(ModelError) as caught:
        derive_apart(write_config(tmp_path / "m", "gpt99"))
    assert str(caught.value).startswith(f"model_type gpt99 in {tmp_path}/m: transformers 5.")


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("bert", {}, "BertSelfAttention sees later tokens"),
        ("vit", {}, "model_type vit in .*: transformers .* has no causal language model of it"),
        ("t5", {}, "model_type t5 in .*: transformers .* has no causal language model of it"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(
    tmp_path: Path, kind: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        find_facts(write_config(tmp_path, kind, **options))
