"""Kinds of a model's layers as plain data: attention, states, and the function from the head's output to the logits."""

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
    """Arguments of one layer's attention call; see `packed_attention`."""

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
    """Names of one layer's functions that carry a state from token to token, see `state_layers.FUNCTIONS`."""

    layer: int
    functions: tuple[str, ...]


@dataclass(frozen=True)
class LinearLayer:
    """One linear layer (matrix) inside a decoder's layers."""

    # Path of the module in transformers.
    name: str
    inputs: int
    outputs: int
    # attention or mlp; else a part that gets no adapter, see `adapters._REFUSED_PARTS`.
    part: str


@dataclass(frozen=True)
class LayerKinds:
    """Observed kinds of all layers, in order. A layer may have both attention and states."""

    logits: LogitTransform
    attention: tuple[AttentionKind, ...]
    states: tuple[StateKind, ...]
    # Reason why sequences cannot be packed into one row; None: they are packed.
    one_sequence_a_row: str | None
    # (key, rate) of each dropout rate above 0 in the config. Training sets them to 0, because engines sample without
    # dropout.
    dropout: tuple[tuple[str, float], ...]


@cache
def is_installed(package: str) -> bool:
    """Return True if a package of kernels can be imported, without importing it."""
    return find_spec(package) is not None


@cache
def has_kernels() -> bool:
    """Return True if flash-linear-attention's kernels for state layers can be imported.

    They are in the package fla-core. The package flash-linear-attention also has a folder `fla`, but no kernels.
    """
    spec = find_spec("fla")
    folders = spec.submodule_search_locations if spec else None
    return any((Path(folder) / "ops").is_dir() for folder in folders or ())


# Name in a message -> test for a kind of attention that two libraries may compute differently.
_UNUSUAL: dict[str, Callable[[AttentionKind], bool]] = {
    "windows": lambda kind: kind.window is not None,
    "capped scores": lambda kind: kind.softcap is not None,
    "sinks": lambda kind: kind.sinks,
    "scores scaled by other than 1/sqrt(head size)": lambda kind: abs(kind.scale**2 * kind.dim - 1) > 1e-3,
    "values of another size than keys": lambda kind: kind.v_dim != kind.dim,
}


def unusual_parts(kinds: LayerKinds, experts: int) -> list[str]:
    """Return descriptions of the parts of a model that two libraries may compute differently. experts: number per
    layer.
    """
    logits = kinds.logits
    unusual_layers: dict[str, set[int]] = {}
    for name, holds in _UNUSUAL.items():
        unusual_layers[name] = {kind.layer for kind in kinds.attention if holds(kind)}
    unusual_layers["states"] = {kind.layer for kind in kinds.states}
    layer_count = len({kind.layer for kind in kinds.attention} | unusual_layers["states"])
    parts = []
    if logits.scale != 1:
        parts.append(f"logits scaled by {logits.scale:g}")
    if logits.softcap is not None:
        parts.append(f"logits capped at {logits.softcap:g}")
    parts += [f"{name} in {len(layers)} of {layer_count} layers" for name, layers in unusual_layers.items() if layers]
    if experts:
        parts.append(f"{experts} experts")
    parts += [f"{key} {rate:g} in config.json" for key, rate in kinds.dropout]
    return parts


def suspects(kinds: LayerKinds, experts: int, where: str = "on both sides") -> str:
    """Return advice for log-probs that differ between trainer and engine: the parts of the model to check first."""
    unusual = ", ".join(unusual_parts(kinds, experts))
    return f"Look first, {where}, at {unusual or 'norms and rotary angles: the model has no unusual layers'}"
