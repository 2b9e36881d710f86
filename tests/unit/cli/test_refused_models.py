"""Models that rlctl does not train are refused before a start, by their config.json alone as transformers reads it."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.errors import ConfigError, ModelError
from rlctl.models.model_sizes import read_sizes
from rlctl.preflight.load import load
from tests.unit.cli.conftest import Rlctl
from tests.unit.folders import MODEL

REMEDY = "use the checkpoint that it was quantised from (its name without -FP8, -AWQ or the like)"
MIXTURE = {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 32}


@pytest.fixture(autouse=True)
def model_config(home: Path) -> Path:
    return home / "model/config.json"


def write_model_config(file: Path, **values: Any) -> None:
    """Write the config.json of the tiny model with other values."""
    file.write_text(json.dumps(MODEL | values))


@pytest.mark.parametrize(
    ("quantization_config", "method"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq, 4 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemm"}, "awq, 4 bits"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes, 4 bits"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors"),
        ({"quant_method": "a method of tomorrow"}, "a method of tomorrow"),
        ("odd", "quantised"),
    ],
)
@pytest.mark.parametrize("command", [("config", "check"), ("train", "grpo", "--dry-run"), ("train", "grpo")])
def test_a_quantised_checkpoint(
    rlctl: Rlctl, model_config: Path, quantization_config: Any, method: str, command: tuple[str, ...]
) -> None:
    write_model_config(model_config, quantization_config=quantization_config)
    done = rlctl(*command, "grpo.recipe.yaml")
    assert (done.code, done.out) == (2, "")
    problem = f"{model_config}: quantization_config says {method}: rlctl does not train quantised weights; {REMEDY}"
    assert done.err.splitlines() == [
        f"error: grpo.recipe.yaml:3: model.path: {problem}",
        "1 problem; nothing was started",
    ]


def test_quantised_weights_without_a_word_of_it_in_config_json(rlctl: Rlctl, model_config: Path) -> None:
    tensor = {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}
    header = json.dumps({"model.norm.weight": tensor}).encode()
    weights = model_config.parent / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header + b"xx")
    for command in (("config", "check"), ("train", "grpo", "--dry-run"), ("train", "grpo")):
        done = rlctl(*command, "grpo.recipe.yaml")
        assert (done.code, done.out) == (2, "")
        assert f"model.safetensors: model.norm.weight is F8_E4M3: rlctl does not train quantised weights; {REMEDY}" in (
            done.err
        )
    assert rlctl("config", "check", "grpo.recipe.yaml", "model.random_init=true").code == 0


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 128}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 256),
        ({"rope_type": "linear", "factor": 4.0}, 1024),
        ({"type": "linear", "factor": 2}, 512),
        ({"rope_type": "default"}, 256),
        ({"rope_theta": 10000.0}, 256),
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_the_longest_sequence_is_what_a_scaled_rotary_embedding_means(
    home: Path, model_config: Path, key: str, scaling: dict[str, Any], longest: int
) -> None:
    """Compare with `_get_and_verify_max_len` of vLLM 0.32, whose engine refuses a longer one late in the start."""
    write_model_config(model_config, **{key: scaling})
    assert read_sizes(model_config).max_positions == longest
    load("grpo", "grpo.recipe.yaml", [f"model.max_length={longest}", "trainer.micro_batch_tokens=2048"])
    with pytest.raises(ConfigError, match=f"must be at most {longest}"):
        load("grpo", "grpo.recipe.yaml", [f"model.max_length={longest + 1}", "trainer.micro_batch_tokens=2048"])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotary_embedding_that_depends_on_the_batch(model_config: Path, kind: str) -> None:
    write_model_config(model_config, rope_scaling={"rope_type": kind, "factor": 4.0})
    with pytest.raises(
        ModelError, match=f"rope_type {kind}: must be one of default, linear, llama3, yarn, proportional, which turn"
    ):
        read_sizes(model_config)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (MIXTURE | {"num_experts_per_tok": 1, "norm_topk_prob": True}, "megatron has no router for one expert a token"),
        ({"hidden_act": "gelu"}, "megatron trains no qwen3 with hidden_act gelu; use trainer.backend=fsdp"),
        ({"attention_bias": True}, "megatron trains no qwen3 with biases; use trainer.backend=fsdp"),
    ],
)
def test_what_megatron_has_no_layers_for(model_config: Path, values: dict[str, Any], expected: str) -> None:
    write_model_config(model_config, **values)
    with pytest.raises(ConfigError) as caught:
        load("sft", "sft.recipe.yaml", ["trainer.backend=megatron"])
    assert any(expected in problem.what for problem in caught.value.problems)
    load("sft", "sft.recipe.yaml", [])
    write_model_config(model_config, **MIXTURE, num_experts_per_tok=1)
    load("sft", "sft.recipe.yaml", ["trainer.backend=megatron"])


def test_weights_that_a_command_names_by_itself_are_refused_without_an_override_that_nobody_typed(
    rlctl: Rlctl, model_config: Path
) -> None:
    weights = model_config.parent / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    error, _ = rlctl("model", "check", "model").err.splitlines()
    assert error.startswith(f"error: model.path: {weights} is no safetensors file, or was cut")
    *errors, _ = rlctl("eval", "model", "grpo.recipe.yaml", "run.seed=1", "run.sed=2").err.splitlines()
    assert "error: override 2: run.sed=2: unknown key; did you mean seed?" in errors
    weights.unlink()
    done = rlctl("model", "check", "model")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: model has a config.json, but no weights")


@pytest.mark.parametrize("size", [0, -1, "many", [], {}, 1.5])
def test_sizes_that_are_none(model_config: Path, size: Any) -> None:
    for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"):
        write_model_config(model_config, **{key: size})
        with pytest.raises(ModelError):
            read_sizes(model_config)
