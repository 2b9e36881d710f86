"""`rlctl model check` in bfloat16: a model that rounds is proven, one that computes something else is refused."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlctl.evaluation.model_check import (
    CheckedTrainer,
    as_transformers,
    checked_sequences,
    checked_trainer,
    packed_alone,
)
from rlctl.evaluation.settings import checked_run
from rlctl.evaluation.target import find_target
from tests.zoo import VOCAB, make_family

# A key of config.json with a value that is a little wrong.
WRONG: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 0.251},
    "gemma2": {"final_logit_softcapping": 5.5},
    "mistral": {"sliding_window": 9},
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 9500.0}},
    "qwen3_moe": {"num_experts_per_tok": 1},
}


def changed(folder: Path, keys: dict[str, Any]) -> Path:
    """Copy a folder with other values of keys that its config.json has."""
    other = shutil.copytree(folder, folder.with_name("other"))
    config = json.loads((other / "config.json").read_text())
    assert config.keys() >= keys.keys()
    (other / "config.json").write_text(json.dumps(config | keys))
    return other


@contextmanager
def in_bfloat16(folder: Path, scratch: Path) -> Iterator[CheckedTrainer]:
    run, files, _ = checked_run(find_target(str(folder), scratch), scratch)
    with checked_trainer(replace(run.trainer, dtype="bfloat16"), files.folder, "cpu", scratch) as trainer:
        yield trainer


@pytest.mark.long  # the one below shows both mechanisms
@pytest.mark.parametrize("name", WRONG)
def test_rounding_is_proven_and_a_wrong_key_refused(name: str, tmp_path: Path) -> None:
    folder = make_family(tmp_path / name, name)
    other = changed(folder, WRONG[name])
    with in_bfloat16(folder, tmp_path) as trainer:
        sequences = checked_sequences(trainer, VOCAB, 72)
        for found in packed_alone(trainer, sequences, tmp_path / "state"):
            assert found.holds, found.text
        right, wrong = (as_transformers(trainer, str(each), "cpu", sequences) for each in (folder, other))
        assert right.holds, right.text
        assert wrong.holds is False and right.figures["transformers_diff"] < 1e-4


def test_a_wrong_key_and_kernels_that_are_wrong_in_bfloat16_alone_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_family(tmp_path / "granite", "granite")
    other = changed(folder, {"attention_multiplier": 0.09})
    with in_bfloat16(folder, tmp_path) as trainer:
        sequences = checked_sequences(trainer, VOCAB, 24)
        found = [as_transformers(trainer, str(each), "cpu", sequences).holds for each in (folder, other)]
        assert found == [True, False]
        right = trainer.log_probs

        def leaking(sequences: Any, *, packed: bool = True) -> Any:
            """Every token sees the sequence before its own, as a bound of a pack that is lost has it."""
            if not packed:
                return right(sequences, packed=False)
            return np.split(right([np.concatenate(sequences)])[0], np.cumsum([len(each) for each in sequences])[:-1])

        monkeypatch.setattr(trainer, "log_probs", leaking)
        leaked = next(iter(packed_alone(trainer, sequences, tmp_path / "state")))
        assert leaked.holds is False and leaked.figures["max_abs_diff"] < 1e-4
