"""One rank of the FSDP2 trainer, on CPU (gloo) or GPU (NCCL)."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlctl.models.adapter_folder import check_trainable, open_weights
from rlctl.models.meta_model import text_in_whole
from rlctl.models.weight_headers import digest_of_weights
from rlctl.preflight.memory import residency
from rlctl.refit.weight_source import Shard
from rlctl.training.fsdp.float32_pass import in_float32
from rlctl.training.fsdp.mesh import make_meshes
from rlctl.training.fsdp.model import (
    Named,
    build_policy,
    check_restarts,
    free_gathered,
    local,
    read_shards,
)
from rlctl.training.interface import Loss, LossOutput, MicroBatch
from rlctl.training.lora import AdapterJob, Base, FirstAdapters
from rlctl.training.offload import OffloadManager
from rlctl.training.packing import pack, token_batch
from rlctl.training.rank import TrainerRank
from rlctl.training.rank_checkpoint import ExportJob, Shards, TensorShard
from rlctl.training.sharded_checkpoint import load_shards
from rlctl.training.spec import TrainerSpec
from rlctl.training.update import MetricAccumulator, clipping, decayed_names, divide_and_clip, gradient_norm

# Numbers that replicas add up at a time: 256 MiB.
_BUCKET = 1 << 26


class FsdpTrainer(TrainerRank):
    """float32 masters, sharded by rows over the ranks of a replica.

    Every backward pass adds the gradients up over these ranks, an update adds them up over the replicas, once.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        """Join the process group and load the model."""
        super().__init__(spec)
        self._kept_in = "float32"
        torch.manual_seed(spec.seed + spec.rank)
        self._mesh, self._replicas = make_meshes(self._device.type, spec.world, spec.config.replicas)
        first = None
        if spec.config.adapters:
            # Names of an export. A class that cannot be built is refused now.
            place = text_in_whole(self._folder, self._facts.decoder)
            name, digest = spec.base_name or spec.model_path, digest_of_weights(self._folder)
            self._base = Base(name, digest, self._facts.sizes.linears, place)
            start = Path(spec.adapter_folder) if spec.adapter_folder else None
            if start:
                check_trainable(start, spec.config.adapters)
            first = FirstAdapters(spec.config.adapters, start, spec.seed)
        where = spec.config, self._dtype, self._mesh, spec.temperature
        self._policy = build_policy(self._lm, self._facts, self._table, self._folder, *where, first)
        if self._facts.kinds.states or self._facts.sizes.one_sequence_a_row:
            check_restarts(self._policy, self._device, self._dtype)
        # Those that are trained.
        named = dict(self._policy.lm.named_parameters())
        self._parameters: dict[str, nn.Parameter] = {name: each for name, each in named.items() if each.requires_grad}
        # Parameters that transformers freezes, such as corrections of a router, are sent like buffers.
        sent = {name: each for name, each in named.items() if each.requires_grad or self._table.sends(name)}
        buffers = {name: each for name, each in self._policy.lm.named_buffers() if self._table.sends(name)}
        # Tensors that are sent and exported, as they are on this rank.
        self._held: Named = {**sent, **buffers}
        parameters, section = self._parameters.values(), spec.config.optimizer
        decayed = decayed_names(self._policy.lm)
        matrices = [p for name, p in self._parameters.items() if name in decayed]
        others = [p for name, p in self._parameters.items() if name not in decayed]
        groups = [
            {"params": matrices, "weight_decay": section.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        betas = section.betas[0], section.betas[1]
        self._optimizer = torch.optim.AdamW(groups, lr=section.lr, betas=betas, eps=section.eps, fused=True)
        for p in parameters:
            # Made at once, so that loading and saving find it.
            step = torch.zeros((), dtype=torch.float32, device=p.device)
            moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            self._optimizer.state[p] = {"step": step, **moments}
        # Gradients are freed after each update: of the table's states, AdamW's two moments of every parameter alone are
        # moved, 8 bytes a parameter. Step counts take next to nothing.
        states = self._optimizer.state.values()
        moved = [local(state[key]) for state in states for key in ("exp_avg", "exp_avg_sq")]
        table = residency(spec.config, shared=spec.config.offload_optimizer_for_generation)
        self._state = OffloadManager(table, {"optimizer": moved})
        # Engines start meanwhile, or measure the free memory before the first step.
        self.rest()

    def export(self, dtype: str | None = None) -> Iterator[tuple[str, Tensor]]:
        kinds = {name: kind for name, _, kind in self.layout(dtype)}
        for name, held in self._held.items():
            cast = held.detach().to(getattr(torch, kinds[self._table.rows_of(name)[0].name]))
            whole = cast.full_tensor() if isinstance(cast, DTensor) else cast
            yield from self._table.views(name, whole)

    def _export_job(self, folder: Path, weights: Shards, dtype: str | None) -> ExportJob:
        if self._config.adapters is None:
            return super()._export_job(folder, weights, dtype)
        # Adapters are small: rank 0 writes them whole.
        whole = {}
        for name, tensor in self.export("float32"):
            if self._spec.rank == 0:
                whole[name] = tensor.to("cpu", copy=True)
        return AdapterJob(folder, self._config.adapters, self._base, self._companions, whole)

    def exact_log_probs(self, micro_batches: list[MicroBatch]) -> list[list[NDArray[np.float32]]] | None:
        with in_float32(self._policy):
            return self.log_probs(micro_batches)

    def _log_probs(self, micro_batches: list[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        found: list[list[NDArray[np.float32]]] = []
        for micro_batch in micro_batches:
            packed = pack(micro_batch, self._device)
            rows = packed.positions.nonzero()[:, 0]
            log_probs, _ = self._policy(packed, rows)
            whole = torch.zeros(len(packed.tokens), device=self._device).index_copy_(0, rows, log_probs)
            found.append(np.split(whole.cpu().numpy(), np.cumsum(packed.lengths)[:-1]) if micro_batch else [])
        # A forward pass leaves the root's weights gathered; a later change of the shards must not miss them.
        free_gathered(self._policy)
        return found

    def _live_weights(self) -> dict[str, Tensor]:
        return {name: local(each).detach() for name, each in self._held.items()}

    def _read_weights(self, folder: Path, live: dict[str, Tensor]) -> dict[str, Tensor]:
        return read_shards(open_weights(folder), self._table_of(folder), self._held, self._facts, self._dtype)

    def _run_passes(
        self, micro_batches: list[MicroBatch], loss: Loss, metrics: MetricAccumulator, *, backward: bool
    ) -> None:
        for micro_batch in micro_batches:
            packed = pack(micro_batch, self._device)
            rows = packed.mask.nonzero()[:, 0]
            log_probs, entropy = self._policy(packed, rows)
            if micro_batch:
                zeros = torch.zeros(len(packed.tokens), device=self._device)
                placed = (zeros.index_copy(0, rows, values) for values in (log_probs, entropy))
                output = loss(token_batch(packed, *placed))
            else:
                # 0 with a gradient, so that the collectives of the backward pass still run.
                output = LossOutput(log_probs.sum() + entropy.sum())
            if backward:
                output.loss.backward()  # type: ignore[no-untyped-call]
            metrics.add(output)
        if not backward:
            free_gathered(self._policy)

    def _zero_gradients(self) -> None:
        self._optimizer.zero_grad()

    def _reduce_gradients(self) -> None:
        """Add the gradients up over replicas; over the ranks of one every backward pass has."""
        if self._replicas is None:
            return
        for bucket in _buckets([local(p.grad) for p in self._parameters.values() if p.grad is not None]):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat, group=self._replicas)
            end = 0
            for gradient in bucket:
                begin, end = end, end + gradient.numel()
                gradient.copy_(flat[begin:end].view_as(gradient))

    def _clip(self, loss: Tensor, normalizer: float) -> float:
        grads = {name: local(p.grad) for name, p in self._parameters.items() if p.grad is not None}
        squared = gradient_norm(list(grads.values())).to(self._device).square()
        if self._replicas and dist.get_rank(self._replicas):
            # All replicas have the same gradients: they count once.
            squared.zero_()
        # The loss is reduced and read together with the norm, which saves a second wait.
        both = torch.stack([squared, loss])
        dist.all_reduce(both)
        square, total = both.tolist()
        given = math.sqrt(square), total, normalizer, self._config.optimizer.max_grad_norm
        if self._mesh.size() > 1:
            return divide_and_clip(list(grads.values()), grads.items(), *given)
        # The optimizer's own pass divides whole tensors: a pass less over all gradients.
        norm, factor = clipping(grads.items(), *given)
        self._optimizer.grad_scale = torch.tensor(1 / factor, device=self._device)  # type: ignore[attr-defined]
        return norm

    def _move_weights(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._state.wait()
        self._optimizer.step()

    def _rehearse(self, loss: Tensor) -> None:
        for p in self._parameters.values():
            if p.grad is not None:
                local(p.grad).zero_()
        self._clip(loss, 1.0)
        self._move_weights(0.0)
        for state in self._optimizer.state.values():
            state["step"].zero_()

    def _shards(self) -> list[Shard]:
        found = []
        for name, held in self._held.items():
            mine = local(held).detach()
            first = (self._first_row(held), *(0,) * (mine.ndim - 1)) if mine.ndim else ()
            for row in self._table.rows_of(name):
                if part := row.part(mine, first):
                    found.append(Shard(row.name, *part))
        return found

    def _saved(self, *, moments: bool = True) -> dict[str, TensorShard]:
        # Replicas hold the same shards: each writes some parameters. What every rank of a replica holds whole, its
        # first writes.
        copies, mine = (1, 0) if self._replicas is None else (self._replicas.size(), dist.get_rank(self._replicas))
        own = list(self._parameters)[mine::copies]
        return {
            f"{kind}.{name}": shard
            for name in own
            for kind, shard in self._state_of(name).items()
            if (moments or kind == "model") and (kind != "step" or self._mesh.get_local_rank() == 0)
        }

    def _saved_buffers(self) -> dict[str, TensorShard]:
        # Frozen parameters are cut like trained ones. The first replica writes them, its first rank the buffers.
        first = self._replicas is None or dist.get_rank(self._replicas) == 0
        found = {}
        for name, each in self._held.items():
            if name in self._parameters or not first:
                continue
            if isinstance(each, DTensor):
                mine, start = local(each.detach()), (self._first_row(each), *(0,) * (each.ndim - 1))
                if mine.numel():
                    found[name] = TensorShard(tuple(each.shape), start, mine)
            elif self._spec.rank == 0:
                found[name] = TensorShard.whole(each)
        return found

    def _state_of(self, name: str) -> dict[str, TensorShard]:
        """Return this rank's live shards of a parameter and its optimizer state: a load fills them."""
        p, found = self._parameters[name], {}
        for kind, tensor in {"model": p.detach(), **self._optimizer.state[p]}.items():
            start = (self._first_row(tensor), *(0,) * (tensor.ndim - 1)) if tensor.ndim else ()
            shard = TensorShard(tuple(tensor.shape), start, self._state.at_hand(local(tensor)))
            if shard.tensor.numel():
                found[kind] = shard
        return found

    def _load_checkpoint(self, folder: Path) -> None:
        names = self._parameters
        load_shards(folder, {f"{kind}.{n}": each for n in names for kind, each in self._state_of(n).items()})

    def _first_row(self, tensor: Tensor) -> int:
        """Return the first row of this rank's shard: torch cuts rows evenly, rounded up."""
        if not isinstance(tensor, DTensor):
            return 0
        return self._mesh.get_local_rank() * -(-tensor.shape[0] // self._mesh.size())


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield float32 tensors together up to `_BUCKET` numbers, a larger one alone."""
    bucket, numbers = list[Tensor](), 0
    for tensor in tensors:
        if bucket and numbers + tensor.numel() > _BUCKET:
            yield bucket
            bucket, numbers = [], 0
        bucket.append(tensor)
        numbers += tensor.numel()
    if bucket:
        yield bucket


TRAINER = FsdpTrainer
