"""Derivation of a model's facts, observed on transformers' class on the meta device instead of read from its config.

`python -m rlctl.models.derive FOLDER` prints the facts as one line of JSON and caches them. No weight is read. A model
that lacks a part needed in training is refused, and the message names the part.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rlctl.config.errors import ModelError
from rlctl.models.facts import ModelFacts, ModelSizes, facts_file, has_weights, head_kind, keep_facts
from rlctl.models.grouped_experts import stacked_experts
from rlctl.models.layer_kinds import AttentionKind, LayerKinds, LinearLayer, LogitTransform
from rlctl.models.meta_model import decoder_of, language_model, reason, text_config, value_head
from rlctl.models.observed_facts import measure_row_bytes, observe
from rlctl.models.parameter_table import ParameterTable, Shape, derive_table, persistent_buffers, tensors_of
from rlctl.models.weight_headers import DTYPES, weight_headers

_LENGTHS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "n_positions", "seq_length")
# Longest sequence of a model whose config has no limit, for example a state-space model.
_ENDLESS = 1 << 20
# Config keys with the number of experts per token.
_ROUTED_KEYS = ("num_experts_per_tok", "top_k_experts")
# Patterns for the names of an MLP's matrices, and of a router's.
_MLP = r"mlp|feed_forward|ffn|shared|moe"
_ROUTER = r"\.(gate|router)\."
# Pattern for the names of attention modules.
_ATTENTION = r"attn|attention"
# Matrix of multi-head latent attention. Engines absorb it into the query and output projections.
_ABSORBED = "kv_b_proj"


def load_facts(folder: Path) -> ModelFacts:
    """Return a folder's facts from the cache, or derive and cache them in this process. Raises ModelError."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return ModelFacts.from_json(json.loads(facts_file(folder).read_text()))
    facts = derive_facts(folder)
    keep_facts(folder, facts)
    return facts


def derive_facts(folder: Path, weights: bool = True) -> ModelFacts:
    """Derive the facts of a Hugging Face folder. weights: use the names of its tensors, if any. Raises ModelError."""
    try:
        return _read_facts(folder, weights)
    except (ModelError, ModuleNotFoundError):  # A missing package is no fault of the folder.
        raise
    except Exception as error:  # Model classes raise any type of error for values that do not fit.
        raise ModelError(f"{folder}/config.json: no model can be derived from it: {reason(error)}") from error


def _read_facts(folder: Path, weights: bool) -> ModelFacts:
    lm = language_model(folder)
    layers = layer_container(lm, folder)
    table = derive_table(lm, disk_tensors(folder) if weights else None, folder)
    paths = {id(module): path for path, module in lm.named_modules()}
    kind = head_kind(folder)
    head = lm.get_output_embeddings() if kind == "causal" else value_head(lm)
    embedding = lm.get_input_embeddings()
    if head is None or embedding is None:
        raise ModelError(f"{folder}: transformers' {type(lm).__name__} names no {'head' if embedding else 'embedding'}")
    decoder = decoder_of(lm, folder)
    try:
        kinds = observe(text_config(folder))
    except ValueError as error:
        raise ModelError(f"{folder}: {error}") from error
    sent_targets = {row.target for row in table.sent_rows}
    return ModelFacts(
        architecture=type(lm).__name__,
        decoder=paths[id(decoder)],
        layers=paths[id(layers)],
        embedding=paths[id(embedding)],
        head=paths[id(head)],
        head_bias=getattr(head, "bias", None) is not None,
        # Observed were the logits of the causal LM.
        kinds=kinds if kind == "causal" else replace(kinds, logits=LogitTransform()),
        float32=tuple(sorted(getattr(lm, "_keep_in_fp32_modules_strict", None) or ())),
        buffers=tuple(name for name in persistent_buffers(lm) if name in sent_targets),
        kept=tuple(row.name for row in table.kept_rows),
        sizes=replace(_measure_sizes(lm, layers, kinds, paths[id(layers)], decoder), head_kind=kind),
    )


def disk_tensors(folder: Path) -> dict[str, tuple[str, Shape]] | None:
    """Return name -> (dtype, shape) of a folder's tensors; None if it has no weights. Raises ModelError."""
    headers = weight_headers(folder) if has_weights(folder) else {}
    if not headers:
        return None
    return {name: (DTYPES.get(dtype, dtype), tuple(shape)) for name, (dtype, shape) in headers.items()}


def table_of(lm: Any, folder: Path) -> ParameterTable:
    """Return the parameter table of a model on the meta device, with names in the folder. Raises ModelError."""
    return derive_table(lm, disk_tensors(folder), folder)


def layer_container(lm: Any, folder: Path) -> nn.ModuleList:
    """Return the decoder's list of layers. Raises ModelError if there is none, or more than one."""
    layer_classes = set(getattr(lm, "_no_split_modules", None) or ())
    containers = []
    for module in decoder_of(lm, folder).modules():
        if isinstance(module, nn.ModuleList) and len(module):
            classes = {type(layer).__name__ for layer in module}
            if classes <= layer_classes:
                containers.append(module)
    if len(containers) != 1:
        raise ModelError(
            f"{folder}: transformers' {type(lm).__name__} has {len(containers)} lists of layers; needed: one, whose "
            f"layers are of {', '.join(sorted(layer_classes)) or 'a class in _no_split_modules'}"
        )
    return containers[0]


def _iterate_linears(layers: nn.ModuleList, place: str, kinds: LayerKinds) -> Iterator[LinearLayer]:
    """Yield every linear layer in `layers`. place: module path of that list."""
    state_layers = {kind.layer for kind in kinds.states} - {kind.layer for kind in kinds.attention}
    for index, layer in enumerate(layers):
        mixtures = [name.rpartition(".")[0] for name, module in layer.named_modules() if stacked_experts(module)]
        for name, module in layer.named_modules():
            if type(module) is not nn.Linear:
                continue
            if any(name.startswith(f"{mixture}.") for mixture in mixtures):
                part = "experts"
            elif re.search(_ATTENTION, name) and index in state_layers:
                part = "states"
            elif re.search(_ATTENTION, name):
                part = "absorbed" if name.endswith(_ABSORBED) else "attention"
            elif re.search(_MLP, name):
                part = "mlp"
            else:
                part = "other"
            yield LinearLayer(f"{place}.{index}.{name}", module.in_features, module.out_features, part)


def _measure_sizes(lm: Any, layers: nn.ModuleList, kinds: LayerKinds, place: str, decoder: nn.Module) -> ModelSizes:
    config = lm.config
    attention = kinds.attention or _stated_attention(config, len(layers))
    parameters = {name: tensor for name, tensor in tensors_of(lm).items() if _is_parameter(lm, name)}

    def has_parameter(pattern: str) -> bool:
        return any(re.search(pattern, name) for name in parameters)

    layer_stacks = [_layer_experts(layer) for layer in layers]
    stacks = list(chain.from_iterable(layer_stacks))
    experts = max((stack.shape[0] for stack in stacks), default=0)
    expert_parameters = _count_numbers(stacks)
    used_experts = min(_experts_per_token(lm), experts)
    idle_parameters = expert_parameters // experts * (experts - used_experts) if experts else 0
    tied = bool(config.tie_word_embeddings) and lm.get_output_embeddings() is not None
    embedding = lm.get_input_embeddings().weight
    hidden = int(embedding.shape[1])
    total = _count_numbers(parameters.values())
    active = total - idle_parameters
    if not tied:  # A token looks up one row of the embedding, without a matrix product.
        active -= embedding.numel()
    return ModelSizes(
        model_type=config.model_type,
        hidden=int(getattr(config, "hidden_size", hidden)),
        layers=len(layers),
        heads=max((kind.heads for kind in attention), default=0),
        kv_heads=max((kind.kv_heads for kind in attention), default=0),
        head_dim=max((kind.dim for kind in attention), default=0),
        intermediate=_largest(getattr(config, "intermediate_size", 0)),
        mlp_width=max(_mlp_width(layer, hidden, used_experts) for layer in layers),
        vocab=int(embedding.shape[0]),
        max_positions=longest_sequence(config),
        tied=tied,
        qkv_bias=has_parameter(r"\.(q|qkv|query|query_key_value)_?(proj)?\.bias$"),
        output_bias=has_parameter(r"\.(o_proj|out_proj|dense)\.bias$"),
        mlp_bias=has_parameter(rf"({_MLP}).*\.bias$"),
        qk_norm=has_parameter(r"\.(q|query)_(layer)?norm\.weight$"),
        experts=experts,
        experts_per_token=used_experts,
        expert_intermediate=_largest(getattr(config, "moe_intermediate_size", None) or 0),
        norm_topk_prob=bool(getattr(config, "norm_topk_prob", False)),
        sparse_layers=sum(map(bool, layer_stacks)),
        activation=str(getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", "silu")),
        parameters=total,
        active_parameters=active,
        expert_parameters=expert_parameters,
        largest_layer=max(_count_numbers(layer.parameters()) for layer in layers),
        embedding_parameters=embedding.numel(),
        kv_values_per_token=sum(kind.kv_heads * (kind.dim + kind.v_dim) for kind in attention),
        linears=tuple(_iterate_linears(layers, place, kinds)),
        state_layers=len(kinds.states),
        one_sequence_a_row=kinds.one_sequence_a_row,
        dropout=tuple(key for key, _ in kinds.dropout),
        row_bytes=tuple(measure_row_bytes(decoder, longest_sequence(config))) if kinds.one_sequence_a_row else (),
    )


def _count_numbers(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _layer_experts(layer: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a layer that are stacks of its experts' matrices."""
    parameters: list[nn.Parameter] = []
    for module in layer.modules():
        parameters += stacked_experts(module)
    return parameters


def _stated_attention(config: Any, layers: int) -> tuple[AttentionKind, ...]:
    """Return the attention by the config, for a model in which no attention call could be observed."""
    heads = getattr(config, "num_attention_heads", 0) or 0
    if not heads:
        return ()
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = 1 if getattr(config, "multi_query", False) else getattr(config, "num_keyvalue_heads", None) or heads
    kind = AttentionKind(
        layer=0,
        window=None,
        softcap=None,
        sinks=False,
        scale=dim**-0.5,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        v_dim=dim,
    )
    return tuple(replace(kind, layer=layer) for layer in range(layers))


def _is_parameter(lm: Any, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return leaf in lm.get_submodule(owner)._parameters


def _experts_per_token(lm: Any) -> int:
    """Return the number of experts that a router chooses per token."""
    counts = [getattr(module, "top_k", None) for module in lm.modules()]
    counts += [getattr(lm.config, key, None) for key in _ROUTED_KEYS]
    return next((count for count in counts if isinstance(count, int)), 1)


def _mlp_width(layer: nn.Module, hidden: int, used_experts: int) -> int:
    """Return the MLP width of a token: rows of the gate matrices (as many as of up) of its experts and dense MLPs."""
    routed_numbers = sum(stack.numel() // stack.shape[0] for stack in _layer_experts(layer)) * used_experts
    dense_numbers = 0
    for name, parameter in layer.named_parameters():
        if parameter.ndim == 2 and re.search(_MLP, name) and not re.search(_ROUTER, name):
            dense_numbers += parameter.numel()
    # A gated MLP has three matrices: gate, up and down.
    return (routed_numbers + dense_numbers) // (3 * hidden)


def _largest(sizes: Any) -> int:
    """Return a config value that is an integer, or the largest of a list; 0 for anything else."""
    if isinstance(sizes, int):
        return sizes
    return max(sizes, default=0) if isinstance(sizes, (list, tuple)) else 0


def longest_sequence(config: Any) -> int:
    """Return the longest sequence in tokens by a config.

    With the rotary scalings llama3 and yarn, max_position_embeddings is already scaled. linear multiplies it by the
    factor. vLLM (`_get_and_verify_max_len`) and transformers (`_compute_yarn_parameters`) do the same.
    """
    lengths = (getattr(config, key, None) for key in _LENGTHS)
    stated_length = next((int(length) for length in lengths if length), _ENDLESS)
    scale = getattr(config, "rope_parameters", None) or {}
    kind = scale.get("rope_type", "default") if isinstance(scale, dict) else "default"
    if kind != "linear":
        return stated_length
    return int(stated_length * float(scale.get("factor") or 1))


def main(folder: Path) -> None:
    """Print the facts of a folder as JSON, or {"error": the reason}."""
    try:
        print(json.dumps(load_facts(folder).to_json()))
    except ModelError as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
