"""The policy as one FSDP2 module: a Hugging Face causal LM, its layers sharded, its head computed in chunks.

Weights are float32 masters, read from safetensors one layer at a time, so that no rank ever holds them whole. Frozen
ones, below adapters, are of the compute dtype. A rank that shares its weights with no other has nothing to gather: its
layers compute with copies in the compute dtype (`compute_in`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from rlctl.config.errors import ModelError
from rlctl.models.adapter_folder import AdapterFile
from rlctl.models.facts import ModelFacts
from rlctl.models.grouped_experts import check_grouped
from rlctl.models.hf_folder import WeightFiles
from rlctl.models.parameter_table import ParameterTable
from rlctl.preflight.trainer_settings import TrainerSettings
from rlctl.training.logprobs import chunked_log_probs
from rlctl.training.lora import FirstAdapters, add_adapters
from rlctl.training.micro_batching import TrainingSample
from rlctl.training.packing import Packed, compile_for_packs, pack

# Parameters and buffers by name.
Named = Mapping[str, Tensor]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, sharing memory with `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class FsdpPolicy(nn.Module):
    """Causal LM and head in one root module, so that FSDP has the head's weight whole inside `forward`."""

    def __init__(
        self, lm: Any, facts: ModelFacts, temperature: float, section: TrainerSettings, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.lm = lm
        self.facts = facts
        self.temperature = temperature
        self.section = section
        self.compiled = section.compile
        # Compute dtype, that of the head's input.
        self.dtype = dtype

    def forward(self, packed: Packed, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-prob and entropy, float32 [N] each, of the tokens at `rows` given those before them, under the
        tempered policy.

        rows: int64 [N], each after its sequence's first.
        """
        # A residual in float32 (mamba) ends in the head's dtype, as in transformers.
        hidden = self._hidden_states(packed, rows - 1).to(self.dtype)
        targets = packed.tokens[rows]
        head = self.lm.get_submodule(self.facts.head)
        return chunked_log_probs(
            hidden,
            head.weight,
            targets,
            self.temperature,
            self.section.logprob_chunk_tokens,
            bias=getattr(head, "bias", None),
            transform=self.facts.kinds.logits,
            compiled=self.compiled,
            kept_rows=self.section.logprob_kept_tokens,
        )

    def _hidden_states(self, packed: Packed, rows: Tensor) -> Tensor:
        """Return the hidden states [N, hidden] at `rows` of a pack."""
        decoder = self.lm.get_submodule(self.facts.decoder)
        if self.facts.sizes.one_sequence_a_row:
            # A token sees none after it, so that padding needs no mask. The last token fills each row.
            starts = packed.cu_seqlens[:-1, None].long()
            ends = packed.cu_seqlens[1:, None].long()
            token_indices = torch.minimum(starts + torch.arange(packed.max_len, device=starts.device), ends - 1)
            padded: Tensor = decoder(input_ids=packed.tokens[token_indices], use_cache=False).last_hidden_state
            return padded.flatten(0, 1).index_select(0, packed.sequence[rows] * packed.max_len + packed.positions[rows])
        output = decoder(
            input_ids=packed.tokens[None],
            position_ids=packed.positions[None],
            use_cache=False,
            cu_seq_lens_q=packed.cu_seqlens,
            max_length_q=packed.max_len,
            **self._boundaries(packed),
        )
        hidden: Tensor = output.last_hidden_state[0].index_select(0, rows)
        return hidden

    def _boundaries(self, packed: Packed) -> dict[str, Any]:
        """Return the further keywords by which layers with states find the sequences of a pack."""
        if not self.facts.kinds.states:
            return {}
        seq_idx = (packed.positions == 0).cumsum(0)[None].int() - 1
        return {"cu_seq_lens_k": packed.cu_seqlens, "max_length_k": packed.max_len, "seq_idx": seq_idx}


@dataclass(frozen=True)
class Reading:
    """Source of weights, and their place on a device."""

    facts: ModelFacts
    table: ParameterTable
    # Frozen parameters and buffers come from `files`, trained parameters from `first`.
    files: WeightFiles
    first: WeightFiles | FirstAdapters
    # Compute dtype: buffers and frozen parameters have it, trained ones are float32 masters.
    dtype: torch.dtype
    device: torch.device


def build_policy(
    lm: Any,
    facts: ModelFacts,
    table: ParameterTable,
    folder: Path,
    section: TrainerSettings,
    dtype: torch.dtype,
    mesh: DeviceMesh,
    temperature: float,
    first: FirstAdapters | None = None,
) -> FsdpPolicy:
    """Shard a `skeleton` over `mesh` and read its weights; computes in `dtype`, keeps float32 masters.

    first: adapters, which alone are trained; None: every parameter is trained. Raises the errors of `WeightFiles` and
    `shard_float32`, and ValueError for experts that a GPU would multiply one at a time.
    """
    cuda = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    check_grouped(lm, device, dtype)
    # With a padding index torch would withhold that token's input gradient, and pad is often the end token.
    embedding = lm.get_submodule(facts.embedding)
    embedding.padding_idx = None
    if section.activation_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lm.train()
    if first:
        add_adapters(lm, first.spec)
    policy = FsdpPolicy(lm, facts, temperature, section, dtype)
    precision = MixedPrecisionPolicy()
    if dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    files = WeightFiles(folder)
    reading = Reading(facts=facts, table=table, files=files, first=first or files, dtype=dtype, device=device)
    layers = lm.get_submodule(facts.layers)
    is_alone = mesh.size() == 1
    for index, layer in enumerate(layers):
        prefix = f"{facts.layers}.{index}."
        _materialize(layer, prefix, reading)
        if section.compile:
            # `forward` alone: work of `compute_in` and FSDP stays outside. One graph serves all layers.
            layer.forward = compile_for_packs(layer.forward)
        if is_alone:
            compute_in(layer, dtype, _float32_parameters(layer, prefix, facts))
        else:
            shard_float32(layer, prefix, facts, mesh, precision)
            fully_shard(layer, mesh=mesh, mp_policy=precision)
    _materialize(lm, "", reading)
    if facts.sizes.tied:
        lm.get_submodule(facts.head).weight = embedding.weight
    if is_alone:
        compute_in(policy, dtype, {*_float32_parameters(lm, "", facts), *layers.parameters()})
        return policy
    shard_float32(lm, "", facts, mesh, precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # Gradients are summed over ranks, not averaged: the update divides them once.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return policy


def _float32_parameters(module: nn.Module, prefix: str, facts: ModelFacts) -> set[nn.Parameter]:
    """Return the parameters that transformers keeps in float32 next to bfloat16."""
    return {parameter for name, parameter in module.named_parameters() if facts.keeps_float32(prefix + name)}


def compute_in(module: nn.Module, dtype: torch.dtype, uncast: set[nn.Parameter]) -> None:
    """Have `forward` cast its inputs and the module's parameters to `dtype` at each call, and compute with the copies.

    uncast: parameters that `forward` uses as they are. Copies live until the backward pass, except in recomputed
    layers. Gradients reach the parameters in their own dtype. On one rank FSDP would do the same with 14 bytes of
    memory traffic a parameter instead of 6, three times an update.
    """
    # Parameter -> its places: for each, the dictionary of a module's parameters, and the name there. Tied parameters
    # have several places and one copy.
    places: dict[nn.Parameter, list[tuple[dict[str, Any], str]]] = {}
    for owner in module.modules():
        parameters: dict[str, Any] = owner._parameters
        for name, parameter in parameters.items():
            if parameter is not None and parameter.dtype != dtype and parameter not in uncast:
                places.setdefault(parameter, []).append((parameters, name))
    forward = module.forward

    def cast(argument: Any) -> Any:
        return argument.to(dtype) if isinstance(argument, Tensor) and argument.is_floating_point() else argument

    @wraps(forward)
    def compute(*args: Any, **kwargs: Any) -> Any:
        for parameter, parameter_places in places.items():
            copy = parameter.to(dtype)
            for parameters, name in parameter_places:
                parameters[name] = copy
        try:
            return forward(*tree_map(cast, args), **tree_map(cast, kwargs))
        finally:
            for parameter, parameter_places in places.items():
                for parameters, name in parameter_places:
                    parameters[name] = parameter

    if places:
        module.forward = compute


def _materialize(module: nn.Module, prefix: str, reading: "Reading") -> None:
    """Read every parameter of `module` that is still on the meta device, and every buffer that is on disk."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not tensor.is_meta or not reading.table.holds(prefix + name):
            continue
        if not tensor.is_floating_point():
            dtype = tensor.dtype
        elif tensor.requires_grad or reading.facts.keeps_float32(prefix + name):
            dtype = torch.float32
        else:
            dtype = reading.dtype
        read_tensor = torch.empty(tensor.shape, dtype=dtype)
        # A buffer that is on disk needs no gradient.
        source = reading.first if tensor.requires_grad else reading.files
        source.read_into(reading.table.rows_of(prefix + name), read_tensor)
        read_tensor = read_tensor.to(reading.device)
        if isinstance(tensor, nn.Parameter):
            read_tensor = nn.Parameter(read_tensor, tensor.requires_grad)
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, read_tensor)


def shard_float32(
    module: nn.Module, prefix: str, facts: ModelFacts, mesh: DeviceMesh, precision: MixedPrecisionPolicy
) -> None:
    """Shard the parts of `module` apart whose parameters transformers keeps in float32 next to bfloat16.

    Raises ModelError for such a parameter in a part that has others too: FSDP computes a part in one dtype.
    """
    if precision.param_dtype is None or not facts.float32:
        return
    unsharded = set()
    for name, parameter in module.named_parameters():
        if facts.keeps_float32(prefix + name) and not isinstance(parameter, DTensor):
            unsharded.add(name)
    for path, part in module.named_modules():
        part_names = {f"{path}.{name}" for name, _ in part.named_parameters()}
        if part_names and part_names <= unsharded:
            unsharded -= part_names
            exact = MixedPrecisionPolicy(reduce_dtype=precision.reduce_dtype, cast_forward_inputs=False)
            fully_shard(part, mesh=mesh, mp_policy=exact)
    if unsharded:
        raise ModelError(
            f"transformers keeps {prefix}{min(unsharded)} in float32, beside others in its module that it does not; "
            "needed: trainer.dtype=float32, or a copy of the weights on each rank (trainer.replicas)"
        )


def read_shards(
    files: WeightFiles | AdapterFile, table: ParameterTable, tensors: Named, facts: ModelFacts, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Read from files the values of `tensors`, each cut over the ranks as the tensor is.

    Parameters are read in the dtype of their computations, buffers in their own. dtype: of parameters that transformers
    does not keep in float32.
    """
    weights = {}
    for name, tensor in tensors.items():
        weight = torch.empty(tensor.shape, dtype=torch.float32 if tensor.is_floating_point() else tensor.dtype)
        files.read_into(table.rows_of(name), weight)
        if isinstance(tensor, DTensor):
            weight = local(distribute_tensor(weight, tensor.device_mesh, tensor.placements, src_data_rank=None))
        computed = torch.float32 if facts.keeps_float32(name) else dtype
        weights[name] = weight.to(computed if isinstance(tensor, nn.Parameter) else tensor.dtype)
    return weights


# Largest mean difference of log-probs, nats. float32 rounds to 1e-7, bfloat16 to 0.02. Leaks measured 8e-4 to 6.5.
_LARGEST_GAPS = {torch.float32: 1e-4, torch.bfloat16: 0.1}


def check_restarts(policy: FsdpPolicy, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ModelError unless sequences of a micro-batch have the log-probs of each alone. All ranks call together.

    Only rounding can change the first sequence of a pack: no state passes into it.
    """
    token_ids = np.arange(1, 19, dtype=np.int32) % policy.facts.sizes.vocab
    lengths = (6, 8, 4)
    parts = np.split(token_ids, np.cumsum(lengths)[:-1])
    samples = [TrainingSample(tokens=part, mask=np.ones(len(part), np.bool_)) for part in parts]
    log_probs = []
    with torch.no_grad():
        for micro_batch in (samples, *([sample] for sample in samples)):
            packed = pack(micro_batch, device)
            log_probs.append(policy(packed, packed.positions.nonzero()[:, 0])[0])
    free_gathered(policy)
    together, *alone = log_probs
    gap = float((together - torch.cat(alone)).abs().mean())
    if not gap <= _LARGEST_GAPS[dtype]:
        distance = f"of {policy.facts.sizes.model_type} are {gap:.3g} nats from those of each alone, "
        distance += f"limit {_LARGEST_GAPS[dtype]:g}"
        if policy.facts.sizes.one_sequence_a_row:
            raise ModelError(f"log-probs of padded sequences {distance}: rows or padding change each other")
        functions = set().union(*(kind.functions for kind in policy.facts.kinds.states))
        raise ModelError(
            f"log-probs of packed sequences {distance}: a state passes from one sequence to the next "
            f"({', '.join(sorted(functions))})"
        )


def free_gathered(policy: nn.Module) -> None:
    """Drop the root's gathered weights, which a forward pass without a backward pass leaves behind."""
    if isinstance(policy, FSDPModule):
        policy.reshard()  # type: ignore[operator]
