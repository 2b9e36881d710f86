"""Schema of training: the trainer, its optimizer, and adapters."""

# ruff: noqa: RUF009  (spec() makes a field, not a default)

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from rlctl.config.fields import MOST_PROCESSES, Elsewhere, share, spec


@dataclass(frozen=True)
class LoraSection:
    rank: int = spec("The rank of an adapter's two matrices.", ge=1, le=512)
    alpha: float = spec("The product of both is scaled by alpha / rank.", gt=0)
    rslora: bool = spec("Scale by alpha / sqrt(rank) instead (rsLoRA).")
    dropout: float = spec("Only in SFT: the share of an adapter's inputs that are 0 in training.", ge=0, lt=1)
    targets: list[str] | Literal["all", "attention", "mlp"] = spec(
        "The linear layers with adapters: all of attention and MLP, those of one of them, or a list of names such as "
        "q_proj. Experts, routers, layers with states and the output have none."
    )


@dataclass
class OptimizerSection:
    name: Literal["adamw"] = spec("The optimizer.")
    lr: float = spec("The highest learning rate.", gt=0)
    betas: list[float] = spec("The decay rates of AdamW's two moments.", ge=0, lt=1)
    eps: float = spec("AdamW's epsilon.", gt=0)
    weight_decay: float = spec("The decoupled weight decay of matrices. Norms and biases have none.", ge=0)
    max_grad_norm: float = spec("Gradients are scaled down to at most this norm.", gt=0)
    schedule: Literal["constant", "linear", "cosine"] = spec("The course of the learning rate after warm-up.")
    warmup_steps: int = spec("The updates of linear warm-up.", ge=0)
    min_lr_ratio: float = share("The lowest learning rate, as a share of lr.")


@dataclass(frozen=True)
class TrainerSection:
    backend: Literal["fsdp", "megatron"] = spec("The training backend: torch FSDP2 or Megatron-core.")
    num_ranks: int = spec("The trainer processes, each with one device.", ge=1, most=MOST_PROCESSES)
    replicas: int | Literal["auto"] = spec(
        "Only with backend fsdp: the copies of weights and optimizer state (HSDP). Consecutive ranks share each copy. "
        "Gradients are added up over the copies once an update. auto is 1 on one node. On several it is one a node, if "
        "a node's ranks can hold a copy.",
        ge=1,
        most=MOST_PROCESSES,
    )
    micro_batch_tokens: int | Literal["auto"] = spec(
        "The tokens that a rank packs into one forward pass. auto is 8192 on a CPU, and up to 32768 on GPUs, as memory "
        "allows.",
        ge=1,
    )
    dtype: Literal["auto", "float32", "bfloat16"] = spec(
        "The compute dtype. auto is float32 on a CPU and bfloat16 on GPUs."
    )
    activation_checkpointing: bool | Literal["auto"] = spec(
        "Recompute layers in the backward pass, which saves memory. auto is true on GPUs whose memory does not hold "
        "the activations."
    )
    logprob_chunk_tokens: int | Literal["auto"] = spec(
        "The tokens whose logits are made at one time. auto is 1024 on a CPU, up to 8192 on GPUs, by memory.", ge=1
    )
    logprob_kept_tokens: int | Literal["auto"] = spec(
        "The tokens of a pack whose logits are kept for the backward pass, not made twice. auto is one chunk, which "
        "costs no memory, and on GPUs as many as memory allows.",
        ge=0,
    )
    compile: bool | Literal["auto"] = spec(
        "Use torch.compile for the loss and for each layer (fsdp), or for norms and rotary embeddings (megatron). The "
        "first start takes up to a minute longer; compiled code is kept. auto is true on GPUs."
    )
    threads: int | None = spec(
        "The CPU threads of a rank. null is its share of the cores that engines on the same machine leave.",
        ge=1,
        most=MOST_PROCESSES,
    )
    offload_optimizer_for_logprob: bool = spec("Move optimizer state to the host while log-probs are computed.")
    offload_optimizer_for_generation: bool = spec(
        "Only if engines share the trainer's GPUs: move optimizer state to the host before they wake, until the next "
        "update."
    )
    optimizer: OptimizerSection = spec("The optimizer and the schedule of its learning rate.")
    megatron: Annotated[Any, Elsewhere("rlctl.preflight.backends.megatron:MegatronSection")] = spec(
        "Only with backend megatron: how the ranks share the work."
    )
