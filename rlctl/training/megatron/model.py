"""The policy as a Megatron-core GPTModel: the stage that this rank holds, from a Hugging Face folder.

No Transformer Engine, no Apex: Megatron's local layers with a norm, attention and experts of our own. Positions are
turned in the attention (see `attention.CoreAttention`), so Megatron's own rotary embedding is left out.
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

# Without Transformer Engine 0.16.1 leaves this name undefined, and a router with another dtype than the model fails.
moe_utils.te_general_gemm = None


class RMSNorm(nn.Module):
    """A norm as Megatron builds it. With sequence parallelism its gradient is summed over the tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__()
        self._eps = eps
        self.norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
        device = "cpu" if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Return `rms_norm` of x [..., hidden_size]."""
        return self.norm(x, self.weight, self._eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm x, which may be wider than the weight, as a float32 residual is; round once, to the weight's dtype."""
    wide = weight.to(x.dtype)
    return F.rms_norm(x, wide.shape, wide, eps).to(weight.dtype)


def residual_add(training: bool, fused: bool) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
    """Make the end of a sublayer, in the form of Megatron's; without biases and dropout.

    Megatron's own casts the residual to the sublayer's dtype. In 0.16.1 this loses `fp32_residual_connection` in the
    first layer.
    """

    def add(output_and_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        return residual + output_and_bias[0]

    return add


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """SwiGLU experts without biases: one grouped matrix product each way, where the device has it; else one by one.

    Weights, their names and checkpoints are those of Megatron's SequentialMLP.
    """

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Return [N, hidden]: the experts' outputs, each token weighted by its probability.

        permuted_local_hidden_states: [N, hidden], by expert. tokens_per_expert: [experts]. permuted_probs: [N].
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
    """The last stage returns the normed hidden states, not logits. `chunked_log_probs` makes log-probs from these."""

    def forward(self, tokens: Tensor, positions: Tensor, pack: Pack) -> Tensor:
        """Return [t (or its sequence part), 1, hidden]. tokens, positions: int64 [t], this rank's part of the pack."""
        output: Tensor = super().forward(tokens[None], positions[None], None, packed_seq_params=pack)
        return output

    def _postprocess(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states

    def head(self) -> Tensor:
        """Return this rank's rows of the output weight, [vocab / tensor, hidden]."""
        shared = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if shared else self.output_layer.weight
        return weight


def build_policy(
    hf: Any, sizes: ModelSizes, section: TrainerSettings, dtype: torch.dtype, device: torch.device
) -> MegatronPolicy:
    """Build this rank's stage, weights not yet read. hf: the model's Hugging Face configuration, a supported one."""
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
            # Megatron says so only where experts are shared out. But every tensor-parallel rank holds whole ones and
            # sees its own tokens alone: without it their gradients would not be summed over those ranks.
            parameter.allreduce = False
    if section.compile:
        # Norms and rotary embedding become few kernels, which all layers share. Not whole layers: between these lie
        # Megatron's own autograd functions and its communication.
        compiled_norm = compile_for_packs(rms_norm)
        compiled_rotate = compile_for_packs(rotate_pair)
        for module in policy.modules():
            if isinstance(module, RMSNorm):
                module.norm = compiled_norm
            elif isinstance(module, CoreAttention):
                module.rotate = compiled_rotate
    return policy


def parallel_sizes(section: TrainerSettings) -> dict[str, int]:
    """Return the sizes of Megatron's groups of ranks, by its names."""
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
        # Stages hand over the residual.
        pipeline_dtype=torch.float32 if parallel.fp32_residual_connection else dtype,
        bf16=dtype == torch.bfloat16,
        # Packs differ in size, so stages tell each other how large they are; Megatron asks for this dispatcher then.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Gradients are sums: the update divides them once.
        calculate_per_token_loss=True,
        # These need Apex, Transformer Engine or a GPU.
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
    """Return 1 for each layer of a qwen3_moe whose MLP is a mixture of experts, else 0."""
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
