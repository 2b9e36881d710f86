"""Checksums on a device: equal to the host's, without a wait of the host, for any sizes and on any stream."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.gpu


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def put_on_device(tensor: "Tensor", first_byte: int) -> "Tensor":
    """Copy a tensor of bytes to the device, to begin at `first_byte` of its memory."""
    import torch

    memory = torch.zeros(first_byte + tensor.numel(), dtype=torch.uint8, device="cuda")
    memory[first_byte:].copy_(tensor)
    return memory[first_byte:]


@pytest.mark.skipif("gpus() < 1", reason="needs a CUDA device")
def test_a_device_finds_what_the_host_finds_and_the_host_never_waits() -> None:
    import torch

    from tests.checksums import checksums

    generator = torch.Generator().manual_seed(0)
    large = (1 << 31) + 4099
    many = [4096 * (number % 7) + number for number in range(300)]
    for sizes in ([5], [4096], [1 << 20, 13, 0, (1 << 26) + 4099], many, [large]):
        tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
        # Every fourth at an odd word, every fourth between words.
        on_device = [put_on_device(tensor, (0, 8, 0, 3)[number % 4]) for number, tensor in enumerate(tensors)]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                checksums_by_device = checksums(on_device)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        assert checksums_by_device.tolist() == checksums(tensors).tolist()
