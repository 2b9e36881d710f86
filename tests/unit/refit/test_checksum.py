"""Checksums: equal for equal bytes however they lie in memory, different for any bit that differs."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checksums import checksum, checksums

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.uint8, torch.bool]
ROW = 4096


def sum_by_hand(raw: bytes) -> int:
    """Return the checksum, computed with Python integers. Both ends of a refit, in any version, must get it."""
    words = [int.from_bytes(raw[start : start + 8], "little") for start in range(0, len(raw) // 8 * 8, 8)]
    words_in_rows = len(raw) // ROW * (ROW // 8)
    total = 0
    for row in range(len(raw) // ROW):
        row_sum = sum(words[row * (ROW // 8) : (row + 1) * (ROW // 8)]) % 2**64
        total += (row_sum ^ row_sum >> 32) * (2 * row + 3)
    total += sum(words[words_in_rows:]) * 1_000_003 + sum(raw[len(words) * 8 :]) * 1_000_003**2
    return (total + 2**63) % 2**64 - 2**63


def make_noise(size: int) -> torch.Tensor:
    """Return uint8 [size], the same everywhere: no two rows are equal, and words have either sign."""
    return torch.arange(size, dtype=torch.int64).mul(2654435761).bitwise_right_shift(13).remainder(256).to(torch.uint8)


SIZES = {
    "less than a word": [5],
    "words and a rest": [ROW - 1, 16, 4],
    "whole rows": [ROW, 7 * ROW],
    "rows and rests": [ROW + 8, 3 * ROW + 13, 2 * ROW + 1],
    "nothing between others": [0, 2 * ROW, 0, 13, ROW, 0],
    "many": [(n * 977) % (3 * ROW) for n in range(200)],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values_are_those_of_the_formula(sizes: list[int]) -> None:
    parts = [make_noise(size + 8 * number)[8 * number :] for number, size in enumerate(sizes)]
    assert checksums(parts).tolist() == [sum_by_hand(bytes(part.tolist())) for part in parts]


def test_values_are_fixed() -> None:
    parts = [
        make_noise(3 * ROW + 13),
        torch.arange(5000, dtype=torch.float32),
        torch.full((2, ROW), 255, dtype=torch.uint8),
    ]
    assert checksums(parts).tolist() == [154431913607686031, 3603853522832927970, -34359734280]


def test_values_do_not_depend_on_what_was_summed_before() -> None:
    first = [make_noise(2 * ROW), make_noise(13)]
    larger = [make_noise(9 * ROW + 5), make_noise(2 * ROW), make_noise(64 * ROW)]
    for parts in (first, larger, first):
        assert checksums(parts).tolist() == [sum_by_hand(bytes(part.tolist())) for part in parts]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_summed_over_its_bytes(dtype: torch.dtype) -> None:
    tensor = torch.arange(40).remainder(3).to(torch.float32).to(dtype)
    assert checksum(tensor) == checksum(tensor.clone())
    bits = tensor.view(torch.uint8).clone()
    bits[17] ^= 1
    assert checksum(bits.view(dtype)) != checksum(tensor)


def test_views_have_the_checksum_of_a_copy() -> None:
    base = torch.randn(8, 10)
    for view in (base.T, base[2:5], base[:, ::3], base[3, 7], base.view(4, 20), base.flatten()[1:]):
        assert checksum(view) == checksum(view.clone(memory_format=torch.contiguous_format))


@given(st.integers(0, 5 * ROW - 1), st.integers(0, 7), st.sampled_from([3 * ROW, 5 * ROW, 4 * ROW + 13]))
def test_any_flipped_bit_is_seen(place: int, bit: int, size: int) -> None:
    raw = torch.arange(size, dtype=torch.int64).mul(97).remainder(251).to(torch.uint8)
    flipped = raw.clone()
    flipped[place % size] ^= 1 << bit
    assert checksum(raw) != checksum(flipped)


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 63))
def test_rows_that_change_places_are_seen(row: int, other_row: int, bit: int) -> None:
    rows = torch.zeros(5, ROW // 8, dtype=torch.int64)
    # The highest bit is tried too, because doubling a word would lose this bit.
    rows[row, 0] = 1 << bit if bit < 63 else -(1 << 63)
    swapped = rows.clone()
    swapped[[row, other_row]] = rows[[other_row, row]]
    assert (checksum(rows) == checksum(swapped)) == (row == other_row)


def test_minus_zero_and_the_kinds_of_nan_differ() -> None:
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    quiet_nan = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    other_nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert checksum(quiet_nan) != checksum(other_nan)


def test_nothing_sums_to_zero_and_several_sums_are_the_single_ones() -> None:
    assert checksum(torch.empty(0)) == 0
    parts = [torch.randn(3), torch.randn(5000)]
    assert checksums(parts).tolist() == [checksum(part) for part in parts]
    assert checksums([]).tolist() == []


_ONE_KERNEL = """
import torch
from rlctl.refit.checksum import FACTOR, ROW, ChecksumTable, lay
from rlctl.refit.checksum_cuda import add_all, make_table

random = torch.Generator().manual_seed(0)
wide = torch.randn(300, 96, generator=random).bfloat16()
bytes_of = lambda size: torch.randint(0, 256, (size,), dtype=torch.uint8, generator=random)
tensors = [*map(bytes_of, (5, 4096, 1 << 17, 13, 0, 70001)), wide[:3], wide[10:200, 32:64], wide.float()[:, 2:6]]
totals = torch.zeros(len(tensors) + 2, dtype=torch.int64)
add_all(*make_table(tensors, ROW), totals, 1, ROW, FACTOR)
one_by_one = ChecksumTable(len(tensors), torch.device("cpu"))
for tensor in tensors:
    one_by_one.add(lay(tensor))
assert totals.tolist() == [0, *one_by_one.all().tolist(), 0]
assert make_table([wide[:, 1:3]], ROW) is None
"""


def test_one_kernel_sums_many_tensors_of_any_strides_as_they_are_summed_one_by_one() -> None:
    """Triton interprets the kernel on the host."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", _ONE_KERNEL], env=env, check=True)
