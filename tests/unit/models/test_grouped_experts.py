"""Grouped experts are transformers' own, family by family, in outputs and gradients, and never a loop on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlctl.models.grouped_experts import NAME, check_grouped, register
from tests.compiled import new_graphs

COMMON = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
# gpt_oss has interleaved, transposed experts with biases; nemotron_h has a shared expert and no gates.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 32, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "nemotron_h": {
        "layers_block_type": ["attention", "moe"], "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    },
}  # fmt: skip


def make_model(family: str, experts: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    register()
    config = AutoConfig.for_model(family, **COMMON | FAMILIES[family])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation=experts)
        with torch.no_grad():
            for parameter in lm.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return lm


def run_model(family: str, experts: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probs of 21 tokens, which leave places of experts empty, and gradients of a loss."""
    lm = make_model(family, experts)
    tokens = torch.arange(21)[None] * 7 % 64
    log_probs = lm(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
    log_probs.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in lm.named_parameters() if parameter.grad is not None}
    return log_probs.detach(), gradients


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_one_expert_at_a_time(family: str) -> None:
    log_probs, gradients = run_model(family, NAME)
    expected_log_probs, expected_gradients = run_model(family, "eager")
    torch.testing.assert_close(log_probs, expected_log_probs, atol=1e-5, rtol=0)
    assert gradients.keys() == expected_gradients.keys()
    for name, expected in expected_gradients.items():
        assert torch.linalg.vector_norm(gradients[name] - expected) <= 1e-5 * torch.linalg.vector_norm(expected), name


def test_one_graph_holds_all_experts_of_a_layer_in_bfloat16() -> None:
    experts = make_model("qwen3_moe", NAME).model.layers[0].mlp.experts.bfloat16()
    hidden = torch.randn(5, 64, dtype=torch.bfloat16, requires_grad=True)
    chosen_experts = torch.randint(0, 32, (5, 3))
    weights = torch.rand(5, 3, dtype=torch.bfloat16)
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")
    outputs_and_gradients = []
    for function in (experts, compiled):
        output = function(hidden, chosen_experts, weights)
        (gradient,) = torch.autograd.grad(output.float().square().sum(), hidden)
        outputs_and_gradients.append((output, gradient))
    torch.testing.assert_close(outputs_and_gradients[1], outputs_and_gradients[0], atol=0, rtol=0)


def test_one_graph_takes_any_number_of_tokens() -> None:
    experts = make_model("qwen3_moe", NAME).model.layers[0].mlp.experts.bfloat16()
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")

    def count_new_graphs(tokens: int) -> int:
        hidden = torch.randn(tokens, 64, dtype=torch.bfloat16, requires_grad=True)
        chosen_experts = torch.randint(0, 32, (tokens, 3))
        weights = torch.rand(tokens, 3, dtype=torch.bfloat16)
        return new_graphs(lambda: compiled(hidden, chosen_experts, weights).float().sum().backward())

    torch.compiler.reset()
    assert count_new_graphs(63) == 1
    assert [count_new_graphs(tokens) for tokens in (64, 30, 700)] == [0, 0, 0]


class OwnExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.zeros(4, 8, 8))


@pytest.mark.parametrize(
    ("dtype", "capability", "has_own_experts", "reason"),
    [
        (torch.float32, (9, 0), False, "grouped products are bfloat16, not float32; set trainer.dtype=bfloat16"),
        (
            torch.bfloat16,
            (8, 0),
            False,
            "grouped products need compute capability 9.0 (H100), not 8.0; try trainer.backend=megatron",
        ),
        (
            torch.bfloat16,
            (9, 0),
            True,
            "OwnExperts of transformers goes through them by itself; grouped products need its own interface",
        ),
    ],
)
def test_a_gpu_that_would_go_through_experts_one_at_a_time_is_refused(
    dtype: torch.dtype, capability: tuple[int, int], has_own_experts: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    lm = make_model("qwen3_moe", NAME)
    if has_own_experts:
        lm.model.layers[0].mlp.experts = OwnExperts()
    with pytest.raises(ValueError) as raised:
        check_grouped(lm, torch.device("cuda"), dtype)
    assert str(raised.value) == f"this GPU would multiply the experts of qwen3_moe one at a time: {reason}"


def test_dense_models_and_hopper_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_grouped(make_model("qwen3_moe", NAME), torch.device("cuda"), torch.bfloat16)
    check_grouped(nn.Sequential(nn.Linear(4, 4), nn.Conv1d(8, 8, 4, groups=8)), torch.device("cuda"), torch.float32)
