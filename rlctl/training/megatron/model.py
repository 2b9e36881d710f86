"""Builds this rank's pipeline stage of the policy as a Megatron-core GPTModel, from a Hugging Face configuration.

The model needs neither Transformer Engine nor Apex. It uses Megatron's local layers, with rlctl's own norm, attention
and experts. `attention.CoreAttention` applies the rotary embedding, so Megatron's own rotary embedding is off.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from rlctl.models.facts import ModelSizes
from rlctl.preflight.backend import layout_of
from rlctl.preflight.backends.megatron import megatron_of
from rlctl.preflight.trainer_settings import TrainerSettings
from rlctl.training.megatron.attention import CoreAttention, Pack, rotate_pair
from rlctl.training.packing import compile_for_packs

# Megatron-core 0.16.1 does not define this name without Transformer Engine. A router whose dtype differs from the
# model's then fails with a NameError.
moe_utils.te_general_gemm = None


class RMSNorm(nn.Module):
    """RMS norm with the constructor that Megatron's layer specs call.

    With sequence parallelism each rank norms other tokens. The mark on the weight makes Megatron sum its gradient over
    the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__()
        self._eps = eps
        self.norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
        device = "cpu" if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., hidden_size] normed by `rms_norm`, in the weight's dtype."""
        return self.norm(x, self.weight, self._eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of x in the weight's dtype.

    x may have a wider dtype than the weight, for example a float32 residual. The norm is computed in x's dtype and
    rounded once.
    """
    wide = weight.to(x.dtype)
    return F.rms_norm(x, wide.shape, wide, eps).to(weight.dtype)


def residual_add(training: bool, fused: bool) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
    """Return the function that adds a sublayer's output to the residual, for Megatron's layer specs.

    There is no bias and no dropout. Megatron's function casts the residual to the sublayer's dtype, so in 0.16.1
    `fp32_residual_connection` has no effect in the first layer.
    """

    def add(output_and_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        return residual + output_and_bias[0]

    return add


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """SwiGLU experts without biases, computed by grouped matrix products over all experts.

    Off a GPU, or with another dtype than bfloat16, Megatron's SequentialMLP computes one expert after the other. The
    weights and their names are those of SequentialMLP in both cases.
    """

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Return the experts' outputs [N, hidden], each row multiplied by its routing probability; and no bias.

        permuted_local_hidden_states: [N, hidden], rows sorted by expert. tokens_per_expert: [experts], rows of each
        expert. permuted_probs: [N], routing probability of each row.
        """
        hidden = permuted_local_hidden_states
        if hidden.dtype != torch.bfloat16 or not hidden.is_cuda or len(hidden) == 0:
            output, _ = super().forward(hidden, tokens_per_expert, permuted_probs)
            return output, None
        ends = tokens_per_expert.cumsum(0).to(device=hidden.device, dtype=torch.int32)
        up = torch.stack([expert.linear_fc1.weight for expert in self.local_experts]).transpose(1, 2)
        down = torch.stack([expert.linear_fc2.weight for expert in self.local_experts]).transpose(1, 2)
        gate, linear = _multiply_groups(hidden, up, ends).chunk(2, -1)
        inner = (F.silu(gate) * linear * permuted_probs[:, None]).to(hidden.dtype)
        return _multiply_groups(inner, down, ends), None


def _multiply_groups(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    grouped_mm: Any = F.grouped_mm
    product: Tensor = grouped_mm(rows, weights, offs=ends)
    return product


class MegatronPolicy(GPTModel):  # type: ignore[misc]
    """GPTModel whose last stage returns normed hidden states, from which `chunked_log_probs` computes log-probs."""

    def forward(self, tokens: Tensor, positions: Tensor, pack: Pack) -> Tensor:
        """Return the stage's hidden states [t, 1, hidden]. tokens, positions: int64 [t], this rank's part of the pack.

        With sequence parallelism the result has only this rank's share of the t rows.
        """
        output: Tensor = super().forward(tokens[None], positions[None], None, packed_seq_params=pack)
        return output

    def _postprocess(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states

    def head(self) -> Tensor:
        """Return this rank's rows of the output weight, [vocabulary / tensor-parallel size, hidden]."""
        shared = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if shared else self.output_layer.weight
        return weight


def build_policy(
    hf: Any, sizes: ModelSizes, section: TrainerSettings, dtype: torch.dtype, device: torch.device
) -> MegatronPolicy:
    """Build this rank's pipeline stage, without reading weights. hf: the model's Hugging Face configuration."""
    config = _transformer_config(hf, sizes, section, dtype, device)
    first = get_transformer_layer_offset(config)
    layers = range(first, first + get_num_layers_to_build(config))
    sparse = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    specs = [_layer_spec(config, bool(sparse[layer])) for layer in layers]
    policy = MegatronPolicy(
        config,
        TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm),
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="none",
    )
    policy.to(dtype)
    for name, parameter in policy.named_parameters():
        if ".local_experts." in name:
            # Megatron sets this mark only with expert parallelism. It is needed without it too: every tensor-parallel
            # rank holds whole experts and routes only its tokens to the experts, so gradients must be summed.
            parameter.allreduce = False
    if section.compile:
        # Only norms and the rotary embedding are compiled, once for all layers. A whole layer is not compiled, because
        # it contains Megatron's own autograd functions and communication.
        compiled_norm = compile_for_packs(rms_norm)
        compiled_rotate = compile_for_packs(rotate_pair)
        for module in policy.modules():
            if isinstance(module, RMSNorm):
                module.norm = compiled_norm
            elif isinstance(module, CoreAttention):
                module.rotate = compiled_rotate
    return policy


def parallel_sizes(section: TrainerSettings) -> dict[str, int]:
    """Return the sizes of the parallel groups, as arguments of Megatron's `initialize_model_parallel`."""
    sizes = {"expert_tensor_parallel_size": 1}
    for kind in ("tensor_model", "pipeline_model", "context", "expert_model"):
        name = f"{kind}_parallel_size"
        sizes[name] = getattr(megatron_of(section), name)
    return sizes


def _transformer_config(
    hf: Any, sizes: ModelSizes, section: TrainerSettings, dtype: torch.dtype, device: torch.device
) -> TransformerConfig:
    parallel = megatron_of(section)
    cuda = device.type == "cuda"
    recompute: dict[str, Any] = {}
    if section.activation_checkpointing:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        ffn_hidden_size=sizes.intermediate,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.kv_heads,
        kv_channels=sizes.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        qk_layernorm=sizes.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=sizes.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        sequence_parallel=layout_of(section).sequence_parallel,
        params_dtype=dtype,
        fp32_residual_connection=parallel.fp32_residual_connection,
        # Dtype of the tensors that pipeline stages send to each other: that of the residual.
        pipeline_dtype=torch.float32 if parallel.fp32_residual_connection else dtype,
        bf16=dtype == torch.bfloat16,
        # Packs differ in size, so a stage sends the shape before each tensor. Megatron then requires "alltoall".
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Gradients stay sums over tokens, because the end of the update divides them once.
        calculate_per_token_loss=True,
        # The fusions need Apex, Transformer Engine or a GPU.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=cuda,
        use_cpu_initialization=not cuda,
        perform_initialization=False,
        **parallel_sizes(section),
        **recompute,
        **_expert_settings(hf, sizes),
    )


def _expert_settings(hf: Any, sizes: ModelSizes) -> dict[str, Any]:
    if not sizes.experts:
        return {}
    return {
        "num_moe_experts": sizes.experts,
        "moe_router_topk": sizes.experts_per_token,
        "moe_ffn_hidden_size": sizes.expert_intermediate,
        "moe_router_pre_softmax": not sizes.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_layer_freq": _sparse_layers(hf),
    }


def _sparse_layers(hf: Any) -> list[int]:
    """Return for each layer of a qwen3_moe model 1 if its MLP is a mixture of experts, else 0."""
    layers = range(hf.num_hidden_layers)
    return [int(index not in hf.mlp_only_layers and (index + 1) % hf.decoder_sparse_step == 0) for index in layers]


def _layer_spec(config: TransformerConfig, sparse: bool) -> ModuleSpec:
    experts = config.num_moe_experts if sparse else None
    spec = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    layer.self_attn_bda = layer.mlp_bda = residual_add
    attention = layer.self_attention.submodules
    attention.core_attention = CoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if sparse:
        layer.mlp.submodules.experts.module = GroupedExperts
    return spec
