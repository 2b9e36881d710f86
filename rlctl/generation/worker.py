"""What rlctl adds to a vLLM worker: receiving weights and loading them into the live model.

vLLM mixes this class into its own worker, hence the `rl_` prefix. Loading goes through `reload_weights`, which
fuses and repacks as at start-up and keeps the parameters' storage, so that CUDA graphs stay valid.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlctl.refit.checksum import checksum
from rlctl.refit.plan import Header, Plan, TransportSpec
from rlctl.refit.transport import Receiver, open_receiver


class RefitWorker:
    """Mixed into vLLM's worker (`worker_extension_cls`)."""

    model_runner: Any
    rank: int
    device: torch.device
    _rl_receiver: Receiver

    def rl_open(self, spec: TransportSpec, plan: Plan, first_rank: int) -> None:
        """Join the transport; `first_rank` is the rank of this engine's first worker in it."""
        self._rl_receiver = open_receiver(spec, plan, first_rank + self.rank, self.device)

    @torch.no_grad()
    def rl_refit(self, header: Header) -> dict[str, Any]:
        """Receive one version and load it. Returns seconds and the received tensors' checksums, if asked for."""
        begin = time.perf_counter()
        sums: list[int] = []
        received = _summed(self._rl_receiver.receive(header), sums if header.checksums else None)
        self.model_runner.reload_weights(weights_iterator=received)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        else:
            _repack_for_cpu(self.model_runner.get_model())
        return {"seconds": time.perf_counter() - begin, "checksums": sums}

    def rl_memory(self) -> dict[str, float]:
        """Bytes of device memory now and at peak; zeros on CPU."""
        if self.device.type != "cuda":
            return {"device_allocated": 0.0, "device_peak": 0.0}
        return {
            "device_allocated": float(torch.cuda.memory_allocated(self.device)),
            "device_peak": float(torch.cuda.max_memory_allocated(self.device)),
        }


def _summed(tensors: Iterator[tuple[str, Tensor]], sums: list[int] | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if sums is not None:
            sums.append(checksum(tensor))
        yield name, tensor


def _repack_for_cpu(model: torch.nn.Module) -> None:
    """Bring the CPU kernels' own copies of weights up to date.

    On CPU, heads and experts compute with repacked copies that `reload_weights` leaves behind (seen in vLLM 0.32):
    with tied embeddings the head would go on with the old weights, and experts would read unpacked memory as
    packed. Neither is an error there, only wrong samples.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
        elif (kernel := getattr(method, "moe_kernel", None)) is not None:
            kernel.fused_experts.process_weights_after_loading(module)
