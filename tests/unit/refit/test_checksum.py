"""Checksums: equal for equal bytes however they lie in memory, different for any bit that differs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlctl.refit.checksum import checksum, checksums

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.uint8, torch.bool]
ROW = 4096


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
def test_rows_that_change_places_are_seen(one: int, other: int, bit: int) -> None:
    rows = torch.zeros(5, ROW // 8, dtype=torch.int64)
    # The highest bit too: twice it is nothing.
    rows[one, 0] = 1 << bit if bit < 63 else -(1 << 63)
    swapped = rows.clone()
    swapped[[one, other]] = rows[[other, one]]
    assert (checksum(rows) == checksum(swapped)) == (one == other)


def test_minus_zero_and_the_kinds_of_nan_differ() -> None:
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert checksum(quiet) != checksum(other)


def test_nothing_sums_to_zero_and_several_sums_are_the_single_ones() -> None:
    assert checksum(torch.empty(0)) == 0
    parts = [torch.randn(3), torch.randn(5000)]
    assert checksums(parts).tolist() == [checksum(part) for part in parts]
    assert checksums([]).tolist() == []
