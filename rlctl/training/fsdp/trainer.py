"""One rank of the FSDP2 trainer, on CPU (gloo) or GPU (NCCL)."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlctl.models.adapter_folder import check_trainable, open_weights
from rlctl.models.meta_model import text_in_whole
from rlctl.models.weight_headers import digest_of_weights
from rlctl.preflight.declared_columns import Role
from rlctl.preflight.memory import residency
from rlctl.preflight.roles import TEACHER
from rlctl.refit.weight_source import Shard
from rlctl.training.fsdp.columns import TokenColumns, compute_log_probs, compute_values
from rlctl.training.fsdp.float32_pass import in_float32
from rlctl.training.fsdp.mesh import add_over_replicas, make_meshes
from rlctl.training.fsdp.model import (
    FsdpPolicy,
    Named,
    build_policy,
    check_restarts,
    free_gathered,
    local,
    read_shards,
    read_values,
)
from rlctl.training.fsdp.optimizer import MOMENTS, make_optimizer
from rlctl.training.fsdp.rank_shards import RankShards
from rlctl.training.fsdp.resident import build_residents
from rlctl.training.fsdp.teacher_pass import TeacherPass
from rlctl.training.interface import Loss, LossOutput, MicroBatch
from rlctl.training.logits import OutputHead
from rlctl.training.lora import AdapterJob, Base, FirstAdapters
from rlctl.training.offload import OffloadManager
from rlctl.training.packing import pack, token_batch
from rlctl.training.rank import TrainerRank
from rlctl.training.rank_checkpoint import ExportJob, Shards, TensorShard
from rlctl.training.sharded_checkpoint import load_shards
from rlctl.training.spec import TrainerSpec
from rlctl.training.teacher_side import DivergenceTerm, TeacherSide
from rlctl.training.update import MetricAccumulator, clipping, divide_and_clip, gradient_norm


class FsdpTrainer(TrainerRank):
    """Trainer rank with float32 master weights, sharded by rows over the ranks of a replica.

    Every backward pass sums the gradients over the ranks of a replica. The end of an update sums them once over the
    replicas.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        """Join the process group and load the model."""
        super().__init__(spec)
        self._weights_dtype = "float32"
        torch.manual_seed(spec.seed + spec.rank)
        self._mesh, self._replicas = make_meshes(self._device.type, spec.world, spec.config.replicas)
        first = None
        if spec.config.adapters:
            # Read now: the folder may be gone at an export. A class that cannot be built is refused now.
            place = text_in_whole(self._folder, self._facts.decoder)
            self._base = Base(
                name=spec.base_name or spec.model_path,
                digest=digest_of_weights(self._folder),
                linears=self._facts.sizes.linears,
                place=place,
            )
            adapter_folder = Path(spec.adapter_folder) if spec.adapter_folder else None
            if adapter_folder:
                check_trainable(adapter_folder, spec.config.adapters)
            first = FirstAdapters(spec.config.adapters, adapter_folder, spec.seed)
        self._policy = build_policy(
            self._lm,
            facts=self._facts,
            table=self._table,
            folder=self._folder,
            section=spec.config,
            dtype=self._dtype,
            mesh=self._mesh,
            temperature=spec.temperature,
            first=first,
        )
        if self._facts.kinds.states or self._facts.sizes.one_sequence_a_row:
            check_restarts(self._policy, self._device, self._dtype)
        # Parameters that are trained.
        self._parameters: dict[str, nn.Parameter] = {}
        # Tensors that are sent and exported, as they are on this rank.
        sent_tensors: dict[str, Tensor] = {}
        for name, parameter in self._policy.lm.named_parameters():
            if parameter.requires_grad:
                self._parameters[name] = parameter
            # Parameters that transformers freezes, such as corrections of a router, are sent like buffers.
            if parameter.requires_grad or self._table.sends(name):
                sent_tensors[name] = parameter
        for name, buffer in self._policy.lm.named_buffers():
            if self._table.sends(name):
                sent_tensors[name] = buffer
        self._sent_tensors: Named = sent_tensors
        # Frozen parameters below adapters; empty without adapters.
        self._base_tensors: Named = {}
        if first:
            self._base_tensors = {
                name: parameter for name, parameter in self._policy.lm.named_parameters() if not parameter.requires_grad
            }
        self._optimizer = make_optimizer(self._policy.lm, self._parameters, spec.config.optimizer)
        # Only AdamW's two moments are moved, of the states in the residency table: 8 bytes for each parameter.
        # Gradients are freed after each update, and step counts take almost no memory.
        moments = [local(state[key]) for state in self._optimizer.state.values() for key in MOMENTS]
        table = residency(spec.config, shared=spec.config.offload_optimizer_for_generation)
        self._state = OffloadManager(table, {"optimizer": moments})
        self._rank_shards = RankShards(
            sent_tensors=self._sent_tensors,
            parameters=self._parameters,
            optimizer=self._optimizer,
            state=self._state,
            table=self._table,
            mesh=self._mesh,
            replicas=self._replicas,
            is_first=spec.rank == 0,
        )
        self._residents = build_residents(spec, self._device, self._dtype, self._mesh)
        weights = partial(self._weights_of, TEACHER)
        self._teacher = TeacherPass(self._policy, self._residents.get(TEACHER), weights=weights, spec=spec)
        # Engines start meanwhile, or measure the free memory before the first step.
        self.rest()

    def export(self, dtype: str | None = None) -> Iterator[tuple[str, Tensor]]:
        dtypes = {name: dtype_name for name, _, dtype_name in self.layout(dtype)}
        for name, tensor in self._sent_tensors.items():
            cast = tensor.detach().to(getattr(torch, dtypes[self._table.rows_of(name)[0].name]))
            whole_tensor = cast.full_tensor() if isinstance(cast, DTensor) else cast
            yield from self._table.views(name, whole_tensor)

    def _export_job(self, folder: Path, weights: Shards, dtype: str | None) -> ExportJob:
        if self._config.adapters is None:
            return super()._export_job(folder, weights, dtype)
        # Adapters are small: rank 0 writes them whole.
        whole_tensors = {}
        for name, tensor in self.export("float32"):
            if self._spec.rank == 0:
                whole_tensors[name] = tensor.to("cpu", copy=True)
        return AdapterJob(folder, self._config.adapters, self._base, self._companions, whole_tensors)

    def exact_log_probs(self, micro_batches: list[MicroBatch]) -> TokenColumns | None:
        with in_float32(self._policy):
            return self.log_probs(micro_batches)

    def _log_probs(self, micro_batches: list[MicroBatch], role: Role) -> TokenColumns:
        return compute_log_probs(self._model_of(role), micro_batches, self._device)

    def values(self, micro_batches: list[MicroBatch], role: Role = "policy") -> TokenColumns:
        with self._weights_of(role), torch.no_grad():
            self._state.enter("log_probs")
            return compute_values(self._model_of(role), micro_batches, self._device)

    def _model_of(self, role: Role) -> FsdpPolicy:
        """Return the module that computes with the weights of `role`."""
        return self._residents[role].model if role in self._residents else self._policy

    def _weights_of(self, role: Role) -> AbstractContextManager[None]:
        resident = self._residents.get(role)
        return resident.on_device() if resident else super()._weights_of(role)

    def _live_weights(self, below_adapters: bool) -> dict[str, Tensor]:
        tensors = self._base_tensors if below_adapters else self._sent_tensors
        return {name: local(tensor).detach() for name, tensor in tensors.items()}

    def _read_weights(self, folder: Path, live: dict[str, Tensor]) -> dict[str, Tensor]:
        return read_shards(
            open_weights(folder),
            table=self._table_of(folder),
            tensors=self._sent_tensors if live.keys() == self._sent_tensors.keys() else self._base_tensors,
            facts=self._facts,
            dtype=self._dtype,
        )

    def _run_passes(
        self, micro_batches: list[MicroBatch], loss: Loss, metrics: MetricAccumulator, *, backward: bool
    ) -> None:
        term = self._teacher.find_term(loss)
        with closing(self._teacher.run(micro_batches, term, metrics)) as teacher_sides:
            for teacher_side, micro_batch in zip(teacher_sides, micro_batches):
                output = self._run_forward(micro_batch, loss, term, teacher_side)
                if backward:
                    output.loss.backward()  # type: ignore[no-untyped-call]
                metrics.add(output)
        if not backward:
            free_gathered(self._policy)

    def _run_forward(
        self, micro_batch: MicroBatch, loss: Loss, term: DivergenceTerm | None, teacher_side: TeacherSide | None
    ) -> LossOutput:
        """Pass a micro-batch forwards. teacher_side: the teacher's at the same tokens; None without a term."""
        packed = pack(micro_batch, self._device)
        rows = packed.mask.nonzero()[:, 0]

        def read_student(hidden: Tensor, head: OutputHead) -> tuple[Tensor, ...]:
            if self._policy.has_value_head:
                return (read_values(hidden, head),)
            columns = self._policy.read_log_probs(hidden, head, packed.tokens[rows])
            if term is None or teacher_side is None:
                return columns
            return *columns, term.measure(teacher_side, hidden, head)

        columns: tuple[Tensor, ...] = self._policy(packed, rows, read_student)
        if not micro_batch:
            # 0 with a gradient, so that the collectives of the backward pass still run.
            return LossOutput(sum((column.sum() for column in columns), torch.zeros((), device=self._device)))
        zeros = torch.zeros(len(packed.tokens), device=self._device)
        token_columns = [zeros.index_copy(0, rows, column) for column in columns]
        if self._policy.has_value_head:
            return loss(token_batch(packed, log_probs=zeros, entropy=zeros, values=token_columns[0]))
        return loss(token_batch(packed, *token_columns))

    def _zero_gradients(self) -> None:
        self._optimizer.zero_grad()

    def _reduce_gradients(self) -> None:
        """Add the gradients up over replicas: every backward pass has added them up over the ranks of a replica."""
        if self._replicas is not None:
            add_over_replicas(list(self._gradients().values()), self._replicas)

    def _gradients(self) -> dict[str, Tensor]:
        """Return this rank's shards of all gradients, in their own memory."""
        parameters = self._parameters.items()
        return {name: local(parameter.grad) for name, parameter in parameters if parameter.grad is not None}

    def _clip(self, loss: Tensor, normalizer: float) -> float:
        gradients = self._gradients()
        squared = gradient_norm(list(gradients.values())).to(self._device).square()
        if self._replicas and dist.get_rank(self._replicas):
            # All replicas have the same gradients: they count once.
            squared.zero_()
        # The loss is reduced and read together with the norm, which saves a second wait.
        squared_and_loss = torch.stack([squared, loss])
        dist.all_reduce(squared_and_loss)
        total_squared, total_loss = squared_and_loss.tolist()
        norm = math.sqrt(total_squared)
        max_norm = self._config.optimizer.max_grad_norm
        if self._mesh.size() > 1:
            return divide_and_clip(
                list(gradients.values()),
                gradients.items(),
                norm=norm,
                loss=total_loss,
                normalizer=normalizer,
                max_norm=max_norm,
            )
        # The optimizer's own pass divides the gradients, which saves a pass over all gradients.
        divided_norm, factor = clipping(
            gradients.items(), norm=norm, loss=total_loss, normalizer=normalizer, max_norm=max_norm
        )
        self._optimizer.grad_scale = torch.tensor(1 / factor, device=self._device)  # type: ignore[attr-defined]
        return divided_norm

    def _move_weights(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._state.wait()
        self._optimizer.step()

    def _rehearse(self, loss: Tensor) -> None:
        for gradient in self._gradients().values():
            gradient.zero_()
        self._clip(loss, 1.0)
        self._move_weights(0.0)
        for state in self._optimizer.state.values():
            state["step"].zero_()

    def _shards(self) -> list[Shard]:
        return self._rank_shards.sent()

    def _state_shards(self, *, moments: bool = True) -> dict[str, TensorShard]:
        return self._rank_shards.written_state(moments=moments)

    def _buffer_shards(self) -> dict[str, TensorShard]:
        return self._rank_shards.frozen()

    def _load_checkpoint(self, folder: Path) -> None:
        load_shards(folder, self._rank_shards.live(self._parameters))


TRAINER = FsdpTrainer
