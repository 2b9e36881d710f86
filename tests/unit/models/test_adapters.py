"""Adapters as plain data: targets by a word or by names, refusals with their reason, scale, names and shapes."""

import math
from pathlib import Path

import pytest

from rlctl.models.adapters import AdapterSpec, choose_targets
from rlctl.models.derive import derive_facts
from rlctl.models.facts import ModelSizes
from tests.zoo import make_family

LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def sizes_of(folder: Path, family: str) -> ModelSizes:
    make_family(folder / family, family)
    return derive_facts(folder / family).sizes


def last_words(names: list[str]) -> list[str]:
    """Return the last words of module names, each once."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", LLAMA),
        ("phi3", ["o_proj", "qkv_proj", "gate_up_proj", "down_proj"]),
        # Experts, routers and the shared expert get no adapters.
        ("qwen2_moe", LLAMA[:4]),
        # The first layer is dense.
        ("glm4_moe", LLAMA),
        # Two of four layers carry states; engines fold kv_b_proj into the attention.
        ("qwen3_5_text", [*LLAMA[4:], *LLAMA[:4]]),
        ("deepseek_v3", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", *LLAMA[4:]]),
        ("falcon_h1", [*LLAMA[4:], *LLAMA[:4]]),
    ],
)
def test_all_is_every_linear_layer_of_attention_and_mlp(tmp_path: Path, family: str, expected: list[str]) -> None:
    targets, problems = choose_targets(sizes_of(tmp_path, family).linears, "all")
    assert problems == []
    assert last_words([target.name for target in targets]) == expected


def test_names_are_ends_of_module_names(tmp_path: Path) -> None:
    linears = sizes_of(tmp_path, "glm4_moe").linears
    targets, problems = choose_targets(linears, ["v_proj", "layers.3.self_attn.q_proj"])
    assert problems == []
    names = [target.name.removeprefix("model.layers.") for target in targets]
    assert names == [f"{layer}.self_attn.v_proj" for layer in range(3)] + ["3.self_attn.q_proj", "3.self_attn.v_proj"]
    of_first_mlp, _ = choose_targets(linears, [f"layers.0.mlp.{name}" for name in LLAMA[4:]])
    assert choose_targets(linears, "mlp")[0] == of_first_mlp


@pytest.mark.parametrize(
    ("family", "name", "reason"),
    [
        ("qwen2_moe", "mlp.shared_expert.up_proj", "is in a mixture of experts, whose experts and router get no"),
        ("qwen2_moe", "experts.gate_up_proj", "names experts, which get no adapters"),
        ("qwen2_moe", "mlp.gate", "is a router, which gets no adapter"),
        ("deepseek_v3", "kv_b_proj", "is folded into the attention by engines, which would leave an adapter out"),
        ("qwen3_5_text", "out_proj", "is in a layer with states, whose fused kernels read the weight"),
        ("falcon_h1", "in_proj", "is neither of an attention nor of an MLP"),
        ("qwen3", "lm_head", "is the output: it and the embedding, tied or not, get no adapters"),
        ("qwen3", "q_prj", "no linear layer of the model has this name; did you mean q_proj?"),
        ("qwen3", "nothing", "has this name; there are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
    ],
)
def test_a_name_that_gets_no_adapter_has_its_reason(tmp_path: Path, family: str, name: str, reason: str) -> None:
    [problem] = choose_targets(sizes_of(tmp_path, family).linears, [name])[1]
    assert reason in problem


def test_a_model_without_such_layers_says_why(tmp_path: Path) -> None:
    assert choose_targets(sizes_of(tmp_path, "qwen3_moe").linears, "mlp") == (
        (),
        ["this model has no linear layer for mlp: it has none at all"],
    )


def test_tensors_have_the_names_and_shapes_of_peft(tmp_path: Path) -> None:
    targets, _ = choose_targets(sizes_of(tmp_path, "qwen3").linears, ["layers.1.mlp.down_proj"])
    spec = AdapterSpec(rank=4, alpha=16.0, rslora=False, dropout=0.0, targets=targets)
    assert [(tensor.name, tensor.shape) for tensor in spec.tensors] == [
        ("model.layers.1.mlp.down_proj.lora_A.weight", (4, 256)),
        ("model.layers.1.mlp.down_proj.lora_B.weight", (128, 4)),
    ]
    assert spec.parameters == 4 * (256 + 128)
    assert spec.scale == 4.0
    rslora = AdapterSpec(rank=8, alpha=16.0, rslora=True, dropout=0.0, targets=targets)
    assert rslora.scale == pytest.approx(16 / math.sqrt(8))
