"""Checksums: equal for equal bytes however they lie in memory, different for any bit or order that differs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlctl.refit.checksum import checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.uint8, torch.bool]
CHUNK = 1 << 20


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_summed_over_its_bytes(dtype: torch.dtype) -> None:
    tensor = torch.arange(40).remainder(3).to(torch.float32).to(dtype)
    assert checksum(tensor) == checksum(tensor.clone())
    assert checksum(tensor) != checksum(torch.cat([tensor[1:], tensor[:1]]))
    bits = tensor.view(torch.uint8).clone()
    bits[17] ^= 1
    assert checksum(bits.view(dtype)) != checksum(tensor)


def test_views_have_the_checksum_of_a_copy() -> None:
    base = torch.randn(8, 10)
    for view in (base.T, base[2:5], base[:, ::3], base[3, 7], base.view(4, 20)):
        assert checksum(view) == checksum(view.clone(memory_format=torch.contiguous_format))
    assert checksum(base.T) != checksum(base)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=20), st.data())
def test_two_elements_that_change_places_are_seen(values: list[int], data: st.DataObject) -> None:
    places = st.integers(0, len(values) - 1)
    one, other = data.draw(places), data.draw(places)
    swapped = list(values)
    swapped[one], swapped[other] = values[other], values[one]
    sums = [checksum(torch.tensor(row, dtype=torch.int32)) for row in (values, swapped)]
    assert (sums[0] == sums[1]) == (values == swapped)


def test_minus_zero_and_the_kinds_of_nan_differ() -> None:
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert checksum(quiet) != checksum(other)


def test_the_chunks_of_a_large_tensor_have_an_order_too() -> None:
    tensor = torch.zeros(2 * CHUNK + 3, dtype=torch.uint8)
    sums = set()
    for place in (0, CHUNK, 2 * CHUNK):
        marked = tensor.clone()
        marked[place] = 1
        sums.add(checksum(marked))
    assert len(sums) == 3


def test_nothing_sums_to_zero() -> None:
    assert checksum(torch.empty(0)) == 0
