"""The policy as one FSDP2 module: a Hugging Face causal LM, its layers sharded, its head computed in chunks.

Weights are float32 masters, read from safetensors one layer at a time, so that no rank ever holds them whole.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rlctl.models.architectures import ARCHITECTURES, ArchitectureRow
from rlctl.models.grouped_experts import check_grouped
from rlctl.models.hf_folder import WeightFiles
from rlctl.preflight.settings import TrainerSettings
from rlctl.training.logprobs import chunked_log_probs
from rlctl.training.packing import Packed, compile_for_packs

Named = dict[str, nn.Parameter]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, sharing memory with `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class FsdpPolicy(nn.Module):
    """Causal LM and head in one root module, so that FSDP has the head's weight whole inside `forward`."""

    def __init__(self, lm: Any, row: ArchitectureRow, temperature: float, chunk: int, compiled: bool) -> None:
        super().__init__()
        self.lm = lm
        self.row = row
        self.temperature = temperature
        self.chunk = chunk
        self.compiled = compiled

    def forward(self, packed: Packed, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-prob and entropy, float32 [N] each, of the tokens at `rows` given those before them, under the
        tempered policy.

        rows: int64 [N], each after its sequence's first.
        """
        output = self.lm.get_submodule(self.row.backbone)(
            input_ids=packed.tokens[None],
            position_ids=packed.positions[None],
            use_cache=False,
            cu_seq_lens_q=packed.cu_seqlens,
            max_length_q=packed.max_len,
        )
        hidden = output.last_hidden_state[0].index_select(0, rows - 1)
        targets = packed.tokens[rows]
        head = self.lm.get_submodule(self.row.head).weight
        return chunked_log_probs(hidden, head, targets, self.temperature, self.chunk, compiled=self.compiled)


def build_policy(
    lm: Any, folder: Path, section: TrainerSettings, dtype: torch.dtype, mesh: DeviceMesh, temperature: float
) -> FsdpPolicy:
    """Shard a `skeleton` over `mesh` and read its weights; computes in `dtype`, keeps float32 masters.

    Raises the errors of `WeightFiles`, and ValueError for experts that a GPU would multiply one at a time.
    """
    cuda = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    check_grouped(lm, device, dtype)
    # With a padding index torch would withhold that token's input gradient, and pad is often the end token.
    row = ARCHITECTURES[lm.config.model_type]
    embedding = lm.get_submodule(row.embedding)
    embedding.padding_idx = None
    if section.activation_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lm.train()
    compiled = section.compile
    policy = FsdpPolicy(lm, row, temperature, section.logprob_chunk_tokens, compiled)
    half = dtype != torch.float32
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
    files = WeightFiles(folder)
    for i, layer in enumerate(lm.get_submodule(row.layers)):
        _materialize(layer, f"{row.layers}.{i}.", files, device)
        if compiled:
            # `forward` alone: FSDP's work before and after stays outside. One graph serves all layers.
            layer.forward = compile_for_packs(layer.forward)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    _materialize(lm, "", files, device)
    if lm.config.tie_word_embeddings:
        lm.get_submodule(row.head).weight = embedding.weight
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule) and mesh.size() > 1:
            # Gradients are summed over ranks, not averaged: the update divides them once. A single rank would divide
            # by 1, in a pass over all gradients.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return policy


def _materialize(module: nn.Module, prefix: str, files: WeightFiles, device: torch.device) -> None:
    """Read every parameter of `module` that is still on the meta device."""
    for name, parameter in list(module.named_parameters()):
        if parameter.is_meta:
            value = torch.empty(parameter.shape, dtype=torch.float32)
            files.read_into(prefix + name, value)
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, nn.Parameter(value.to(device)))


def read_shards(folder: Path, parameters: Named, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read every parameter from the folder, in `dtype`, cut as it is."""
    files = WeightFiles(folder)
    weights = {}
    for name, p in parameters.items():
        whole = torch.empty(p.shape, dtype=torch.float32)
        files.read_into(name, whole)
        if isinstance(p, DTensor):
            whole = local(distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None))
        weights[name] = whole.to(dtype)
    return weights


def free_gathered(policy: nn.Module) -> None:
    """Drop the root's gathered weights, which a forward pass without a backward pass leaves behind."""
    assert isinstance(policy, FSDPModule)
    policy.reshard()  # type: ignore[operator]
