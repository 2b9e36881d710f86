import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.models.model_sizes import read_sizes

QWEN3_0_6B = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}


def written(folder: Path, raw: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(raw))
    return folder / "config.json"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
        ("qwen3", {"head_dim": 16, "attention_bias": True}),
        ("qwen3_moe", {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 48}),
        ("qwen3_moe", {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 48, "decoder_sparse_step": 2}),
        ("qwen3_moe", {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 48, "mlp_only_layers": [1]}),
    ],
)
def test_parameters_are_those_of_the_model_that_transformers_builds(
    tmp_path: Path, kind: str, options: dict[str, Any], tied: bool
) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 40, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(kind, **sizes, **options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    architecture = read_sizes(tmp_path / "config.json")
    assert architecture.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert architecture.max_positions == 64


def test_a_published_size(tmp_path: Path) -> None:
    architecture = read_sizes(written(tmp_path, QWEN3_0_6B))
    assert architecture.parameters == 596_049_920
    assert architecture.kv_values_per_token == 2 * 28 * 8 * 128


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "model_type None in .* must be one of llama, qwen2, qwen3, qwen3_moe"),
        ('{"model_type": "qwen3"}', "config.json has no hidden_size"),
    ],
)
def test_a_config_that_cannot_be_used_says_why(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_sizes(tmp_path / "config.json")
