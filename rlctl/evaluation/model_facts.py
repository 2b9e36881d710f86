"""Facts of a model in lines for a reader: its parts, its tensors that are trained, sent and kept, its tokens."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isclose
from typing import Any

from rlctl.dashboard.formats import count
from rlctl.data.chat import Chat
from rlctl.models.adapters import AdapterSpec
from rlctl.models.facts import ModelFacts
from rlctl.models.layer_kinds import AttentionKind, LogitTransform

# Names that a line lists; of more only the number is said.
_NAMED = 3


@dataclass(frozen=True)
class Finding:
    """One line of a check."""

    subject: str
    text: str
    # None: a fact, not judged.
    holds: bool | None = None
    figures: dict[str, float] = field(default_factory=dict)


def describe(facts: ModelFacts, adapters: AdapterSpec | None = None) -> Iterator[Finding]:
    """Yield a line for each part of a model. adapters: those that alone are trained and sent."""
    sizes, kinds = facts.sizes, facts.kinds
    what = f"{facts.causal_lm}, {count(sizes.layers, 'layer')}, {_number(sizes.parameters)} parameters"
    what += f", {_number(sizes.active_parameters)} of them for a token" if sizes.experts else ""
    yield Finding("model", f"{what}; vocabulary {sizes.vocab:,}, sequences up to {sizes.max_positions:,} tokens")
    attention = Counter(_attention(each) for each in kinds.attention)
    lines = [f"{count(number, 'layer')} {what}" for what, number in attention.items()]
    yield Finding("attention", "; ".join(lines) or ("transformers' own" if sizes.heads else "none"))
    if kinds.states:
        names = ", ".join(sorted({name for each in kinds.states for name in each.functions}))
        when = "" if sizes.one_sequence_a_row else ", restarted at each sequence of a pack"
        yield Finding("states", f"{count(len(kinds.states), 'layer')}{when}: {names}")
    if sizes.one_sequence_a_row:
        yield Finding("rows", f"one sequence each, padded, without kernels for packs: {sizes.one_sequence_a_row}")
    if sizes.experts:
        where = f"{sizes.experts_per_token} of {sizes.experts} in {count(sizes.sparse_layers, 'layer')}"
        yield Finding("experts", f"{where}, {_number(sizes.expert_parameters)} parameters")
    yield Finding("output", _output(kinds.logits, sizes.tied, facts.head_bias))
    if kinds.dropout:
        rates = ", ".join(f"{key} {rate:g}" for key, rate in kinds.dropout)
        yield Finding("dropout", f"off in training, since engines have none: config.json has {rates}")
    if adapters:
        names = ", ".join(dict.fromkeys(each.name.rpartition(".")[2] for each in adapters.targets))
        what = (
            f"rank {adapters.rank}, scale {adapters.scale:g}, {count(len(adapters.targets), 'linear layer')}: {names}"
        )
        yield Finding("adapter", what)
        yield Finding("trained", f"its {_number(adapters.parameters)} parameters, over frozen ones")
        yield Finding("sent", "its parameters")
        return
    kept32 = f", {_short_list(facts.float32)} always in float32" if facts.float32 else ""
    yield Finding("trained", f"all {_number(sizes.parameters)} parameters{kept32}")
    buffers = f", and {_short_list(facts.buffers)}, which training leaves alone" if facts.buffers else ""
    yield Finding("sent", f"all parameters{buffers}")
    if facts.kept:
        yield Finding("kept", f"unread, for the export: {_short_list(facts.kept)}")


def describe_tokens(chat: Chat, vocab: int) -> Iterator[Finding]:
    """Yield a line for the tokenizer, and one for each of its warnings. Raises DataError."""
    tokens, ends = len(chat.tokenizer), chat.ends
    unused = f"; {vocab - tokens:,} rows of the vocabulary have none" * (tokens < vocab)
    yield Finding("tokens", f"{tokens:,}{unused}; an answer ends with {ends}")
    yield from (Finding("", warning) for warning in ends.warnings)


def _attention(kind: AttentionKind) -> str:
    """Return a layer's attention in words, without what is usual."""
    shared = f" over {kind.kv_heads} of keys" if kind.kv_heads != kind.heads else ""
    parts = [f"with {kind.heads} heads of {kind.dim}{shared}"]
    parts += [f"values of {kind.v_dim}"] * (kind.v_dim != kind.dim)
    parts += [f"the last {kind.window:,} tokens"] if kind.window is not None else []
    parts += [f"softcap {kind.softcap:g}"] if kind.softcap else []
    parts += ["sinks"] * kind.sinks
    parts += [f"scores times {kind.scale:.4g}"] * (not isclose(kind.scale, kind.dim**-0.5, rel_tol=1e-6))
    return ", ".join(parts)


def _output(logits: LogitTransform, tied: bool, bias: bool) -> str:
    parts = ["shares the embedding's weight" if tied else "has a weight of its own", *["and a bias"] * bias]
    parts += [f"; logits times {logits.scale:g}"] * (logits.scale != 1.0)
    parts += [f"; logits capped at {logits.softcap:g}"] if logits.softcap else []
    return " ".join(parts).replace(" ;", ";")


def _short_list(names: tuple[str, ...]) -> str:
    """Return some names, or their number and the first."""
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{len(names)} tensors ({names[0]} and others)"


def _number(value: Any) -> str:
    """Return a number of parameters in thousands, millions or billions."""
    for size, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    return str(value)
