"""One rank of the Megatron-core trainer, over tensor, pipeline, context, expert and data ranks.

The last pipeline stage computes the loss. Its tensor- and context-parallel ranks get equal values; each differentiates
its own part, and one counts the output. Gradients are added up over data- and context-parallel ranks when the update
ends. Megatron can overlap that reduction with the backward pass of a schedule's last micro-batch. The overlap stays
off, because no part of an update knows if it is the last.
"""

from collections.abc import Callable, Iterator
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

from rlctl.models import hf_folder
from rlctl.preflight.backends.megatron import cpu_offload_problem, megatron_of
from rlctl.preflight.memory import residency
from rlctl.refit.weight_source import Shard
from rlctl.training.interface import Loss, LossOutput, MicroBatch
from rlctl.training.megatron import checkpoint
from rlctl.training.megatron.emulation import Emulation
from rlctl.training.megatron.mapping import Exporter, Mapping, read
from rlctl.training.megatron.model import build_policy, parallel_sizes
from rlctl.training.megatron.optimizer import Optimizer, gradients
from rlctl.training.megatron.stage_io import Head, PackSlicer
from rlctl.training.offload import OffloadManager
from rlctl.training.packing import Packed, pack, token_batch
from rlctl.training.rank import TrainerRank
from rlctl.training.rank_checkpoint import TensorShard
from rlctl.training.spec import TrainerSpec
from rlctl.training.update import MetricAccumulator

# (log-probs, entropy, their pack, true if the pack holds a sequence) -> loss and the value to keep.
Finish = Callable[[Tensor, Tensor, Packed, bool], tuple[Tensor, Any]]


class MegatronTrainer(TrainerRank):
    """This rank's stage of the policy and its optimizer.

    Ranks count tensor-parallel ones first, then context, data, pipeline.
    """

    saves_live_tensors = False

    def __init__(self, spec: TrainerSpec) -> None:
        """Join the process groups and load the model.

        Raises ValueError, also for an optimizer on the host without bfloat16.
        """
        config = spec.config
        why = cpu_offload_problem(config.dtype)
        if megatron_of(config).optimizer_cpu_offload and why:
            raise ValueError(f"trainer.megatron.optimizer_cpu_offload {why}")
        super().__init__(spec)
        self._kept_in = config.dtype
        self._emulation = Emulation()
        self._emulation.start()
        self._initialize_parallel()
        self._policy = build_policy(self._lm.config, self._facts.sizes, config, self._dtype, self._device)
        self._named = dict(self._policy.named_parameters())
        self._mapping = Mapping(self._policy, self._lm.config, self._table)
        for name, p in self._named.items():
            # Megatron sets this mark only where it draws weights at random. The gradient norm counts unmarked weights
            # once.
            p.tensor_model_parallel = not self._mapping.replicated(name)  # type: ignore[attr-defined]
        self._read_shaped(self._folder, self._live_weights())
        # One reduction at the end of the update; the factor by which gradients are scaled before it is 1, of experts
        # too, with `calculate_per_token_loss`.
        reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self._ddp = DistributedDataParallel(self._policy.config, reduction, self._policy)
        table = residency(config, shared=config.offload_optimizer_for_generation)
        self._state = OffloadManager(table, {"gradients": gradients(self._ddp)})
        # Before there is optimizer state, so that an engine on this device can start within its forecast.
        self.rest()
        self._optimizer = Optimizer(self._ddp, config, self._dtype)
        self._read_mains()
        self._head = Head(self._policy, config, spec.temperature)
        cut = megatron_of(config).context_parallel_size
        multiple = cut * megatron_of(config).tensor_model_parallel_size
        position = parallel_state.get_context_parallel_rank()
        self._slicer = PackSlicer(self._lm.model.rotary_emb, self._dtype, multiple, position, cut)
        self._exporter = Exporter(self._named, self._mapping, self._device)
        if not megatron_of(config).optimizer_cpu_offload:
            self._state.add("optimizer", self._optimizer.device_state())
        self._stage = checkpoint.Stage(
            self._named, self._mapping, self._optimizer, self._exporter.mirrored, self._state.at_hand
        )
        # Engines start meanwhile, or measure the free memory before the first step.
        self.rest()

    def export(self, dtype: str | None = None) -> Iterator[tuple[str, Tensor]]:
        return self._exporter.tensors(self.layout(dtype))

    def close(self) -> None:
        parallel_state.destroy_model_parallel()
        super().close()
        self._emulation.stop()

    def _log_probs(self, micro_batches: list[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        def kept(log_probs: Tensor, entropy: Tensor, packed: Packed, real: bool) -> tuple[Tensor, Tensor]:
            return log_probs.sum(), log_probs if real else log_probs[:0]

        found = self._passes(micro_batches, kept, lambda packed: packed.positions, backward=False)
        lengths = [[len(sequence) for sequence in batch] for batch in micro_batches]
        # The last stage has them all.
        columns = torch.cat(found) if found else torch.empty(sum(map(sum, lengths)), device=self._device)
        if megatron_of(self._config).pipeline_model_parallel_size > 1:
            source = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(columns, source, parallel_state.get_pipeline_model_parallel_group())
        ends = np.cumsum([sum(batch) for batch in lengths])[:-1]
        parts = zip(np.split(columns.cpu().numpy(), ends), lengths)
        return [np.split(part, np.cumsum(batch)[:-1]) if batch else [] for part, batch in parts]

    def _live_weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._named.items()}

    def _read_weights(self, folder: Path, live: dict[str, Tensor]) -> dict[str, Tensor]:
        weights = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in live.items()}
        self._read_shaped(folder, weights)
        return weights

    def _run_passes(
        self, micro_batches: list[MicroBatch], loss: Loss, metrics: MetricAccumulator, *, backward: bool
    ) -> None:
        def of_loss(log_probs: Tensor, entropy: Tensor, packed: Packed, real: bool) -> tuple[Tensor, LossOutput]:
            # An empty micro-batch has 0, with a gradient, so that the collectives still run.
            output = (
                loss(token_batch(packed, log_probs, entropy)) if real else LossOutput(log_probs.sum() + entropy.sum())
            )
            return output.loss, output

        outputs = self._passes(micro_batches, of_loss, lambda packed: packed.mask, backward=backward)
        # The ranks of the last stage have equal outputs, and one rank counts.
        if parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0:
            for output in outputs:
                metrics.add(output)

    def _passes(
        self, micro_batches: list[MicroBatch], finish: Finish, chosen: Callable[[Packed], Tensor], *, backward: bool
    ) -> list[Any]:
        """Pass every micro-batch through all stages. Return the values that `finish` kept on the last stage, nothing
        elsewhere.

        chosen: the tokens [T] whose log-probs are computed, where it is not 0.
        """
        self._ddp.train(backward)
        packs = ((pack(batch, self._device), bool(batch)) for batch in micro_batches)

        def forward(waiting: Iterator[tuple[Packed, bool]], model: Any) -> tuple[Tensor, Any]:
            packed, real = next(waiting)
            given = self._slicer(packed)

            def finished(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
                log_probs, entropy = self._head(hidden, given, packed, chosen(packed).nonzero()[:, 0])
                loss, kept = finish(log_probs, entropy, packed, real)
                # Three, of which the second would count tokens: of two, Megatron scales the loss by context-parallel
                # size and micro-batches.
                return loss, torch.zeros((), dtype=torch.int), kept

            return model(given.tokens, given.positions, given.pack), finished

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

    def _zero_gradients(self) -> None:
        self._optimizer.zero_grad()

    def _reduce_gradients(self) -> None:
        # Without a number of tokens, which Megatron would divide by.
        finalize_model_grads([self._ddp], None)

    def _clip(self, loss: Tensor, normalizer: float) -> float:
        self._state.wait()
        return self._optimizer.clip(loss, normalizer)

    def _move_weights(self, lr: float) -> None:
        self._optimizer.step(lr)

    def _rehearse(self, loss: Tensor) -> None:
        self._state.wait()
        self._optimizer.rehearse(loss)

    def _shards(self) -> list[Shard]:
        # Heads of q, k and v lie apart, by groups, and so are several shards of a tensor.
        parts = (part for name, p in self._named.items() for part in self._mapping.parts(name, p.detach()))
        return [Shard(part.name, part.start, part.view) for part in parts]

    def _initialize_parallel(self) -> None:
        seed = self._spec.seed + self._spec.rank
        torch.manual_seed(seed)
        parallel_state.initialize_model_parallel(
            **parallel_sizes(self._config),
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(seed)

    def _read_shaped(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Fill tensors that are shaped like the parameters from a Hugging Face folder."""
        files = hf_folder.WeightFiles(folder)
        for name, tensor in weights.items():
            read(self._mapping.parts(name, tensor), files.part)

    def _read_mains(self) -> None:
        """Read the float32 weights that are updated from a folder of float32: Megatron makes them of rounded ones."""
        files = hf_folder.WeightFiles(self._folder)
        if self._dtype == torch.float32 or files.dtype(self._table.sent[0].name) != torch.float32:
            return
        for name, parameter in self._named.items():
            if slot := self._optimizer.slots.get(parameter):
                whole = torch.empty(parameter.shape, dtype=torch.float32)
                read(self._mapping.parts(name, whole), files.part)
                slot.main.copy_(whole.view(-1)[slot.start : slot.stop])

    def _saved(self, *, moments: bool = True) -> dict[str, TensorShard]:
        return checkpoint.saved(self._stage, self._updates, moments)

    def _load_checkpoint(self, folder: Path) -> None:
        checkpoint.load(folder, self._stage, self._updates)


TRAINER = MegatronTrainer
