"""Derivation of a model's facts: from transformers' class on the meta device, recorded rather than believed.

`python -m rlctl.models.derive FOLDER` prints them as one line of JSON and keeps them for the next process. No weight is
read. A model without the parts that training needs is refused with the part's name.
"""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from rlctl.config.errors import ModelError
from rlctl.models.facts import ModelFacts, ModelSizes, facts_file, has_weights, keep_facts
from rlctl.models.grouped_experts import stacked_experts
from rlctl.models.layer_kinds import AttentionKind, LayerKinds, LinearLayer
from rlctl.models.meta_model import causal_lm, reason, text_config
from rlctl.models.observed_facts import kept_of_rows, observe
from rlctl.models.parameter_table import ParameterTable, Shape, derive_table, persistent_buffers, tensors_of
from rlctl.models.weight_headers import DTYPES, weight_headers

_LENGTHS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "n_positions", "seq_length")
# Longest sequence of a model that states none, such as a state-space model.
_ENDLESS = 1 << 20
# Keys of the number of experts that a token is routed to.
_CHOSEN = ("num_experts_per_tok", "top_k_experts")
# Matrices of an MLP, and of a router in it, by their names in a layer.
_MLP, _ROUTER = r"mlp|feed_forward|ffn|shared|moe", r"\.(gate|router)\."
# An attention's modules, and the matrix of latent attention that engines multiply into queries and outputs.
_ATTENTION, _ABSORBED = r"attn|attention", "kv_b_proj"


def load_facts(folder: Path) -> ModelFacts:
    """Return a folder's facts in a process that has torch: those kept, or derived here. Raises ModelError."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return ModelFacts.from_json(json.loads(facts_file(folder).read_text()))
    facts = derive_facts(folder)
    keep_facts(folder, facts)
    return facts


def derive_facts(folder: Path, weights: bool = True) -> ModelFacts:
    """Return the facts of a Hugging Face folder. weights: names come from its own, if it has any. Raises ModelError."""
    try:
        return _derived(folder, weights)
    except (ModelError, ModuleNotFoundError):  # A missing package is no fault of the folder.
        raise
    except Exception as error:  # A class of a model has an error for each value that does not fit.
        raise ModelError(f"{folder}/config.json: no model can be derived from it: {reason(error)}") from error


def _derived(folder: Path, weights: bool) -> ModelFacts:
    lm = causal_lm(folder)
    layers = layer_container(lm, folder)
    table = derive_table(lm, disk_tensors(folder) if weights else None, folder)
    paths = {id(module): path for path, module in lm.named_modules()}
    head, embedding = lm.get_output_embeddings(), lm.get_input_embeddings()
    if head is None or embedding is None:
        raise ModelError(f"{folder}: transformers' {type(lm).__name__} names no {'head' if embedding else 'embedding'}")
    decoder = decoder_of(lm, folder)
    try:
        kinds = observe(text_config(folder))
    except ValueError as error:
        raise ModelError(f"{folder}: {error}") from error
    on_disk = {row.target for row in table.sent}
    return ModelFacts(
        causal_lm=type(lm).__name__,
        decoder=paths[id(decoder)],
        layers=paths[id(layers)],
        embedding=paths[id(embedding)],
        head=paths[id(head)],
        head_bias=getattr(head, "bias", None) is not None,
        kinds=kinds,
        float32=tuple(sorted(getattr(lm, "_keep_in_fp32_modules_strict", None) or ())),
        buffers=tuple(name for name in persistent_buffers(lm) if name in on_disk),
        kept=tuple(row.name for row in table.kept),
        sizes=_sizes(lm, layers, kinds, paths[id(layers)], decoder),
    )


def disk_tensors(folder: Path) -> dict[str, tuple[str, Shape]] | None:
    """Return name -> (dtype, shape) of a folder's tensors; None if it has no weights. Raises ModelError."""
    found = weight_headers(folder) if has_weights(folder) else {}
    if not found:
        return None
    return {name: (DTYPES.get(dtype, dtype), tuple(shape)) for name, (dtype, shape) in found.items()}


def table_of(lm: Any, folder: Path) -> ParameterTable:
    """Return the parameter table of a causal LM on the meta device, with the folder's names. Raises ModelError."""
    return derive_table(lm, disk_tensors(folder), folder)


def decoder_of(lm: Any, folder: Path) -> nn.Module:
    """Return the module that turns tokens into hidden states. Raises ModelError."""
    decoder = lm.get_decoder()
    if decoder is lm:
        # Its base_model_prefix is wrong (llama4_text): the child that has the embedding.
        embedding = lm.get_input_embeddings()
        owners = [child for child in lm.children() if any(each is embedding for each in child.modules())]
        if len(owners) != 1:
            raise ModelError(f"{folder}: transformers' {type(lm).__name__} names no decoder")
        decoder = owners[0]
    assert isinstance(decoder, nn.Module)
    return decoder


def layer_container(lm: Any, folder: Path) -> nn.ModuleList:
    """Return the one list of all layers. Raises ModelError if there is none, or more than one."""
    known = set(getattr(lm, "_no_split_modules", None) or ())
    found = [
        module
        for module in decoder_of(lm, folder).modules()
        if isinstance(module, nn.ModuleList) and len(module) and {type(each).__name__ for each in module} <= known
    ]
    if len(found) != 1:
        raise ModelError(
            f"{folder}: transformers' {type(lm).__name__} has {len(found)} lists of layers; needed: one, whose layers "
            f"are of {', '.join(sorted(known)) or 'a class in _no_split_modules'}"
        )
    return found[0]


def _linears(layers: nn.ModuleList, place: str, kinds: LayerKinds) -> Iterator[LinearLayer]:
    """Yield every linear layer of the layers. place: the container's path."""
    states = {each.layer for each in kinds.states} - {each.layer for each in kinds.attention}
    for index, layer in enumerate(layers):
        mixtures = [name.rpartition(".")[0] for name, module in layer.named_modules() if stacked_experts(module)]
        for name, module in layer.named_modules():
            if type(module) is not nn.Linear:
                continue
            part = "other"
            if any(name.startswith(f"{each}.") for each in mixtures):
                part = "experts"
            elif re.search(_ATTENTION, name):
                part = "states" if index in states else "absorbed" if name.endswith(_ABSORBED) else "attention"
            elif re.search(_MLP, name):
                part = "mlp"
            yield LinearLayer(f"{place}.{index}.{name}", module.in_features, module.out_features, part)


def _sizes(lm: Any, layers: nn.ModuleList, kinds: LayerKinds, place: str, decoder: nn.Module) -> ModelSizes:
    config, held, attention = lm.config, tensors_of(lm), kinds.attention or _stated_attention(lm.config, len(layers))
    embedding, parameters = lm.get_input_embeddings(), {n: p for n, p in held.items() if _is_parameter(lm, n)}
    total = sum(p.numel() for p in parameters.values())

    def named(pattern: str) -> bool:
        return any(re.search(pattern, name) for name in parameters)

    stacks = [[p for module in layer.modules() for p in stacked_experts(module)] for layer in layers]
    experts = max((p.shape[0] for own in stacks for p in own), default=0)
    expert = sum(p.numel() for own in stacks for p in own)
    used = min(_chosen_experts(lm), experts)
    tied, rows = bool(config.tie_word_embeddings), embedding.weight.numel()
    idle = expert // experts * (experts - used) if experts else 0
    hidden = int(embedding.weight.shape[1])
    return ModelSizes(
        model_type=config.model_type,
        hidden=int(getattr(config, "hidden_size", hidden)),
        layers=len(layers),
        heads=max((each.heads for each in attention), default=0),
        kv_heads=max((each.kv_heads for each in attention), default=0),
        head_dim=max((each.dim for each in attention), default=0),
        intermediate=_largest(getattr(config, "intermediate_size", 0)),
        mlp_width=max(_mlp_width(layer, own, hidden, used) for layer, own in zip(layers, stacks)),
        vocab=int(embedding.weight.shape[0]),
        max_positions=longest(config),
        tied=tied,
        qkv_bias=named(r"\.(q|qkv|query|query_key_value)_?(proj)?\.bias$"),
        output_bias=named(r"\.(o_proj|out_proj|dense)\.bias$"),
        mlp_bias=named(rf"({_MLP}).*\.bias$"),
        qk_norm=named(r"\.(q|query)_(layer)?norm\.weight$"),
        experts=experts,
        experts_per_token=used,
        expert_intermediate=_largest(getattr(config, "moe_intermediate_size", None) or 0),
        norm_topk_prob=bool(getattr(config, "norm_topk_prob", False)),
        sparse_layers=sum(bool(own) for own in stacks),
        activation=str(getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", "silu")),
        parameters=total,
        active_parameters=total - idle - rows * (not tied),
        expert_parameters=expert,
        largest_layer=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
        embedding_parameters=rows,
        kv_values_per_token=sum(each.kv_heads * (each.dim + each.v_dim) for each in attention),
        linears=tuple(_linears(layers, place, kinds)),
        state_layers=len(kinds.states),
        one_sequence_a_row=kinds.one_sequence_a_row,
        dropout=tuple(key for key, _ in kinds.dropout),
        row_bytes=tuple(kept_of_rows(decoder, longest(config))) if kinds.one_sequence_a_row else (),
    )


def _stated_attention(config: Any, layers: int) -> tuple[AttentionKind, ...]:
    """Return the attention of a config, for a model without calls of attention to record."""
    heads = getattr(config, "num_attention_heads", 0) or 0
    if not heads:
        return ()
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = 1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None) or heads
    kind = AttentionKind(0, None, None, False, dim**-0.5, heads, kv_heads, dim, dim)
    return tuple(replace(kind, layer=layer) for layer in range(layers))


def _is_parameter(lm: Any, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return leaf in lm.get_submodule(owner)._parameters


def _chosen_experts(lm: Any) -> int:
    """Return the experts that a router chooses for a token."""
    of_routers = (getattr(module, "top_k", None) for module in lm.modules())
    stated = (*of_routers, *(getattr(lm.config, key, None) for key in _CHOSEN), 1)
    return next(each for each in stated if isinstance(each, int))


def _mlp_width(layer: nn.Module, stacks: list[nn.Parameter], hidden: int, used: int) -> int:
    """Return the rows of gate (and of up) that a token passes through: its experts' and the dense ones."""
    routed = sum(p.numel() // p.shape[0] for p in stacks) * used
    named = [(name, p) for name, p in layer.named_parameters() if p.ndim == 2 and re.search(_MLP, name)]
    # A gated MLP has three matrices. Routers do not count.
    dense = sum(p.numel() for name, p in named if not re.search(_ROUTER, name))
    return (routed + dense) // (3 * hidden)


def _largest(value: Any) -> int:
    return value if isinstance(value, int) else max(value, default=0) if isinstance(value, (list, tuple)) else 0


def longest(config: Any) -> int:
    """Return the longest sequence of a config, in tokens.

    llama3 and yarn have stretched max_position_embeddings already; linear stretches it by its factor. So do vLLM
    (`_get_and_verify_max_len`) and transformers (`_compute_yarn_parameters`) read it.
    """
    stated = next((int(value) for key in _LENGTHS if (value := getattr(config, key, None))), _ENDLESS)
    scale = getattr(config, "rope_parameters", None) or {}
    kind = scale.get("rope_type", "default") if isinstance(scale, dict) else "default"
    return int(stated * float(scale.get("factor") or 1)) if kind == "linear" else stated


def main(folder: Path) -> None:
    """Print the facts of a folder as JSON, or {"error": why there are none}."""
    try:
        print(json.dumps(load_facts(folder).to_json()))
    except ModelError as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
