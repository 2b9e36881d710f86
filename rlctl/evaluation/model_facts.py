"""Lines of text on a model: its parts, the tensors that are trained, sent and kept, and its tokens."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import isclose
from typing import Any

from rlctl.dashboard.formats import count
from rlctl.data.chat import Chat
from rlctl.models.adapters import AdapterSpec
from rlctl.models.facts import ModelFacts
from rlctl.models.layer_kinds import AttentionKind, LogitTransform

# Most names that a line lists. For more names a line has their number and the first name.
_NAMED = 3


@dataclass(frozen=True)
class Finding:
    """One line of a check."""

    # Word at the beginning of the line; empty for a further line on the same subject.
    subject: str
    text: str
    # True if the check passed; None for a fact without a judgement.
    holds: bool | None = None
    # Measured numbers by name.
    figures: dict[str, float] = field(default_factory=dict)


def describe(facts: ModelFacts, adapters: AdapterSpec | None = None) -> Iterator[Finding]:
    """Yield one line for each part of a model. adapters: if given, only these are trained and sent."""
    sizes = facts.sizes
    kinds = facts.kinds
    model = f"{facts.architecture}, {count(sizes.layers, 'layer')}, {_short_number(sizes.parameters)} parameters"
    model += f", {_short_number(sizes.active_parameters)} of them for a token" if sizes.experts else ""
    yield Finding("model", f"{model}; vocabulary {sizes.vocab:,}, sequences up to {sizes.max_positions:,} tokens")
    attention = Counter(_describe_attention(kind) for kind in kinds.attention)
    lines = [f"{count(number, 'layer')} {text}" for text, number in attention.items()]
    yield Finding("attention", "; ".join(lines) or ("transformers' own" if sizes.heads else "none"))
    if kinds.states:
        functions = sorted(set(chain.from_iterable(kind.functions for kind in kinds.states)))
        when = "" if sizes.one_sequence_a_row else ", restarted at each sequence of a pack"
        yield Finding("states", f"{count(len(kinds.states), 'layer')}{when}: {', '.join(functions)}")
    if sizes.one_sequence_a_row:
        yield Finding("rows", f"one sequence each, padded, without kernels for packs: {sizes.one_sequence_a_row}")
    if sizes.experts:
        where = f"{sizes.experts_per_token} of {sizes.experts} in {count(sizes.sparse_layers, 'layer')}"
        yield Finding("experts", f"{where}, {_short_number(sizes.expert_parameters)} parameters")
    yield Finding("output", _describe_output(kinds.logits, tied=sizes.tied, has_bias=facts.head_bias))
    if kinds.dropout:
        rates = ", ".join(f"{key} {rate:g}" for key, rate in kinds.dropout)
        yield Finding("dropout", f"off in training, since engines have none: config.json has {rates}")
    if adapters:
        names = ", ".join(dict.fromkeys(target.name.rpartition(".")[2] for target in adapters.targets))
        layers = count(len(adapters.targets), "linear layer")
        yield Finding("adapter", f"rank {adapters.rank}, scale {adapters.scale:g}, {layers}: {names}")
        yield Finding("trained", f"its {_short_number(adapters.parameters)} parameters, over frozen ones")
        yield Finding("sent", "its parameters")
        return
    float32 = f", {_short_list(facts.float32)} always in float32" if facts.float32 else ""
    yield Finding("trained", f"all {_short_number(sizes.parameters)} parameters{float32}")
    buffers = f", and {_short_list(facts.buffers)}, which training leaves alone" if facts.buffers else ""
    yield Finding("sent", f"all parameters{buffers}")
    if facts.kept:
        yield Finding("kept", f"unread, for the export: {_short_list(facts.kept)}")


def describe_tokens(chat: Chat, vocab: int) -> Iterator[Finding]:
    """Yield one line for the tokenizer, and one for each of its warnings. vocab: size of the model's vocabulary.

    Raises DataError.
    """
    tokens = len(chat.tokenizer)
    ends = chat.ends
    unused = f"; {vocab - tokens:,} rows of the vocabulary have none" if tokens < vocab else ""
    yield Finding("tokens", f"{tokens:,}{unused}; an answer ends with {ends}")
    yield from (Finding("", warning) for warning in ends.warnings)


def _describe_attention(kind: AttentionKind) -> str:
    """Describe a layer's attention in words. Usual properties are left out."""
    shared = f" over {kind.kv_heads} of keys" if kind.kv_heads != kind.heads else ""
    parts = [f"with {kind.heads} heads of {kind.dim}{shared}"]
    if kind.v_dim != kind.dim:
        parts.append(f"values of {kind.v_dim}")
    if kind.window is not None:
        parts.append(f"the last {kind.window:,} tokens")
    if kind.softcap:
        parts.append(f"softcap {kind.softcap:g}")
    if kind.sinks:
        parts.append("sinks")
    if not isclose(kind.scale, kind.dim**-0.5, rel_tol=1e-6):
        parts.append(f"scores times {kind.scale:.4g}")
    return ", ".join(parts)


def _describe_output(logits: LogitTransform, tied: bool, has_bias: bool) -> str:
    """Describe the output matrix and the change of its logits in words. Usual properties are left out."""
    text = "shares the embedding's weight" if tied else "has a weight of its own"
    text += " and a bias" if has_bias else ""
    text += f"; logits times {logits.scale:g}" if logits.scale != 1.0 else ""
    text += f"; logits capped at {logits.softcap:g}" if logits.softcap else ""
    return text


def _short_list(names: tuple[str, ...]) -> str:
    """Return at most `_NAMED` names, or else the number of names and the first one."""
    if len(names) <= _NAMED:
        return ", ".join(names)
    return f"{len(names)} tensors ({names[0]} and others)"


def _short_number(value: Any) -> str:
    """Return a number of parameters as text in thousands, millions or billions."""
    for size, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    return str(value)
