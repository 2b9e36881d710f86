"""The policy as one FSDP2 module: a Hugging Face causal LM with sharded layers, and a head computed in chunks. A model
with a value head (a critic, a reward model) is the same module with another head.

Trained weights are float32 masters. Frozen weights, below adapters, have the compute dtype. Weights are read from
safetensors one layer at a time, so that no rank ever holds the whole model. A single rank does not use FSDP: its layers
compute with copies of the weights in the compute dtype (`compute_in`).
"""

from collections.abc import Callable, Mapping
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
from rlctl.training.logits import OutputHead
from rlctl.training.logprobs import chunked_log_probs
from rlctl.training.lora import FirstAdapters, add_adapters
from rlctl.training.micro_batching import TrainingSample
from rlctl.training.packing import Packed, compile_for_packs, pack

# Parameters and buffers by name.
Named = Mapping[str, Tensor]
# Function of hidden states [N, hidden] and of the head, whose weight is whole.
ReadHidden = Callable[[Tensor, OutputHead], Any]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, sharing memory with `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class FsdpPolicy(nn.Module):
    """Causal LM whose `forward` returns log-probs, or a model with a value head whose `forward` returns values.

    It is FSDP's root module, so the whole head weight is gathered.
    """

    def __init__(
        self, lm: Any, facts: ModelFacts, temperature: float, section: TrainerSettings, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.lm = lm
        self.facts = facts
        self.temperature = temperature
        self.section = section
        self.compiled = section.compile
        # Compute dtype, to which the head's input is cast.
        self.dtype = dtype

    def forward(self, packed: Packed, rows: Tensor, read: ReadHidden | None = None) -> Any:
        """Return the log-probs of the tokens at `rows`, and the entropy of the policy there, float32 [N] each.

        Both are at the sampling temperature. A value head returns (values of the tokens before `rows`,), float32 [N].
        rows: int64 [N], rows of the pack without first tokens of sequences. read: return its result in their place, for
        the head and the hidden states [N, hidden] of the tokens before `rows`.
        """
        # Some models (mamba) have a float32 residual. transformers casts it to the head's dtype too.
        hidden = self._hidden_states(packed, rows - 1).to(self.dtype)
        layer = self.lm.get_submodule(self.facts.head)
        head = OutputHead(layer.weight, getattr(layer, "bias", None), self.facts.kinds.logits)
        if read:
            return read(hidden, head)
        if self.has_value_head:
            return (read_values(hidden, head),)
        return self.read_log_probs(hidden, head, packed.tokens[rows])

    @property
    def has_value_head(self) -> bool:
        """True if the head gives one value for a token, and no log-probs."""
        return self.facts.sizes.head_kind == "value"

    def read_log_probs(self, hidden: Tensor, head: OutputHead, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-prob and entropy of the targets, float32 [N] each. targets: int64 [N]."""
        return chunked_log_probs(
            hidden,
            head.weight,
            targets,
            self.temperature,
            self.section.logprob_chunk_tokens,
            bias=head.bias,
            transform=head.transform,
            compiled=self.compiled,
            kept_rows=self.section.logprob_kept_tokens,
        )

    def _hidden_states(self, packed: Packed, rows: Tensor) -> Tensor:
        """Return the hidden states [N, hidden] at `rows` of a pack."""
        decoder = self.lm.get_submodule(self.facts.decoder)
        if self.facts.sizes.one_sequence_a_row:
            # Padding at the end of a row needs no mask, because a token does not attend to later tokens. Each row is
            # padded with its last token.
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
        """Return the keyword arguments that tell recurrent layers where sequences of the pack begin; {} without any."""
        if not self.facts.kinds.states:
            return {}
        seq_idx = (packed.positions == 0).cumsum(0)[None].int() - 1
        return {"cu_seq_lens_k": packed.cu_seqlens, "max_length_k": packed.max_len, "seq_idx": seq_idx}


def read_values(hidden: Tensor, head: OutputHead) -> Tensor:
    """Return the outputs of a value head for hidden states [N, hidden]: float32 [N], computed in float32."""
    bias = None if head.bias is None else head.bias.float()
    return torch.nn.functional.linear(hidden.float(), head.weight.float(), bias)[:, 0]


@dataclass(frozen=True)
class Reading:
    """Sources of a model's weights, and the dtype and device to read them to."""

    facts: ModelFacts
    table: ParameterTable
    # Source of frozen parameters and of buffers.
    files: WeightFiles
    # Source of trained parameters.
    first: WeightFiles | FirstAdapters
    # Compute dtype, which buffers and frozen parameters get. Trained parameters are float32.
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
    frozen: bool = False,
) -> FsdpPolicy:
    """Shard `lm` over `mesh`, read its weights from `folder`, and return the policy, which computes in `dtype`.

    lm: model on the meta device, from `skeleton`. first: adapters, which are then the only trained parameters; None to
    train every parameter. frozen: no parameter is trained, and all have the compute dtype. Raises the errors of
    `WeightFiles` and `shard_float32`, and ValueError for experts that a GPU would compute one at a time.
    """
    cuda = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    check_grouped(lm, device, dtype)
    # With a padding index torch gives the row of the padding token no gradient. This token is often the end token, too,
    # which must be trained.
    embedding = lm.get_submodule(facts.embedding)
    embedding.padding_idx = None
    if section.activation_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lm.train()
    if first:
        add_adapters(lm, first.spec)
    elif frozen:
        lm.requires_grad_(False)
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
            # Only `forward` is compiled, without the work of `compute_in` and FSDP, so that all layers share a graph.
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
            # Gradients are summed over ranks, not averaged, because the end of the update divides them once.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return policy


def _float32_parameters(module: nn.Module, prefix: str, facts: ModelFacts) -> set[nn.Parameter]:
    """Return the parameters that transformers keeps in float32 in a model of bfloat16."""
    return {parameter for name, parameter in module.named_parameters() if facts.keeps_float32(prefix + name)}


def compute_in(module: nn.Module, dtype: torch.dtype, uncast: set[nn.Parameter]) -> None:
    """Wrap the module's `forward` so that each call computes with copies of inputs and parameters in `dtype`.

    uncast: parameters that are not cast. The copies live until the backward pass, except in recomputed layers. A
    parameter gets its gradient in its own dtype. On one rank FSDP would do the same with 14 bytes of memory traffic for
    each parameter instead of 6, three times in an update.
    """
    # Parameter -> (a module's dictionary of parameters, name there), wherever the parameter is used. A tied parameter
    # is used several times and gets one copy.
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
    """Read all parameters of `module` that are still on the meta device, and all buffers that the folder contains."""
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
        # A buffer requires no gradient, so it is read from `files`.
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
    """Give the submodules of `module` that transformers keeps in float32 FSDP groups that compute in float32.

    An FSDP group computes in one dtype. Raises ModelError for a submodule that has both parameters to keep in float32
    and other parameters.
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
    """Return the values that `files` has for `tensors`, by name, each sharded like the tensor, on the host.

    Parameters that transformers keeps in float32 are float32, the other parameters have dtype `dtype`. Buffers have the
    dtype of the tensor.
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


# Largest allowed mean difference of log-probs in nats. Rounding makes 1e-7 in float32 and 0.02 in bfloat16. Sequences
# that leaked into the next one made 8e-4 to 6.5.
_LARGEST_GAPS = {torch.float32: 1e-4, torch.bfloat16: 0.1}


def check_restarts(policy: FsdpPolicy, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ModelError if a sequence in a pack gets other log-probs than alone. All ranks call together.

    The log-probs differ if attention or a recurrent state passes from one sequence of a pack to the next.
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
    """Free the gathered weights of FSDP's root module, which stay after a forward pass without a backward pass."""
    if isinstance(policy, FSDPModule):
        policy.reshard()  # type: ignore[operator]
