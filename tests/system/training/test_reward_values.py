"""A packed reward model gives transformers' score of each sequence: alone, padded left or right, in any batch."""

from pathlib import Path

import numpy as np
import pytest

from rlctl.training.micro_batching import TrainingSample
from tests.system.training.scenario import open_trainer
from tests.value_models import class_values, make_reward_model

LENGTHS = (2, 3, 17, 40, 64, 5, 31)


def make_samples(folder: Path) -> list[TrainingSample]:
    draws = np.random.default_rng(1)
    rows = [draws.integers(3, 64, length).astype(np.int32) for length in LENGTHS]
    return [TrainingSample(row, np.arange(len(row)) == len(row) - 1) for row in rows]


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("llama", marks=pytest.mark.long)])
def test_a_score_depends_on_its_own_sequence_alone(kind: str, tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "m", kind, seed=2)
    samples = make_samples(folder)
    with open_trainer(folder, tmp_path) as trainer:
        compositions = [[samples], [[sample] for sample in samples], [samples[4:], samples[2:4], samples[:2]]]
        scores = []
        for micro_batches in compositions:
            rows = zip(
                [sample for micro_batch in micro_batches for sample in micro_batch],
                [row for rows in trainer.values(micro_batches) for row in rows],
                strict=True,
            )
            by_length = {len(sample): float(row[-1]) for sample, row in rows}
            scores.append([by_length[length] for length in LENGTHS])
    sequences = [sample.tokens.tolist() for sample in samples]
    for side in ("alone", "left", "right"):
        expected = class_values(folder, sequences, side=side)
        for composition in scores:
            np.testing.assert_allclose(composition, expected, rtol=1e-5, atol=1e-5, err_msg=side)
