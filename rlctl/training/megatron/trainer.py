"""One rank of the Megatron-core trainer, with tensor, pipeline, context, expert and data parallelism.

The last pipeline stage computes the loss. Its tensor- and context-parallel ranks all get equal values of the loss. Each
rank computes the gradient of its part, and only the first rank counts the metrics. Gradients are summed over data- and
context-parallel ranks once, at the end of an update. Megatron can overlap this reduction with the backward pass of the
last micro-batch of a schedule. The overlap is off, because an update may consist of several schedules, and a schedule
does not know if it is the last.
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
from rlctl.preflight.declared_columns import Role
from rlctl.preflight.memory import residency
from rlctl.refit.weight_source import Shard
from rlctl.training.interface import Loss, LossOutput, MicroBatch
from rlctl.training.megatron import checkpoint
from rlctl.training.megatron.emulation import Emulation
from rlctl.training.megatron.mapping import Exporter, Mapping, read_parts
from rlctl.training.megatron.model import build_policy, parallel_sizes
from rlctl.training.megatron.optimizer import Optimizer, gradients
from rlctl.training.megatron.stage_io import Head, PackSlicer
from rlctl.training.offload import OffloadManager
from rlctl.training.packing import Packed, pack, token_batch
from rlctl.training.rank import TrainerRank
from rlctl.training.rank_checkpoint import TensorShard
from rlctl.training.spec import TrainerSpec
from rlctl.training.update import MetricAccumulator

# (log-probs, entropy, the pack, true if the pack contains a sequence) -> loss, and an output that the pass returns.
Finish = Callable[[Tensor, Tensor, Packed, bool], tuple[Tensor, Any]]


class MegatronTrainer(TrainerRank):
    """This rank's pipeline stage of the policy, with its optimizer.

    Consecutive rank numbers are tensor-parallel ranks of one group. Context, data and pipeline groups follow in this
    order.
    """

    saves_live_tensors = False

    def __init__(self, spec: TrainerSpec) -> None:
        """Join the process groups and load the model.

        Raises ValueError for a model that Megatron does not train, and for an optimizer on the host without bfloat16.
        """
        config = spec.config
        megatron = megatron_of(config)
        problem = cpu_offload_problem(config.dtype)
        if megatron.optimizer_cpu_offload and problem:
            raise ValueError(f"trainer.megatron.optimizer_cpu_offload {problem}")
        super().__init__(spec)
        self._weights_dtype = config.dtype
        self._emulation = Emulation()
        self._emulation.start()
        self._initialize_parallel()
        self._policy = build_policy(self._lm.config, self._facts.sizes, config, self._dtype, self._device)
        self._parameters = dict(self._policy.named_parameters())
        self._mapping = Mapping(self._policy, self._lm.config, self._table)
        for name, parameter in self._parameters.items():
            # Megatron sets this mark only when it initializes weights at random. In the gradient norm it counts
            # unmarked parameters on the first tensor-parallel rank only.
            parameter.tensor_model_parallel = not self._mapping.is_replicated(name)  # type: ignore[attr-defined]
        self._read_shaped(self._folder, self._live_weights(below_adapters=False))
        # Gradients are reduced once, at the end of the update. Because of `calculate_per_token_loss` Megatron does not
        # scale gradients before, also not those of experts.
        reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self._ddp = DistributedDataParallel(self._policy.config, reduction, self._policy)
        table = residency(config, shared=config.offload_optimizer_for_generation)
        self._state = OffloadManager(table, {"gradients": gradients(self._ddp)})
        # Free device memory before the optimizer state is allocated. An engine that starts on this device then finds
        # the free memory that preflight forecast.
        self.rest()
        self._optimizer = Optimizer(self._ddp, config, self._dtype)
        self._read_mains()
        self._head = Head(self._policy, config, spec.temperature)
        self._slicer = PackSlicer(
            self._lm.model.rotary_emb,
            dtype=self._dtype,
            multiple=megatron.context_parallel_size * megatron.tensor_model_parallel_size,
            rank=parallel_state.get_context_parallel_rank(),
            ranks=megatron.context_parallel_size,
        )
        self._exporter = Exporter(self._parameters, self._mapping, self._device)
        if not megatron.optimizer_cpu_offload:
            self._state.add("optimizer", self._optimizer.device_state())
        self._stage = checkpoint.Stage(
            parameters=self._parameters,
            mapping=self._mapping,
            optimizer=self._optimizer,
            mirrored=self._exporter.mirrored,
            at_hand=self._state.at_hand,
        )
        # Free device memory again: engines start now, or measure the free memory before the first step.
        self.rest()

    def export(self, dtype: str | None = None) -> Iterator[tuple[str, Tensor]]:
        return self._exporter.tensors(self.layout(dtype))

    def close(self) -> None:
        parallel_state.destroy_model_parallel()
        super().close()
        self._emulation.stop()

    def _log_probs(self, micro_batches: list[MicroBatch], role: Role) -> list[list[NDArray[np.float32]]]:
        def collect_log_probs(
            log_probs: Tensor, entropy: Tensor, packed: Packed, has_sequence: bool
        ) -> tuple[Tensor, Tensor]:
            return log_probs.sum(), log_probs if has_sequence else log_probs[:0]

        outputs = self._pass_stages(micro_batches, collect_log_probs, lambda packed: packed.positions, backward=False)
        lengths = [[len(sequence) for sequence in batch] for batch in micro_batches]
        # The last stage has the log-probs of all micro-batches and sends them to the other stages.
        column = torch.cat(outputs) if outputs else torch.empty(sum(map(sum, lengths)), device=self._device)
        if megatron_of(self._config).pipeline_model_parallel_size > 1:
            source = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(column, source, parallel_state.get_pipeline_model_parallel_group())
        batch_ends = np.cumsum([sum(batch) for batch in lengths])[:-1]
        log_probs_of_batches: list[list[NDArray[np.float32]]] = []
        for batch_column, batch_lengths in zip(np.split(column.cpu().numpy(), batch_ends), lengths):
            parts = np.split(batch_column, np.cumsum(batch_lengths)[:-1]) if batch_lengths else []
            log_probs_of_batches.append(parts)
        return log_probs_of_batches

    def _live_weights(self, below_adapters: bool) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def _read_weights(self, folder: Path, live: dict[str, Tensor]) -> dict[str, Tensor]:
        weights = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in live.items()}
        self._read_shaped(folder, weights)
        return weights

    def _run_passes(
        self, micro_batches: list[MicroBatch], loss: Loss, metrics: MetricAccumulator, *, backward: bool
    ) -> None:
        def compute_loss(
            log_probs: Tensor, entropy: Tensor, packed: Packed, has_sequence: bool
        ) -> tuple[Tensor, LossOutput]:
            if has_sequence:
                output = loss(token_batch(packed, log_probs, entropy))
            else:
                # A loss of 0 that depends on the weights, so that this rank joins the collectives of the backward pass.
                output = LossOutput(log_probs.sum() + entropy.sum())
            return output.loss, output

        outputs = self._pass_stages(micro_batches, compute_loss, lambda packed: packed.mask, backward=backward)
        # Tensor- and context-parallel ranks have equal outputs, so only the first rank counts the metrics.
        if parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0:
            for output in outputs:
                metrics.add(output)

    def _pass_stages(
        self, micro_batches: list[MicroBatch], finish: Finish, marks: Callable[[Packed], Tensor], *, backward: bool
    ) -> list[Any]:
        """Run every micro-batch through all pipeline stages. Return `finish`'s outputs, empty except on the last stage.

        marks: returns one number for each token of a pack, [T]. Log-probs are computed where the number is not 0.
        """
        self._ddp.train(backward)
        packs = ((pack(batch, self._device), bool(batch)) for batch in micro_batches)

        def forward(remaining_packs: Iterator[tuple[Packed, bool]], model: Any) -> tuple[Tensor, Any]:
            packed, has_sequence = next(remaining_packs)
            inputs = self._slicer(packed)

            def finish_pass(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
                log_probs, entropy = self._head(hidden, inputs, packed, marks(packed).nonzero()[:, 0])
                loss, output = finish(log_probs, entropy, packed, has_sequence)
                # The form of Megatron for a loss that is summed over tokens; the second value is a count of tokens and
                # is not used. For a pair Megatron would scale the loss by context-parallel size and micro-batches.
                return loss, torch.zeros((), dtype=torch.int), output

            return model(inputs.tokens, inputs.positions, inputs.pack), finish_pass

        outputs: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=packs,
            model=[self._ddp],
            num_microbatches=len(micro_batches),
            seq_length=self._config.micro_batch_tokens,
            micro_batch_size=1,
            forward_only=not backward,
        )
        return outputs

    def _zero_gradients(self) -> None:
        self._optimizer.zero_grad()

    def _reduce_gradients(self) -> None:
        # None as the number of tokens, by which Megatron would otherwise divide the gradients.
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
        # A Hugging Face tensor may have several shards. For example, the q heads lie apart in Megatron's fused matrix.
        shards = []
        for name, parameter in self._parameters.items():
            for part in self._mapping.parts(name, parameter.detach()):
                shards.append(Shard(part.name, part.start, part.view))
        return shards

    def _initialize_parallel(self) -> None:
        seed = self._spec.seed + self._spec.rank
        torch.manual_seed(seed)
        parallel_state.initialize_model_parallel(
            **parallel_sizes(self._config),
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(seed)

    def _read_shaped(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Fill `weights` from a Hugging Face folder. weights: parameter name -> tensor of the parameter's shape."""
        files = hf_folder.WeightFiles(folder)
        for name, tensor in weights.items():
            read_parts(self._mapping.parts(name, tensor), files.part)

    def _read_mains(self) -> None:
        """Read the optimizer's main weights from a float32 folder, unrounded.

        Megatron creates main weights from the parameters, which are rounded to the compute dtype. Does nothing if the
        compute dtype is float32, or the folder is not.
        """
        files = hf_folder.WeightFiles(self._folder)
        if self._dtype == torch.float32 or files.dtype(self._table.sent_rows[0].name) != torch.float32:
            return
        for name, parameter in self._parameters.items():
            if slot := self._optimizer.slots.get(parameter):
                whole_tensor = torch.empty(parameter.shape, dtype=torch.float32)
                read_parts(self._mapping.parts(name, whole_tensor), files.part)
                slot.main.copy_(whole_tensor.view(-1)[slot.start : slot.stop])

    def _state_shards(self, *, moments: bool = True) -> dict[str, TensorShard]:
        return checkpoint.copy_shards(self._stage, self._updates, moments)

    def _load_checkpoint(self, folder: Path) -> None:
        checkpoint.load(folder, self._stage, self._updates)


TRAINER = MegatronTrainer
