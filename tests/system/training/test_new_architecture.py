"""A row makes an architecture: one that rlctl does not train is added to the table, and then it does.

Mistral without its window, which transformers, vLLM and Megatron's layers know, rlctl does not.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlctl.config.errors import ModelError
from rlctl.models.architectures import ARCHITECTURES
from rlctl.models.hf_folder import WeightFiles
from rlctl.models.model_sizes import read_sizes
from rlctl.preflight.backend import backend_of
from tests.system.training.scenario import (
    CONFIG,
    WeightedLoss,
    assert_close,
    plain_log_probs,
    sequences,
    totals,
    trainer,
)
from tests.system.training.scenario import weights as weights_of
from tests.tiny_models import MISTRAL, make_model

DATA = sequences(6)


def test_a_row_is_all_that_an_architecture_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    with monkeypatch.context() as added:
        added.setitem(ARCHITECTURES, "mistral", MISTRAL)
        folder = make_model(tmp_path / "model", "mistral")
    with pytest.raises(ModelError, match=r"model_type mistral in .*: must be one of llama, qwen2, qwen3, qwen3_moe"):
        read_sizes(folder / "config.json")
    monkeypatch.setitem(ARCHITECTURES, "mistral", MISTRAL)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    assert read_sizes(folder / "config.json").parameters == sum(p.numel() for p in lm.parameters())
    expected = [plain_log_probs(lm, sequence)[0].detach().numpy() for sequence in DATA]
    updates, weights = [], []
    for backend in ("fsdp", "megatron"):
        if backend == "megatron":
            pytest.importorskip("megatron.core")
        (tmp_path / backend).mkdir()
        with trainer(folder, tmp_path / backend, backend=backend) as one:
            for got, want in zip(one.log_probs([DATA])[0], expected, strict=True):
                np.testing.assert_allclose(got[1:], want, atol=1e-5)
            one.export_folder(tmp_path / backend / "out")
            out, source = WeightFiles(tmp_path / backend / "out"), WeightFiles(folder)
            assert sorted(out.names()) == sorted(source.names())
            assert all(torch.equal(out.tensor(name), source.tensor(name)) for name in source.names())
            updates.append(one.train([DATA], WeightedLoss(), totals(DATA)))
            weights.append(weights_of(one))
    assert_close(updates[1], updates[0], atol=1e-4)
    assert_close(weights[1], weights[0], atol=1e-4)


def test_a_row_may_be_for_fsdp_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "mistral", replace(MISTRAL, megatron=False))
    folder = make_model(tmp_path / "model", "mistral")
    sizes, what = read_sizes(folder / "config.json"), "megatron has no layers of a mistral"
    checked = {name: replace(CONFIG, backend=name) for name in ("fsdp", "megatron")}
    found = {name: [each.what for each in backend_of(one).check_model(one, sizes)] for name, one in checked.items()}
    assert found == {"fsdp": [], "megatron": [f"{what}; use trainer.backend=fsdp"]}
    with pytest.raises(ValueError, match=what), trainer(folder, tmp_path, backend="megatron"):
        pass
