"""A failing probe names the model's unusual parts: two libraries may compute them differently."""

import importlib
from pathlib import Path

import pytest

from rlctl.models.layer_kinds import (
    AttentionKind,
    LayerKinds,
    LogitTransform,
    StateKind,
    has_kernels,
    suspects,
    unusual_parts,
)

PLAIN = AttentionKind(
    layer=0, window=None, softcap=None, sinks=False, scale=32.0**-0.5, heads=4, kv_heads=2, dim=32, v_dim=32
)


def make_kinds(*attention: AttentionKind, states: tuple[StateKind, ...] = (), **further_parts: object) -> LayerKinds:
    parts = {"logits": LogitTransform(), "one_sequence_a_row": None, "dropout": (), **further_parts}
    return LayerKinds(attention=attention, states=states, **parts)  # type: ignore[arg-type]


def test_an_ordinary_model_has_none() -> None:
    assert unusual_parts(make_kinds(PLAIN, PLAIN), 0) == []
    message = "Look first, on both sides, at norms and rotary angles: the model has no unusual layers"
    assert suspects(make_kinds(PLAIN, PLAIN), 0) == message


def test_scale_window_states_and_experts_are_named_with_their_layers() -> None:
    unusual = AttentionKind(
        layer=1, window=8, softcap=50.0, sinks=True, scale=1.0, heads=4, kv_heads=2, dim=32, v_dim=16
    )
    delta = StateKind(2, ("torch_chunk_gated_delta_rule",))
    logits = LogitTransform(0.125, 30.0)
    kinds = make_kinds(PLAIN, unusual, states=(delta,), logits=logits, dropout=(("p", 0.1),))
    assert unusual_parts(kinds, 8) == [
        "logits scaled by 0.125",
        "logits capped at 30",
        "windows in 1 of 3 layers",
        "capped scores in 1 of 3 layers",
        "sinks in 1 of 3 layers",
        "scores scaled by other than 1/sqrt(head size) in 1 of 3 layers",
        "values of another size than keys in 1 of 3 layers",
        "states in 1 of 3 layers",
        "8 experts",
        "p 0.1 in config.json",
    ]
    assert suspects(make_kinds(PLAIN, states=(delta,)), 8, "in the engine") == (
        "Look first, in the engine, at states in 1 of 2 layers, 8 experts"
    )


def test_kernels_are_those_of_fla_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-linear-attention 0.6 alone has layers and models in the folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for part, is_installed in (("layers", False), ("ops", True)):
        (tmp_path / "fla" / part).mkdir(parents=True)
        importlib.invalidate_caches()
        has_kernels.cache_clear()
        assert has_kernels() is is_installed
    has_kernels.cache_clear()
