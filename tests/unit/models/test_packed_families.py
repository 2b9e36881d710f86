"""A pack equals its sequences alone, outputs and gradients, in families with windows, sinks, softcaps or states."""

import inspect
import sys
from typing import Any

import pytest
import torch

from rlctl.models import packed_attention
from rlctl.models.state_layers import FUNCTIONS, install_restarts

WINDOW = 5
# One sequence has one token, two are longer than the window, and the longest is not the first.
LENGTHS = [7, 1, 16, 3]
# One sequence is longer than a chunk of Mamba-2. A chunk of the delta rule has 64 tokens.
STATE_LENGTHS = [9, 1, 20, 3]
FOUR: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LISTED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
MLA: dict[str, Any] = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
EXPERTS: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"n_group": 1, "topk_group": 1}
# By model_type: keys beyond the shared sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": FOUR | {"sliding_window": WINDOW},
    "gemma2": FOUR | LISTED | {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 9},
    "gemma3_text": FOUR | LISTED | {"query_pre_attn_scalar": 9},
    "gemma4_text": FOUR | LISTED | {"global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "gpt_oss": FOUR | LISTED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": MLA | EXPERTS | {"v_head_dim": 12, "num_attention_heads": 4, "num_key_value_heads": 4,
        "first_k_dense_replace": 1},
    "cohere2": FOUR | LISTED | {"logit_scale": 0.3},
    "olmo3": FOUR | LISTED,
    "exaone4": FOUR | LISTED,
    "granite": FOUR | {"attention_multiplier": 0.1, "logits_scaling": 4.0},
    "ministral3": FOUR | {"sliding_window": WINDOW},
    "mimo_v2_flash": {"num_attention_heads": 4, "num_key_value_heads": 2, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4, "head_dim": 16, "v_head_dim": 12, "swa_head_dim": 16, "swa_v_head_dim": 12,
        } | EXPERTS | LISTED,
}  # fmt: skip
DELTA: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_n_groups": 2, "mamba_d_state": 8}
MAMBA |= {"mamba_chunk_size": 16}
STATE_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": FOUR | EXPERTS | DELTA | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": FOUR | DELTA,
    "olmo_hybrid": FOUR | DELTA,
    "falcon_h1": FOUR | MAMBA | {"mamba_d_ssm": 96},
    "granitemoehybrid": FOUR | MAMBA | {"num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 16, "layer_types": ["mamba", "attention"]},
    "nemotron_h": FOUR | {"mamba_num_heads": 4, "mamba_head_dim": 24, "n_groups": 2, "ssm_state_size": 8,
        "chunk_size": 16, "layers_block_type": ["mamba", "attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 24, "n_groups": 2, "state_size": 8, "chunk_size": 16},
    "lfm2": FOUR | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "kimi_linear": MLA | EXPERTS | {"num_attention_heads": 4, "num_key_value_heads": 4, "v_head_dim": 12,
        "num_local_experts": 4, "linear_head_dim": 8, "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"]},
}  # fmt: skip


def make_model(family: str, attention: str) -> Any:
    """Return a model of two layers whose parameters are drawn wide enough for masks and scales to show."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 40, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **sizes, **(FAMILIES | STATE_FAMILIES)[family])
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    for parameter in lm.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return lm.train()


def gradients_of(lm: Any) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in lm.named_parameters() if parameter.grad is not None}


def compare_with_rows_alone(packed: Any, alone: Any, lengths: list[int]) -> None:
    tokens = torch.randint(3, 40, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    packed_hidden = packed.base_model(
        input_ids=tokens[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        use_cache=False,
        cu_seq_lens_q=ends,
        max_length_q=max(lengths),
        seq_idx=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).int()[None],
    ).last_hidden_state[0]
    rows = [alone.base_model(input_ids=sequence[None], use_cache=False) for sequence in tokens.split(lengths)]
    expected_hidden = torch.cat([row.last_hidden_state[0] for row in rows])
    torch.testing.assert_close(packed_hidden, expected_hidden, atol=1e-4, rtol=1e-4)
    weight = torch.randn(expected_hidden.shape, generator=torch.Generator().manual_seed(1))
    for hidden in (packed_hidden, expected_hidden):
        (hidden * weight).sum().backward()
    expected_gradients = gradients_of(alone)
    assert gradients_of(packed).keys() == expected_gradients.keys()
    for name, gradient in gradients_of(packed).items():
        expected = expected_gradients[name]
        torch.testing.assert_close(gradient, expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_sees_a_sequence_as_if_alone(family: str) -> None:
    compare_with_rows_alone(make_model(family, packed_attention.register()), make_model(family, "eager"), LENGTHS)


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_a_state_begins_with_its_sequence(family: str) -> None:
    packed = make_model(family, packed_attention.register())
    assert install_restarts(packed) == install_restarts(packed) != []
    lengths = [9, 70, 1] if family == "qwen3_5_text" else STATE_LENGTHS
    compare_with_rows_alone(packed, make_model(family, "eager"), lengths)


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "lfm2"])
def test_a_kernel_takes_the_arguments_that_a_model_gives(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(family, packed_attention.register())
    module = sys.modules[type(model).__module__]
    called_functions = set()

    def check_arguments(name: str, function: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            kernel = FUNCTIONS[name].kernel
            assert kernel is not None
            inspect.signature(kernel).bind(*args, **keywords | {"cu_seqlens": None})
            called_functions.add(name)
            return function(*args, **keywords)

        return call

    names = install_restarts(model)
    for name in names:
        monkeypatch.setattr(module, name, check_arguments(name, getattr(module, name)))
    compare_with_rows_alone(model, make_model(family, "eager"), [3, 2])
    assert called_functions == set(names)


def test_a_keyword_that_would_be_ignored_is_refused() -> None:
    queries = torch.randn(1, 2, 3, 8)
    keys = torch.randn(1, 2, 3, 8)
    values = torch.randn(1, 2, 3, 8)
    packs = {"cu_seq_lens_q": torch.tensor([0, 3], dtype=torch.int32), "max_length_q": 3}

    def attend(**keywords: Any) -> None:
        module = torch.nn.Identity()
        packed_attention.transformers_attention(module, queries, keys, values, None, **packs, **keywords)

    attend(position_bias=None, output_router_logits=False, use_cache=True)
    with pytest.raises(ValueError, match="Identity passes position_bias, block_size to attention, which packed"):
        attend(position_bias=torch.zeros(3), block_size=64)
    with pytest.raises(ValueError, match=r"drops 0\.1 of its attention"):
        attend(dropout=0.1)
    with pytest.raises(ValueError, match="sees later tokens"):
        attend(is_causal=False)
