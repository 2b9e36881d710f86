"""A row's own teacher computes its column, each teacher once a step, and the order of the rows stays."""

import numpy as np

from rlctl.grpo.columns import score_by_models
from rlctl.training.micro_batching import TrainingSample


def make_sample(length: int) -> TrainingSample:
    return TrainingSample(np.arange(length, dtype=np.int32), np.ones(length, np.bool_))


def test_each_sample_is_scored_by_its_own_model_in_one_call_a_model() -> None:
    samples = [make_sample(length) for length in (3, 4, 5, 6)]
    calls: list[tuple[str, list[int]]] = []

    def score(asked: object, model: str) -> list[np.ndarray]:
        lengths = [len(sample) for sample in asked]  # type: ignore[attr-defined]
        calls.append((model, lengths))
        return [np.full(length, {"teachers.a": 1.0, "teachers.b": 2.0}[model], np.float32) for length in lengths]

    rows = score_by_models(samples, ["teachers.b", "teachers.a", "teachers.b", "teachers.a"], score)
    assert calls == [("teachers.b", [3, 5]), ("teachers.a", [4, 6])]
    assert [(len(row), row[0]) for row in rows] == [(3, 2.0), (4, 1.0), (5, 2.0), (6, 1.0)]
