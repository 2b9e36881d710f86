"""Throughputs computed from synthetic times have the denominators that their docstrings name."""

import pytest

from rlctl.telemetry.throughput import (
    PEAK_FLOPS,
    TrainingFlops,
    effective,
    generation_only,
    idle_share,
    length_of_a_token,
    mfu,
    peak_flops,
    split,
    training_only,
)

TIMES = {
    "time/generation": 4.0,
    "time/train": 2.0,
    "time/refit": 1.0,
    "time/other": 1.0,
    "time/validation": 10.0,
    "time/checkpoint": 2.0,
    "time/step": 20.0,
}


def test_effective_counts_trained_tokens_and_all_devices_but_neither_validation_nor_checkpoint() -> None:
    assert effective(4000, TIMES, devices=5) == 4000 / 8.0 / 5


def test_training_only_divides_by_the_time_of_training_and_the_trainers_devices() -> None:
    assert training_only(4000, TIMES, devices=2) == 4000 / 2.0 / 2


def test_generation_only_divides_by_the_time_of_generation_and_the_generators_devices() -> None:
    assert generation_only(3000, TIMES, devices=3) == 3000 / 4.0 / 3


def test_no_time_is_no_throughput() -> None:
    assert training_only(100, {"time/step": 1.0}, devices=1) == 0.0
    assert effective(2, {"time/step": 0.0}, devices=1) == 0.0


def test_flops_a_token_are_those_of_palm_appendix_b() -> None:
    flops = TrainingFlops(8_000, ((16, None), (16, None)))
    assert flops.per_token(10) == flops.full_per_token(10) == 6 * 8_000 + 12 * 2 * 16 * 10


def test_a_frozen_weight_costs_4_and_an_adapters_6() -> None:
    flops = TrainingFlops(8_000, ((16, None),), adapters=50)
    assert flops.per_token(10) == 4 * 8_000 + 6 * 50 + 12 * 16 * 10
    assert flops.full_per_token(10) == 6 * 8_050 + 12 * 16 * 10


def test_a_run_with_adapters_records_both_shares() -> None:
    all_weights = TrainingFlops(10**9, ())
    with_adapters = TrainingFlops(10**9, (), 10**6)
    assert all_weights.metrics(1000, 10, "cpu") == with_adapters.metrics(1000, 10, "cpu") == {}
    assert all_weights.metrics(1000, 10, "NVIDIA H100") == {"throughput/mfu": pytest.approx(6e12 / PEAK_FLOPS["H100"])}
    assert with_adapters.metrics(1000, 10, "NVIDIA H100") == {
        "throughput/mfu": pytest.approx(4.006e12 / PEAK_FLOPS["H100"]),
        "throughput/mfu_6n": pytest.approx(6.006e12 / PEAK_FLOPS["H100"]),
    }


def test_a_window_ends_the_attention_that_is_counted() -> None:
    assert TrainingFlops(0, ((16.0, None), (16.0, 4), (16.0, 40))).per_token(10) == 12 * 16 * (10 + 4 + 10)


def test_a_token_is_more_often_in_a_long_sequence() -> None:
    assert length_of_a_token([10, 10]) == 10
    assert length_of_a_token([1, 9]) == pytest.approx(0.1 * 1 + 0.9 * 9)
    assert length_of_a_token([]) == 0


def test_mfu_is_the_share_of_the_devices_peak() -> None:
    assert mfu(1000.0, 989.4e12 / 2000, "NVIDIA H200") == pytest.approx(0.5)
    assert mfu(1000.0, 312e9, "NVIDIA A100-SXM4-80GB") == pytest.approx(1.0)


def test_there_is_no_mfu_without_a_known_peak() -> None:
    assert mfu(1000.0, 1e9, "cpu") is None


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GB200", None),
        ("NVIDIA A10", None),
    ],
)
def test_a_peak_is_that_of_the_very_device(device: str, peak: float | None) -> None:
    assert peak_flops(device) == peak


def test_idle_is_what_a_side_did_not_work_in_of_the_productive_time() -> None:
    assert idle_share(TIMES, ("train", "refit")) == pytest.approx(1 - 3 / 8)
    assert idle_share(TIMES, ("generation",)) == pytest.approx(0.5)
    assert idle_share({"time/step": 0.0}, ("train",)) == 0.0


def test_the_split_of_several_steps_is_of_their_whole_wall_time() -> None:
    steps = [{"time/a": 1.0, "time/b": 3.0, "time/step": 4.0}, {"time/a": 5.0, "time/b": 1.0, "time/step": 6.0}]
    assert split(steps) == [("a", 0.6), ("b", 0.4)]
