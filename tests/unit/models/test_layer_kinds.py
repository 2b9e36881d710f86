"""A probe that fails names the parts of the model that two libraries may compute differently."""

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

PLAIN = AttentionKind(0, None, None, False, 32.0**-0.5, 4, 2, 32, 32)


def kinds(*attention: AttentionKind, states: tuple[StateKind, ...] = (), **others: object) -> LayerKinds:
    parts = {"logits": LogitTransform(), "one_sequence_a_row": None, "dropout": (), **others}
    return LayerKinds(attention=attention, states=states, **parts)  # type: ignore[arg-type]


def test_an_ordinary_model_has_none() -> None:
    assert unusual_parts(kinds(PLAIN, PLAIN), 0) == []
    said = "Look first, on both sides, at norms and rotary angles: the model has no unusual layers"
    assert suspects(kinds(PLAIN, PLAIN), 0) == said


def test_scale_window_states_and_experts_are_named_with_their_layers() -> None:
    window = AttentionKind(1, 8, 50.0, True, 1.0, 4, 2, 32, 16)
    delta = StateKind(2, ("torch_chunk_gated_delta_rule",))
    found = unusual_parts(
        kinds(PLAIN, window, states=(delta,), logits=LogitTransform(0.125, 30.0), dropout=(("p", 0.1),)), 8
    )
    assert found == [
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
    assert suspects(kinds(PLAIN, states=(delta,)), 8, "in the engine") == (
        "Look first, in the engine, at states in 1 of 2 layers, 8 experts"
    )


def test_kernels_are_those_of_fla_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-linear-attention 0.6 alone has layers and models in the folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for part, found in (("layers", False), ("ops", True)):
        (tmp_path / "fla" / part).mkdir(parents=True)
        importlib.invalidate_caches()
        has_kernels.cache_clear()
        assert has_kernels() is found
    has_kernels.cache_clear()
