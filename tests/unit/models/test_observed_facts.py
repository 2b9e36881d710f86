"""One forward pass without memory tells a model's attention, states, dropout, and the work after its head."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlctl.models.layer_kinds import LayerKinds, LogitTransform
from rlctl.models.meta_model import skeleton
from rlctl.models.observed_facts import measure_row_bytes, observe, turn_off_dropout
from tests.tiny_models import make_model
from tests.unit.models.test_packed_families import EXPERTS, FAMILIES, FOUR, MAMBA, STATE_FAMILIES, WINDOW

SIZES = {"vocab_size": 40, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}


def config_of(family: str, **keys: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **SIZES, **(FOUR | FAMILIES | STATE_FAMILIES).get(family, FOUR) | keys)


def observe_family(family: str, **keys: Any) -> LayerKinds:
    return observe(config_of(family, **keys))


@pytest.mark.parametrize(
    ("family", "keys", "expected"),
    [
        ("llama", {}, LogitTransform()),
        ("granite", {"logits_scaling": 4.0}, LogitTransform(scale=0.25)),
        ("cohere2", {"logit_scale": 0.3}, LogitTransform(scale=0.3)),
        ("falcon_h1", {"lm_head_multiplier": 0.04}, LogitTransform(scale=0.04)),
        ("gemma2", {"final_logit_softcapping": 20.0}, LogitTransform(softcap=20.0)),
        ("gemma2", {"final_logit_softcapping": None}, LogitTransform()),
    ],
)
def test_what_follows_the_head_is_measured(family: str, keys: dict[str, Any], expected: LogitTransform) -> None:
    assert observe_family(family, **keys).logits == expected


def test_unknown_mathematics_after_the_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM.forward

    def forward(self: Any, **keywords: Any) -> Any:
        output = plain(self, **keywords)
        output.logits = output.logits + 1
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    with pytest.raises(ValueError, match="the logits of llama are neither its head's output, nor scaled by logits_sc"):
        observe_family("llama")


def test_attention_is_recorded_layer_by_layer() -> None:
    first, second = observe_family("gpt_oss").attention
    assert (first.layer, first.window, first.sinks, first.scale) == (0, WINDOW, True, 0.25)
    assert (second.layer, second.window, second.heads, second.kv_heads) == (1, None, 4, 2)
    first, second = observe_family("gemma2").attention
    assert (first.softcap, first.window, second.softcap, second.window) == (3.0, WINDOW, 3.0, None)
    assert observe_family("granite").attention[0].scale == 0.1
    assert {(kind.dim, kind.v_dim) for kind in observe_family("deepseek_v3").attention} == {(24, 12)}
    assert [kind.dim for kind in observe_family("gemma4_text").attention] == [16, 32]


def test_states_are_recorded_layer_by_layer() -> None:
    kinds = observe_family("qwen3_next")
    assert [(kind.layer, kind.functions) for kind in kinds.states] == [
        (0, ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"))
    ]
    assert [kind.layer for kind in kinds.attention] == [1] and kinds.one_sequence_a_row is None
    functions = ("causal_conv1d_fn", "mamba2_chunk_scan")
    assert [kind.functions for kind in observe_family("mamba2").states] == [functions, functions]


@pytest.mark.parametrize(
    ("family", "keys", "expected"),
    [
        (
            "llama4_text",
            EXPERTS | {"num_local_experts": 2},
            "chunked attention counts its chunks from the start of the",
        ),
        (
            "minimax",
            EXPERTS | {"num_local_experts": 2},
            r"1 of 2 layers \(linear_attention\) call neither attention nor a kn",
        ),
        ("mamba", {}, "mamba_selective_scan cannot restart at a sequence's start"),
        ("gptj", {"rotary_dim": 8}, "gptj does not let others compute its attention"),
        (
            "stablelm",
            {"num_attention_heads": 2, "head_dim": 24},
            "StableLmAttention is not told where the sequences of a pack begin",
        ),
        ("bloom", {}, r"2 of 2 layers \(attention\) call neither attention nor a known state function"),
    ],
)
def test_a_model_that_cannot_be_packed_says_why(family: str, keys: dict[str, Any], expected: str) -> None:
    reason = observe_family(family, **keys).one_sequence_a_row
    assert reason is not None
    with pytest.raises(ValueError, match=expected):
        raise ValueError(reason)


# Scores of all heads of two layers, in float32: kept by gptj's own attention and by falcon's shared keys.
SCORES = 2 * 4 * 4


@pytest.mark.parametrize(
    ("family", "keys", "bytes_per_pair"),
    [("gptj", {"rotary_dim": 8}, SCORES), ("falcon", {}, SCORES), ("stablelm", {"num_key_value_heads": 4}, 0)],
)
def test_bytes_that_rows_keep_are_those_of_a_real_pass(family: str, keys: dict[str, Any], bytes_per_pair: int) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**SIZES, "hidden_size": 64, "num_attention_heads": 4, **keys})
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    decoder = lm.get_decoder()
    all_row_bytes = measure_row_bytes(copy.deepcopy(decoder).to("meta"), 512)
    recorded = next(row_bytes for row_bytes in all_row_bytes if row_bytes.dtype == "float32")
    assert recorded.pair == bytes_per_pair
    decoder_tensors = [*decoder.parameters(), *decoder.buffers()]
    decoder_storages = {tensor.untyped_storage()._cdata for tensor in decoder_tensors}
    for rows, length in ((1, 64), (3, 40)):
        saved_tensors: dict[int, Tensor] = {}

        def keep(tensor: Tensor, saved_tensors: dict[int, Tensor] = saved_tensors) -> Tensor:
            saved_tensors[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            decoder(input_ids=torch.ones(rows, length, dtype=torch.long), use_cache=False)
        activations = [tensor for storage, tensor in saved_tensors.items() if storage not in decoder_storages]
        real_bytes = sum(tensor.untyped_storage().nbytes() for tensor in activations)
        expected_bytes = rows * length * (recorded.token + recorded.pair * length)
        assert abs(real_bytes - expected_bytes) <= 0.12 * real_bytes, (real_bytes, expected_bytes)


def test_dropout_is_found_and_off() -> None:
    config = config_of("seed_oss", attention_dropout=0.1, residual_dropout=0.2)
    assert dict(observe(config).dropout) == {"attention_dropout": 0.1, "residual_dropout": 0.2}
    assert config.attention_dropout == 0.1
    assert turn_off_dropout(config) == {"attention_dropout": 0.1, "residual_dropout": 0.2}
    assert (config.attention_dropout, config.residual_dropout) == (0.0, 0.0) and turn_off_dropout(config) == {}


def test_what_trains_has_no_dropout(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_dropout": 0.3}))
    lm = skeleton(folder, torch.device("cpu"))
    assert [layer.self_attn.attention_dropout for layer in lm.model.layers] == [0.0, 0.0]
    assert json.loads(file.read_text())["attention_dropout"] == 0.3


def test_a_hybrid_layer_has_attention_and_states() -> None:
    kinds = observe_family("falcon_h1", **MAMBA)
    assert [kind.layer for kind in kinds.attention] == [kind.layer for kind in kinds.states] == [0, 1]
