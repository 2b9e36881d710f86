"""One rank of the FSDP2 trainer: `interface.TrainerRank` over torch.distributed, on CPU (gloo) or GPU (NCCL).

Losses and gradients are sums over ranks and micro-batches of losses already divided by their global totals, so
an update does not depend on how its sequences were packed or shared out.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rlctl.config.schema import TrainerSection
from rlctl.models import hf_folder
from rlctl.models.architectures import is_fused
from rlctl.models.model_sizes import read_sizes
from rlctl.preflight.offload_plan import residency
from rlctl.refit.source import Shard
from rlctl.training import distributed
from rlctl.training.fsdp import checkpoint
from rlctl.training.fsdp.model import build_policy, free_gathered, read_shards
from rlctl.training.fsdp.optimizer import Named, build_adamw, clip_gradients, local, moments
from rlctl.training.interface import Loss, LossInParts, LossOutput, MicroBatch, Totals
from rlctl.training.offload import OffloadManager, Reference
from rlctl.training.packing import Packed, pack, token_batch
from rlctl.training.update import MetricAccumulator, carry_on, learning_rate


class FsdpTrainer:
    """The policy, its optimizer and, once asked for, its reference. All ranks call every method together."""

    def __init__(
        self,
        config: TrainerSection,
        model_path: str,
        rank: int,
        world: int,
        init_method: str,
        device: str,
        temperature: float,
        total_updates: int,
        seed: int,
    ) -> None:
        """Join the process group and load the model.

        model_path: Hugging Face folder. init_method: of torch.distributed (tcp://, file://). device:
        cpu, or cuda:N with N this rank's device. temperature: log-probs are of the tempered policy.
        total_updates: what the learning-rate schedule runs over.
        """
        self._config, self._rank, self._world, self._total_updates = config, rank, world, total_updates
        self._device = torch.device(device)
        distributed.join(config, rank, world, init_method, self._device)
        torch.manual_seed(seed + rank)
        self._dtype = distributed.compute_dtype(config)
        self._folder = Path(model_path)
        mesh = init_device_mesh(self._device.type, (world,))
        self._policy = build_policy(self._folder, config, self._dtype, mesh, temperature)
        self._parameters: Named = dict(self._policy.lm.named_parameters())
        self._optimizer = build_adamw(self._parameters, config.optimizer)
        # Gradients are freed by zero_grad: of the table's states, the moments alone are moved.
        table = residency(config, shared=config.offload_optimizer_for_generation)
        self._state = OffloadManager(table, {"optimizer": map(local, moments(self._optimizer))})
        # Engines start beside, or measure what is free before the first step.
        self.rest()
        self._reference: Reference | None = None
        self._updates = 0
        # Of an update that `accumulate` began.
        self._begun: MetricAccumulator | None = None

    def log_probs(self, micro_batches: list[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """See TrainerRank. An array a sequence, float32 [T], 0 at its first token."""
        self._state.enter("log_probs")
        with torch.no_grad():
            result = [self._sequence_log_probs(micro_batch) for micro_batch in micro_batches]
        # A forward pass leaves the root's weights gathered; a later change of the shards must not miss them.
        free_gathered(self._policy)
        return result

    def reference_log_probs(self, micro_batches: list[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """See TrainerRank. The first call loads the reference."""
        if self._reference is None:
            self._reference = Reference(read_shards(self._folder, self._parameters, self._dtype))
        with self._reference.in_place_of({name: local(p).detach() for name, p in self._parameters.items()}):
            return self.log_probs(micro_batches)

    def train(
        self, micro_batches: list[MicroBatch], loss: Loss, totals: Totals, before: Totals | None = None
    ) -> dict[str, float]:
        """See TrainerRank. Adds train/grad_norm (before clipping) and train/lr (of this update).

        Raises ValueError without micro-batches, FloatingPointError for a loss or a gradient norm that is not finite.
        """
        if not micro_batches:
            raise ValueError("an update needs at least one micro-batch on every rank")
        self._state.enter("train")
        lr = learning_rate(self._updates, self._config.optimizer, self._total_updates)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        accumulator = self._gradients(micro_batches, loss, totals, before)
        max_norm = self._config.optimizer.max_grad_norm
        norm = clip_gradients(self._parameters, max_norm, accumulator.loss(self._device))
        self._state.wait()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._updates += 1
        return accumulator.join() | {"train/grad_norm": norm, "train/lr": lr}

    def accumulate(
        self, micro_batches: list[MicroBatch], loss: LossInParts, totals: Totals, before: Totals | None
    ) -> None:
        """See TrainerRank."""
        self._state.enter("train")
        self._begun = self._gradients(micro_batches, loss, totals, before)

    def warm_up(self, micro_batches: list[MicroBatch], loss: Loss, totals: Totals) -> None:
        """See TrainerRank."""
        self._state.enter("train")
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            self._gradients(micro_batches, loss, totals).join()
        if self._updates == 0:
            self._rehearse_update()
        self._optimizer.zero_grad()

    def _rehearse_update(self) -> None:
        """An update by nothing: with gradients and moments of zero and a rate of zero every bit stays as it is."""
        for p in self._parameters.values():
            if p.grad is not None:
                local(p.grad).zero_()
        clip_gradients(self._parameters, self._config.optimizer.max_grad_norm, MetricAccumulator().loss(self._device))
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        self._state.wait()
        self._optimizer.step()
        for state in self._optimizer.state.values():
            state["step"].zero_()

    def _gradients(
        self, micro_batches: list[MicroBatch], loss: Loss, totals: Totals, before: Totals | None = None
    ) -> MetricAccumulator:
        """Of the update so far, summed into the parameters."""
        accumulator = self._carried(loss, totals, before)
        for micro_batch in micro_batches:
            output = self._loss(micro_batch, loss, totals)
            output.loss.backward()  # type: ignore[no-untyped-call]
            accumulator.add(output)
        return accumulator

    def _carried(self, loss: Loss, totals: Totals, before: Totals | None) -> MetricAccumulator:
        """Where an update begins, or goes on with what its earlier parts left."""
        begun, self._begun = self._begun, None
        if before is None:
            self._optimizer.zero_grad()
            return MetricAccumulator()
        gradients = (local(p.grad) for p in self._parameters.values() if p.grad is not None)
        return carry_on(begun, gradients, loss, before, totals)

    def evaluate(self, micro_batches: list[MicroBatch], loss: Loss, totals: Totals) -> dict[str, float]:
        """See TrainerRank."""
        accumulator = MetricAccumulator()
        with torch.no_grad():
            for micro_batch in micro_batches:
                accumulator.add(self._loss(micro_batch, loss, totals))
        free_gathered(self._policy)
        return accumulator.join()

    def layout(self, dtype: str | None = None) -> hf_folder.Layout:
        """See TrainerRank."""
        return [
            (part, tuple(view.shape), str(view.dtype).removeprefix("torch."))
            for name, p in self._parameters.items()
            for part, view in hf_folder.unfuse(name, torch.empty(p.shape, dtype=_dtype(dtype, p), device="meta"))
        ]

    def shards(self) -> list[Shard]:
        """See TrainerRank. Parameters are sharded by rows: experts stacked in one parameter by whole experts."""
        # An engine that is rebuilt between the parts of an update must not cost it its gradients.
        if self._begun is None:
            self._state.enter("refit")
        found = []
        for name, p in self._parameters.items():
            mine = local(p).detach()
            first = self._rank * -(-p.shape[0] // self._world) if isinstance(p, DTensor) else 0
            for part, view in hf_folder.unfuse(name, mine, first) if mine.numel() else ():
                start = 0 if is_fused(name) else first
                found.append(Shard(part, (start,) + (0,) * (view.ndim - 1), view))
        return found

    def export(self, dtype: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """See TrainerRank. A tensor may be the weights' own memory: read it before asking for the next."""
        for name, p in self._parameters.items():
            whole = p.detach().to(_dtype(dtype, p))
            yield from hf_folder.unfuse(name, whole.full_tensor() if isinstance(whole, DTensor) else whole)

    def save(self, folder: Path) -> None:
        """See TrainerRank. Rank 0's folder must be everybody's: shards are written side by side."""
        self._state.enter("checkpoint")
        checkpoint.save(folder, self._parameters, self._optimizer, self._state, self._updates)

    def load(self, folder: Path) -> None:
        """See TrainerRank."""
        self._state.enter("checkpoint")
        self._updates = checkpoint.load(folder, self._parameters, self._optimizer, self._state)

    def export_folder(self, folder: Path, dtype: str | None = None) -> None:
        """See TrainerRank. Configuration and tokenizer files are the model's own."""
        dtype = dtype or str(self._dtype).removeprefix("torch.")
        hf_folder.write_folder_together(self._folder, folder, self.layout(dtype), self.export(dtype))

    def rest(self) -> None:
        """See TrainerRank."""
        self._state.enter("generate")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def memory(self) -> dict[str, float]:
        """See TrainerRank."""
        return distributed.memory(self._device) | self._state.totals()

    def info(self) -> dict[str, Any]:
        """See TrainerRank."""
        return {
            "parameters": sum(p.numel() for p in self._parameters.values()),
            "dtype": str(self._dtype).removeprefix("torch."),
            "vocab_size": self._policy.lm.config.vocab_size,
            "device": str(self._device),
            "device_name": distributed.device_name(self._device),
            "active_parameters": read_sizes(self._folder / "config.json").active_parameters,
        }

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()

    def _loss(self, micro_batch: MicroBatch, loss: Loss, totals: Totals) -> LossOutput:
        """The loss of one micro-batch; of an empty one, 0 with a gradient, so that the collectives still run."""
        packed = pack(micro_batch, self._device)
        rows = packed.mask.nonzero()[:, 0]
        log_probs, entropy = self._policy(packed, rows)
        if not micro_batch:
            return LossOutput(loss=log_probs.sum() + entropy.sum())
        nothing = torch.zeros(len(packed.tokens), device=self._device)
        batch = token_batch(packed, nothing.index_copy(0, rows, log_probs), nothing.index_copy(0, rows, entropy))
        return loss(batch, totals)

    def _sequence_log_probs(self, micro_batch: MicroBatch) -> list[NDArray[np.float32]]:
        packed: Packed = pack(micro_batch, self._device)
        rows = packed.positions.nonzero()[:, 0]
        log_probs, _ = self._policy(packed, rows)
        whole = torch.zeros(len(packed.tokens), device=self._device).index_copy_(0, rows, log_probs)
        return np.split(whole.cpu().numpy(), np.cumsum(packed.lengths)[:-1]) if micro_batch else []


def _dtype(name: str | None, like: Tensor) -> torch.dtype:
    chosen: torch.dtype = like.dtype if name is None else getattr(torch, name)
    return chosen


TRAINER = FsdpTrainer
