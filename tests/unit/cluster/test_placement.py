"""Which device each part stands on."""

import pytest

from rlctl.cluster.placement import place


def test_on_a_cpu_everything_shares_the_one_machine() -> None:
    placement = place(0, ranks=2, engines=3, tensor_parallel_size=1, colocated=False)
    assert (placement.device, placement.shared) == ("cpu", True)
    assert (len(placement.trainers), len(placement.engines)) == (2, 3)
    assert (placement.trainer_devices, placement.generator_devices, placement.all_devices) == (1, 1, 1)


def test_colocated_engines_take_the_trainers_devices() -> None:
    placement = place(4, ranks=4, engines=2, tensor_parallel_size=2, colocated=True)
    assert placement.trainers == [[0], [1], [2], [3]]
    assert placement.engines == [[0, 1], [2, 3]]
    assert (placement.shared, placement.all_devices) == (True, 4)


def test_engines_apart_stand_behind_the_trainers() -> None:
    placement = place(8, ranks=4, engines=2, tensor_parallel_size=2, colocated=False)
    assert placement.engines == [[4, 5], [6, 7]]
    assert (placement.trainer_devices, placement.generator_devices, placement.all_devices) == (4, 4, 8)


def test_too_few_devices_are_an_error_with_the_arithmetic() -> None:
    with pytest.raises(ValueError, match=r"6 GPUs needed, apart for 2 trainer ranks and 2 engines x 2 .* has 4"):
        place(4, ranks=2, engines=2, tensor_parallel_size=2, colocated=False)
