"""One rank of the Megatron-core trainer: `interface.TrainerRank` over tensor, pipeline, context, expert and data ranks.

Losses and gradients are sums, as with FSDP: a loss comes divided by its global totals. It is computed on the last
pipeline stage, alike on its tensor- and context-parallel ranks, of which each differentiates its own part.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor

from rlctl.config.schema import TrainerSection
from rlctl.models import hf_folder
from rlctl.models.meta_model import layout_of, skeleton
from rlctl.models.model_sizes import read_sizes
from rlctl.preflight.backend import State, backend_of
from rlctl.preflight.backends.megatron import cpu_offload_problem
from rlctl.preflight.offload_plan import residency
from rlctl.refit.source import Shard
from rlctl.training import distributed
from rlctl.training.interface import Loss, LossInParts, LossOutput, MicroBatch, Totals
from rlctl.training.megatron import checkpoint
from rlctl.training.megatron.emulation import Emulation
from rlctl.training.megatron.export import Exporter
from rlctl.training.megatron.head import Head
from rlctl.training.megatron.inputs import Inputs, PackSlicer
from rlctl.training.megatron.mapping import Mapping, Ranks, read
from rlctl.training.megatron.model import build_policy
from rlctl.training.megatron.optimizer import Optimizer
from rlctl.training.offload import OffloadManager, Reference
from rlctl.training.packing import Packed, pack, token_batch
from rlctl.training.update import MetricAccumulator, carry_on, learning_rate

# (log-probs, entropy, the pack they belong to, whether it holds any sequence) -> loss and what is kept of it.
Finish = Callable[[Tensor, Tensor, Packed, bool], tuple[Tensor, Any]]


class MegatronTrainer:
    """This rank's stage of the policy and its optimizer. All ranks call every method together."""

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
        """See FsdpTrainer. Ranks count tensor-parallel ones first, then context, data, pipeline.

        Raises ValueError for a model that these layers do not make, or an optimizer on the host without bfloat16.
        """
        self._config, self._rank, self._total_updates = config, rank, total_updates
        self._device = torch.device(device)
        self._dtype = distributed.compute_dtype(config)
        self._own_dtype = str(self._dtype).removeprefix("torch.")
        why = cpu_offload_problem(self._own_dtype)
        if config.megatron.optimizer_cpu_offload and why:
            raise ValueError(f"trainer.megatron.optimizer_cpu_offload {why}")
        self._folder = Path(model_path)
        lm = skeleton(self._folder, self._device)
        self._hf, self._layout = lm.config, layout_of(lm)
        self._sizes = read_sizes(self._folder / "config.json")
        for _, what, _ in backend_of(config).check_model(config, self._sizes):
            raise ValueError(what)
        distributed.join(config, rank, world, init_method, self._device)
        self._emulation = Emulation()
        self._emulation.start()
        _initialize(config, seed + rank)
        self._policy = build_policy(self._hf, self._sizes, config, self._dtype, self._device)
        self._named = dict(self._policy.named_parameters())
        self._mapping = Mapping(self._policy, self._hf, _ranks())
        for name, p in self._named.items():
            # Megatron says so only where it draws weights at random; what is not marked, the gradient norm counts once.
            p.tensor_model_parallel = not self._mapping.replicated(name)  # type: ignore[attr-defined]
        self._read({name: p.detach() for name, p in self._named.items()})
        self._ddp = _wrapped(self._policy)
        self._optimizer = Optimizer(self._ddp, config, self._dtype)
        self._read_mains()
        self._head = Head(self._policy, config, temperature)
        cut = config.megatron.context_parallel_size
        multiple = cut * config.megatron.tensor_model_parallel_size
        position = parallel_state.get_context_parallel_rank()
        self._buffer = PackSlicer(lm.model.rotary_emb, self._dtype, multiple, position, cut)
        self._exporter = Exporter(self._named, self._mapping, self._device)
        table = residency(config, shared=config.offload_optimizer_for_generation)
        states: dict[State, list[Tensor]] = {"gradients": self._optimizer.gradients()}
        if not config.megatron.optimizer_cpu_offload:
            states["optimizer"] = self._optimizer.device_state()
        self._state = OffloadManager(table, states)
        # Engines start beside, or measure what is free before the first step.
        self.rest()
        self._reference: Reference | None = None
        self._updates = 0
        # Of an update that `accumulate` began.
        self._begun: MetricAccumulator | None = None

    def log_probs(self, micro_batches: list[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """See TrainerRank."""
        self._state.enter("log_probs")
        with torch.no_grad():
            found = self._passes(micro_batches, _kept_log_probs, _later_rows, backward=False)
            lengths = [[len(sequence) for sequence in batch] for batch in micro_batches]
            columns = self._from_last_stage(found, sum(map(sum, lengths)))
        ends = np.cumsum([sum(batch) for batch in lengths])[:-1]
        parts = zip(np.split(columns, ends), lengths)
        return [np.split(part, np.cumsum(batch)[:-1]) if batch else [] for part, batch in parts]

    def reference_log_probs(self, micro_batches: list[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """See TrainerRank. The first call loads the reference."""
        live = {name: p.detach() for name, p in self._named.items()}
        if self._reference is None:
            weights = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in live.items()}
            self._read(weights)
            self._reference = Reference(weights)
        with self._reference.in_place_of(live):
            return self.log_probs(micro_batches)

    def train(
        self, micro_batches: list[MicroBatch], loss: Loss, totals: Totals, before: Totals | None = None
    ) -> dict[str, float]:
        """See TrainerRank and FsdpTrainer.train."""
        if not micro_batches:
            raise ValueError("an update needs at least one micro-batch on every rank")
        self._state.enter("train")
        lr = learning_rate(self._updates, self._config.optimizer, self._total_updates)
        accumulator = self._gradients(micro_batches, loss, totals, before)
        self._state.wait()
        norm = self._optimizer.step(lr, accumulator.loss(self._device))
        self._optimizer.zero_grad()
        self._updates += 1
        return accumulator.join() | {"train/grad_norm": norm, "train/lr": lr}

    def accumulate(
        self, micro_batches: list[MicroBatch], loss: LossInParts, totals: Totals, before: Totals | None
    ) -> None:
        """See TrainerRank."""
        self._state.enter("train")
        # The ranks' gradients are added up once, with the last part.
        config = self._policy.config
        finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, None
        try:
            self._begun = self._gradients(micro_batches, loss, totals, before)
        finally:
            config.finalize_model_grads_func = finalize

    def warm_up(self, micro_batches: list[MicroBatch], loss: Loss, totals: Totals) -> None:
        """See TrainerRank."""
        self._state.enter("train")
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            self._gradients(micro_batches, loss, totals).join()
        if self._updates == 0:
            self._state.wait()
            self._optimizer.rehearse()
        self._optimizer.zero_grad()

    def evaluate(self, micro_batches: list[MicroBatch], loss: Loss, totals: Totals) -> dict[str, float]:
        """See TrainerRank."""
        with torch.no_grad():
            outputs = self._passes(micro_batches, partial(_of_loss, loss, totals), _masked_rows, backward=False)
        return _accumulator(outputs, MetricAccumulator()).join()

    def layout(self, dtype: str | None = None) -> hf_folder.Layout:
        """See TrainerRank."""
        return [(name, shape, dtype or self._own_dtype) for name, shape in self._layout]

    def shards(self) -> list[Shard]:
        """See TrainerRank. Heads of q, k and v lie apart, by groups, and so are several shards of a tensor."""
        # An engine that is rebuilt between the parts of an update must not cost it its gradients.
        if self._begun is None:
            self._state.enter("refit")
        parts = (part for name, p in self._named.items() for part in self._mapping.parts(name, p.detach()))
        return [Shard(part.name, part.start, part.view) for part in parts]

    def export(self, dtype: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """See TrainerRank."""
        return self._exporter.tensors(self.layout(dtype))

    def save(self, folder: Path) -> None:
        """See TrainerRank. Rank 0's folder must be everybody's: ranks write side by side."""
        self._state.enter("checkpoint")
        checkpoint.save(folder, self._stage(), self._updates)

    def load(self, folder: Path) -> None:
        """See TrainerRank; what FSDP saved, too."""
        self._state.enter("checkpoint")
        self._updates = checkpoint.load(folder, self._stage())

    def export_folder(self, folder: Path, dtype: str | None = None) -> None:
        """See TrainerRank."""
        layout = self.layout(dtype)
        # What is wider than the weights is in the optimizer.
        mains = checkpoint.mains(self._stage()) if dtype == "float32" != self._own_dtype else None
        hf_folder.write_folder_together(self._folder, folder, layout, self._exporter.tensors(layout, mains))

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
            "parameters": sum(int(np.prod(shape)) for _, shape in self._layout),
            "active_parameters": self._sizes.active_parameters,
            "dtype": self._own_dtype,
            "vocab_size": self._hf.vocab_size,
            "device": str(self._device),
            "device_name": distributed.device_name(self._device),
        }

    def close(self) -> None:
        """Leave the process groups."""
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        self._emulation.stop()

    def _gradients(
        self, micro_batches: list[MicroBatch], loss: Loss, totals: Totals, before: Totals | None = None
    ) -> MetricAccumulator:
        """Of the update so far, summed into the gradient buffers."""
        accumulator = self._carried(loss, totals, before)
        outputs = self._passes(micro_batches, partial(_of_loss, loss, totals), _masked_rows, backward=True)
        return _accumulator(outputs, accumulator)

    def _carried(self, loss: Loss, totals: Totals, before: Totals | None) -> MetricAccumulator:
        """Where an update begins, or goes on with what its earlier parts left."""
        begun, self._begun = self._begun, None
        if before is None:
            self._optimizer.zero_grad()
            return MetricAccumulator()
        return carry_on(begun, self._optimizer.gradients(), loss, before, totals)

    def _passes(
        self, micro_batches: list[MicroBatch], finish: Finish, rows: Callable[[Packed], Tensor], *, backward: bool
    ) -> list[Any]:
        """Every micro-batch through all stages; what `finish` kept, on the last stage, else nothing."""
        self._ddp.train(backward)
        packs = ((pack(batch, self._device), bool(batch)) for batch in micro_batches)

        def forward(waiting: Iterator[tuple[Packed, bool]], model: Any) -> tuple[Tensor, Any]:
            packed, real = next(waiting)
            given = self._buffer(packed)
            hidden = model(given.tokens, given.positions, given.pack)
            return hidden, partial(self._finished, finish, rows, packed, given, real)

        found: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=packs,
            model=[self._ddp],
            num_microbatches=len(micro_batches),
            seq_length=self._config.micro_batch_tokens,
            micro_batch_size=1,
            forward_only=not backward,
        )
        return found

    def _finished(
        self,
        finish: Finish,
        rows: Callable[[Packed], Tensor],
        packed: Packed,
        given: Inputs,
        real: bool,
        hidden: Tensor,
    ) -> tuple[Tensor, Tensor, Any]:
        log_probs, entropy = self._head(hidden, given, packed, rows(packed))
        loss, kept = finish(log_probs, entropy, packed, real)
        return loss, torch.zeros((), dtype=torch.int), kept

    def _from_last_stage(self, found: list[Tensor], total: int) -> NDArray[np.float32]:
        columns = torch.cat(found) if found else torch.empty(total, device=self._device)
        if self._config.megatron.pipeline_model_parallel_size > 1:
            source = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(columns, source, parallel_state.get_pipeline_model_parallel_group())
        values: NDArray[np.float32] = columns.cpu().numpy()
        return values

    def _read(self, weights: dict[str, Tensor]) -> None:
        """Fill tensors that are shaped like the parameters from the model's folder."""
        files = hf_folder.WeightFiles(self._folder)
        for name, tensor in weights.items():
            read(self._mapping.parts(name, tensor), files.part)

    def _read_mains(self) -> None:
        """Megatron makes float32 weights of the rounded ones; a folder of float32 knows them better."""
        files = hf_folder.WeightFiles(self._folder)
        if self._dtype == torch.float32 or files.dtype(self._layout[0][0]) != torch.float32:
            return
        for name, parameter in self._named.items():
            if slot := self._optimizer.slots.get(parameter):
                whole = torch.empty(parameter.shape, dtype=torch.float32)
                read(self._mapping.parts(name, whole), files.part)
                slot.main.copy_(whole.view(-1)[slot.start : slot.stop])

    def _stage(self) -> checkpoint.Stage:
        self._state.wait()
        self._state.settle()
        return checkpoint.Stage(
            self._named, self._mapping, self._optimizer, self._exporter.mirrored, self._state.at_hand
        )


def _initialize(config: TrainerSection, seed: int) -> None:
    torch.manual_seed(seed)
    parallel = config.megatron
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _ranks() -> Ranks:
    return Ranks(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_world_size(),
    )


def _wrapped(policy: Any) -> DistributedDataParallel:
    config = policy.config
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True), policy
    )
    config.no_sync_func = ddp.no_sync
    # Without the number of tokens, by which Megatron would divide.
    config.finalize_model_grads_func = lambda models, tokens, **groups: finalize_model_grads(models, None, **groups)
    return ddp


def _later_rows(packed: Packed) -> Tensor:
    return packed.positions.nonzero()[:, 0]


def _masked_rows(packed: Packed) -> Tensor:
    return packed.mask.nonzero()[:, 0]


def _kept_log_probs(log_probs: Tensor, entropy: Tensor, packed: Packed, real: bool) -> tuple[Tensor, Tensor]:
    return log_probs.sum(), log_probs if real else log_probs[:0]


def _of_loss(
    loss: Loss, totals: Totals, log_probs: Tensor, entropy: Tensor, packed: Packed, real: bool
) -> tuple[Tensor, LossOutput]:
    """Of an empty micro-batch 0, with a gradient, so that the collectives still run."""
    if not real:
        nothing = log_probs.sum() + entropy.sum()
        return nothing, LossOutput(nothing)
    output = loss(token_batch(packed, log_probs, entropy), totals)
    return output.loss, output


def _accumulator(outputs: list[LossOutput], accumulator: MetricAccumulator) -> MetricAccumulator:
    """With these added; of the ranks of the last stage one counts."""
    first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
    for output in outputs if first else ():
        accumulator.add(output)
    return accumulator


TRAINER = MegatronTrainer
