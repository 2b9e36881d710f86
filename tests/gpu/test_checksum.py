"""Checksums on a device: equal to the host's, without a wait of the host, for any sizes and on any stream."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.gpu


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def put(part: "Tensor", first: int) -> "Tensor":
    import torch

    memory = torch.zeros(first + part.numel(), dtype=torch.uint8, device="cuda")
    memory[first:].copy_(part)
    return memory[first:]


@pytest.mark.skipif("gpus() < 1", reason="needs a CUDA device")
def test_a_device_finds_what_the_host_finds_and_the_host_never_waits() -> None:
    import torch

    from tests.checksums import checksums

    generator = torch.Generator().manual_seed(0)
    large = (1 << 31) + 4099
    for sizes in ([5], [4096], [1 << 20, 13, 0, (1 << 26) + 4099], [4096 * (n % 7) + n for n in range(300)], [large]):
        parts = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
        # Every fourth at an odd word, every fourth between words.
        there = [put(part, (0, 8, 0, 3)[number % 4]) for number, part in enumerate(parts)]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                found = checksums(there)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        assert found.tolist() == checksums(parts).tolist()
