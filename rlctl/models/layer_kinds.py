"""Facts of a model's layers as plain data: attention, states, and the function between head and logits."""

from dataclasses import dataclass


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
class LayerKinds:
    """Recorded kinds of all layers, in their order. A layer may have attention and states."""

    logits: LogitTransform
    attention: tuple[AttentionKind, ...]
    states: tuple[StateKind, ...]
    # Reason why a row of the batch can hold one sequence alone; None: sequences are packed.
    one_sequence_a_row: str | None
    # Rates above 0 of the config, by key. They are 0 in training: the engine samples without dropout.
    dropout: tuple[tuple[str, float], ...]
