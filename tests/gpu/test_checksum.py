"""Checksums on a device: those of the host, without the host waiting, whatever the sizes and on any stream."""

import pytest

pytestmark = pytest.mark.gpu


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.mark.skipif("gpus() < 1", reason="needs a CUDA device")
def test_a_device_finds_what_the_host_finds_and_the_host_never_waits() -> None:
    import torch

    from rlctl.refit.checksum import checksums

    generator = torch.Generator().manual_seed(0)
    for sizes in ([5], [4096], [1 << 20, 13, 0, (1 << 26) + 4099], [4096 * (n % 7) + n for n in range(300)]):
        parts = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
        there = [part.cuda() for part in parts]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                found = checksums(there)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        assert found.tolist() == checksums(parts).tolist()
