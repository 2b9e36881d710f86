"""Facts of a model's layers as plain data: attention, states, and the function between head and logits."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class LogitTransform:
    """Function from the head's output z to the logits: scale * z, then c * tanh(z / c) where softcap is c."""

    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class AttentionKind:
    """Arguments that one layer gives to attention; see `packed_attention`."""

    layer: int
    window: int | None
    softcap: float | None
    sinks: bool
    scale: float
    heads: int
    kv_heads: int
    dim: int
    v_dim: int


@dataclass(frozen=True)
class StateKind:
    """Functions of one layer that carry a state from token to token, see `state_layers.FUNCTIONS`."""

    layer: int
    functions: tuple[str, ...]


@dataclass(frozen=True)
class LinearLayer:
    """One linear layer of a decoder's layers."""

    # Name of its module in transformers.
    name: str
    inputs: int
    outputs: int
    # attention or mlp; of the others, the reason why they get no adapter, see `adapters`.
    part: str


@dataclass(frozen=True)
class LayerKinds:
    """Recorded kinds of all layers, in their order. A layer may have attention and states."""

    logits: LogitTransform
    attention: tuple[AttentionKind, ...]
    states: tuple[StateKind, ...]
    # Reason why a row of the batch can hold one sequence alone; None: sequences are packed.
    one_sequence_a_row: str | None
    # Rates above 0 of the config, by key. They are 0 in training: the engine samples without dropout.
    dropout: tuple[tuple[str, float], ...]


@cache
def is_installed(package: str) -> bool:
    """Return True if a package of kernels is importable. It is not imported."""
    return find_spec(package) is not None


@cache
def has_kernels() -> bool:
    """Return True if flash-linear-attention's kernels of states are importable.

    They are in the package fla-core. flash-linear-attention alone has a folder `fla` too, without them.
    """
    found = find_spec("fla")
    places = found.submodule_search_locations if found else None
    return any((Path(place) / "ops").is_dir() for place in places or ())


# Kinds of attention that two libraries may compute differently, by their name in a message.
_UNUSUAL: dict[str, Callable[[AttentionKind], bool]] = {
    "windows": lambda each: each.window is not None,
    "capped scores": lambda each: each.softcap is not None,
    "sinks": lambda each: each.sinks,
    "scores scaled by other than 1/sqrt(head size)": lambda each: abs(each.scale**2 * each.dim - 1) > 1e-3,
    "values of another size than keys": lambda each: each.v_dim != each.dim,
}


def unusual_parts(kinds: LayerKinds, experts: int) -> list[str]:
    """Return the parts of a model that two libraries may compute differently, in words. experts: of a layer."""
    logits = kinds.logits
    layers = {name: {each.layer for each in kinds.attention if holds(each)} for name, holds in _UNUSUAL.items()}
    layers["states"] = {each.layer for each in kinds.states}
    count = len({each.layer for each in kinds.attention} | layers["states"])
    return [
        *[f"logits scaled by {logits.scale:g}"] * (logits.scale != 1),
        *([] if logits.softcap is None else [f"logits capped at {logits.softcap:g}"]),
        *(f"{name} in {len(found)} of {count} layers" for name, found in layers.items() if found),
        *[f"{experts} experts"] * bool(experts),
        *[f"{key} {rate:g} in config.json" for key, rate in kinds.dropout],
    ]


def suspects(kinds: LayerKinds, experts: int, where: str = "on both sides") -> str:
    """Return a sentence for two sides whose log-probs differ: the parts of the model to look at first, and where."""
    unusual = ", ".join(unusual_parts(kinds, experts))
    return f"Look first, {where}, at {unusual or 'norms and rotary angles: the model has no unusual layers'}"
