"""One rank of the trainer group, for every backend: the shared part, and the methods that a backend adds.

All ranks call every method together: there are collectives inside. Losses come in as picklable callables (see
`interface.Loss`), so that the algorithms stay out of here.

A rank's process imports this module before its environment is set, and the driver imports it too. Modules that import
torch's compiler (2.5 s) are therefore imported where they are used.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rlctl.config.run_weights import is_adapter
from rlctl.models.layer_kinds import suspects
from rlctl.models.parameter_table import Layout, ParameterTable, TensorRow
from rlctl.preflight.backend import backend_of, trainer_module
from rlctl.preflight.declared_columns import Role
from rlctl.refit.weight_source import Shard
from rlctl.training.interface import Loss, MicroBatch, Totals
from rlctl.training.lora import needs_attention, require_moved
from rlctl.training.metric_rows import GRAD_NORM, LEARNING_RATE
from rlctl.training.offload import OffloadManager, process_memory
from rlctl.training.rank_checkpoint import ExportJob, RankSave, SaveBegun, Shards, TensorShard, WeightsJob
from rlctl.training.spec import TrainerSpec
from rlctl.training.swapped import SwappedRoles
from rlctl.training.update import MetricAccumulator, learning_rate
from rlctl.utils.devices import usable_cores
from rlctl.utils.ports import met_at


class TrainerRank(ABC):
    """The policy, its optimizer and, once asked for, the weights of other roles.

    An update is `accumulate` for each of its parts, then `step`; `train` is both for an update of one part. From the
    first `accumulate` to `step` or `discard` only `accumulate`, `layout`, `shards` and `memory` may be called.
    """

    # True if `_state_shards` returns live tensors, which a later step changes; False if it returns copies on the host.
    saves_live_tensors = True
    # Set by the backend's constructor: the movable state, and the dtype of the weights that `export` reads.
    _state: OffloadManager
    _weights_dtype: str

    def __init__(self, spec: TrainerSpec) -> None:
        """Join the process group. Raises ValueError for a model that the backend does not train."""
        from rlctl.models.derive import load_facts, table_of
        from rlctl.models.hf_folder import Companions, WeightFiles, check_tied
        from rlctl.models.meta_model import skeleton

        self._spec = spec
        self._config = spec.config
        self._device = torch.device(spec.device)
        self._dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[spec.config.dtype]
        self._folder = Path(spec.model_path)
        self._facts = load_facts(self._folder)
        self._lm = skeleton(self._folder, self._device, self._facts.sizes.one_sequence_a_row is None)
        self._table = table_of(self._lm, self._folder)
        check_tied(self._folder, self._table, self._facts)
        # Folder of the frozen weights below adapters.
        self._frozen_folder = None
        if adapters := spec.config.adapters:
            self._table = self._table.with_adapters(adapters.tensors)
            self._frozen_folder = spec.model_path
        for finding in backend_of(spec.config).check_model(spec.config, self._facts.sizes):
            raise ValueError(finding.message)
        # Exports take these from the model's folder. It may be gone when a checkpoint is made.
        tokenizer = spec.tokenizer_path if spec.tokenizer_path != spec.model_path else None
        self._companions = Companions.read(self._folder, tokenizer) if spec.rank == 0 else None
        self._source = WeightFiles(self._folder) if self._table.kept_rows else None
        self._join_group()
        self._swapped = SwappedRoles(
            self._lm, spec.roles, self._frozen_folder, live=self._live_weights, read=self._read_weights
        )
        # Updates made; the learning rate follows this count.
        self._updates = 0
        # True once an optimizer step has moved every adapter.
        self._all_moved = spec.config.adapters is None
        # True if the open update needs attention on this rank.
        self._attends = False
        # This rank's part of the newest checkpoint.
        copies = spec.copies if self.saves_live_tensors else "nothing"
        self.saving = RankSave(spec.rank, spec.world, self._device, copies)
        # Metrics of the open update.
        self._metrics: MetricAccumulator | None = None

    def _join_group(self) -> None:
        """Join torch's process group; on CPU with this rank's share of the cores."""
        spec = self._spec
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            backend = "cpu:gloo,cuda:nccl"
        else:
            torch.set_num_threads(self._config.threads or max(1, usable_cores() // spec.world))
            backend = "gloo"
        store = met_at(spec.init_method, spec.rank, spec.world)
        dist.init_process_group(backend, store=store, rank=spec.rank, world_size=spec.world)

    # Log-probs.

    def log_probs(self, micro_batches: list[MicroBatch], role: Role = "policy") -> list[list[NDArray[np.float32]]]:
        """Return the log-probs float32 [T] of every sequence, in the order given, 0 at its first token.

        role: the model whose weights are used. The first call for a role other than the policy loads its weights.
        Nothing keeps a gradient, and no state changes. Raises ValueError for a role that `TrainerSpec.roles` lacks.
        """
        with self._weights_of(role), torch.no_grad():
            self._state.enter("log_probs")
            return self._log_probs(micro_batches, role)

    def values(self, micro_batches: list[MicroBatch], role: Role = "policy") -> list[list[NDArray[np.float32]]]:
        """Return the outputs of the value head float32 [T] of every sequence, in the order given, one at each token.

        The output at a token is the value of the tokens up to and including it. Otherwise as `log_probs`. Raises
        ValueError for a model without value head, and for a backend without one.
        """
        raise ValueError(f"trainer.backend={self._config.backend} computes no values")

    def exact_log_probs(self, micro_batches: list[MicroBatch]) -> list[list[NDArray[np.float32]]] | None:
        """Return `log_probs` in float32 of the weights as they are rounded; None for a backend that cannot."""
        return None

    def _weights_of(self, role: Role) -> AbstractContextManager[None]:
        """Have the weights of `role` on the device for a block, in place of the live ones if they are swapped."""
        return nullcontext() if role == "policy" else self._swapped.in_place(role)

    # Updates.

    def train(self, micro_batches: list[MicroBatch], loss: Loss, totals: Totals) -> dict[str, float]:
        """Make one update of these samples and those of `accumulate`; see `step`. All ranks have equally many."""
        self.accumulate(micro_batches, loss)
        return self.step(loss, totals)

    def accumulate(self, micro_batches: list[MicroBatch], loss: Loss) -> None:
        """Add the gradients and metrics of some samples to the open update; without one, open it."""
        if not micro_batches:
            return
        self._state.enter("train")
        if self._metrics is None:
            self._zero_gradients()
            self._metrics = MetricAccumulator()
            self._attends = False
        self._attends |= needs_attention(micro_batches)
        try:
            self._run_passes(micro_batches, loss, self._metrics, backward=True)
        except BaseException:
            self.discard()
            raise

    def step(self, loss: Loss, totals: Totals) -> dict[str, float]:
        """End the update: reduce the gradients, divide them by `loss.normalizer(totals)`, clip, make an optimizer step.

        totals: over all ranks and parts of the update. Returns metrics that are equal on every rank: the loss's,
        train/grad_norm (divided, before clipping) and train/lr. offload/* are this rank's own, since the update before.
        Returns nothing, and makes no optimizer step, if nothing was accumulated or the normalizer is 0. A norm of
        exactly 0 makes no optimizer step either: AdamW's momentum and decay would move weights that nothing pulls.
        There is no train/lr then.

        Raises FloatingPointError, on every rank and with nothing updated, for a loss or a gradient norm that is not
        finite. Raises RuntimeError on every rank after the first optimizer step that should move every adapter if it
        left one as it was.
        """
        metrics = self._metrics
        self._metrics = None
        if metrics is None:
            return {}
        try:
            normalizer = loss.normalizer(totals)
            if not normalizer:
                return {}
            lr = learning_rate(self._updates, self._config.optimizer, self._spec.total_updates)
            self._reduce_gradients()
            norm = self._clip(metrics.loss(self._device), normalizer)
            if norm:
                rate = 0.0 if self._all_moved else lr
                with require_moved(self._table.sent_rows, self._shards, rate, self._attends) as is_checked:
                    self._move_weights(lr)
                self._all_moved |= is_checked
        finally:
            self._zero_gradients()
        self._updates += norm > 0
        if norm and self.saving.needs_preparing:
            state = self._state_shards()
            self.saving.prepare(state, self._select_exported(state))
        metrics_of_update = metrics.join()
        metrics_of_update[GRAD_NORM.name] = norm
        if norm:
            metrics_of_update[LEARNING_RATE.name] = lr
        return metrics_of_update | self._state.take_metrics()

    def discard(self) -> None:
        """Forget the gradients of `accumulate`."""
        if self._metrics is not None:
            self._metrics = None
            self._zero_gradients()

    def warm_up(self, micro_batches: list[MicroBatch], loss: Loss) -> None:
        """Go through an update without making it, so that first uses compile, cache and allocate now.

        Weights, optimizer state and random number generators stay as they are, to the last bit.
        """
        self._state.enter("train")
        metrics = MetricAccumulator()
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            self._run_passes(micro_batches, loss, metrics, backward=True)
        self._reduce_gradients()
        metrics.join()
        if self._updates == 0:
            # With gradients, moments and a rate of zero a step changes its own counts alone.
            self._rehearse(torch.zeros((), dtype=torch.float64, device=self._device))
        self._zero_gradients()

    def evaluate(self, micro_batches: list[MicroBatch], loss: Loss) -> dict[str, float]:
        """Return the loss's metrics without an update."""
        metrics = MetricAccumulator()
        with torch.no_grad():
            self._run_passes(micro_batches, loss, metrics, backward=False)
        return metrics.join()

    # Weights.

    def shards(self) -> list[Shard]:
        """Return this rank's part of the weights under Hugging Face names: its own memory, no copy, no collective."""
        # Keep the gradients: an engine may be rebuilt between two parts of an update.
        if self._metrics is None:
            self._state.enter("refit")
        return self._shards()

    def layout(self, dtype: str | None = None) -> Layout:
        """Return (Hugging Face name, shape, dtype) of everything `export` yields, in its order; no data is moved.

        Tensors that transformers keeps in float32 stay in float32. So do tensors of float32 in a folder that has
        bfloat16 too. Buffers have their dtype on disk. With adapters the adapters are everything, under the names of
        `AdapterTensor`.
        """
        weights_dtype = dtype or self._weights_dtype
        return [(row.name, row.shape, self._dtype_of(row, weights_dtype)) for row in self._table.sent_rows]

    def _table_of(self, folder: Path) -> ParameterTable:
        """Return the table that a folder of the same architecture has for its names."""
        from rlctl.models.derive import table_of
        from rlctl.models.meta_model import language_model

        return self._table if folder == self._folder or is_adapter(folder) else table_of(language_model(folder), folder)

    def _dtype_of(self, row: TensorRow, weights_dtype: str) -> str:
        if self._facts.keeps_float32(str(row.target)) or (row.dtype == "float32" and self._table.is_mixed):
            return "float32"
        return row.dtype if row.buffer and row.dtype else weights_dtype

    @abstractmethod
    def export(self, dtype: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors under Hugging Face checkpoint names, one alive at a time, in lockstep on every rank.

        dtype: cast to this ("bfloat16", "float32"); None keeps the weights' own. A tensor may be the weights' own
        memory: read it before asking for the next.
        """

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, number of updates and RNG into `folder`, loadable on any number of ranks.

        All ranks must see the same folder: they write side by side. Raises OSError.
        """
        self.begin_save(folder, None, None, beside_training=False)
        self.saving.wait_for_files(None)
        dist.barrier()

    def begin_save(self, folder: Path, export: Path | None, dtype: str | None, beside_training: bool) -> SaveBegun:
        """Begin to write `save`'s files, and `export_folder`'s into `export`, on a thread that `saving` waits for.

        beside_training: copy the state first, if the host has room. Otherwise it must not change until it is written.
        """
        self._reach_state()
        state = self._state_shards()
        weights = self._select_exported(state) if export else {}
        job = partial(self._export_job, export, dtype=dtype) if export else None
        return self.saving.begin(
            folder, state, self._updates, weights, job, beside_training and self.saves_live_tensors
        )

    def load(self, folder: Path) -> None:
        """Read the files of any backend's `save`. Raises FileNotFoundError if `folder` holds no state, OSError."""
        from rlctl.training.sharded_checkpoint import load_progress

        self._reach_state()
        self._updates = load_progress(folder)
        self._all_moved = self._config.adapters is None or self._updates > 0
        self._load_checkpoint(folder)

    def _reach_state(self) -> None:
        """Have all state where the host may read and write it."""
        self._state.enter("checkpoint")
        self._state.wait()
        self._state.settle()

    def export_folder(self, folder: Path, dtype: str | None = None) -> None:
        """Write a Hugging Face folder (config.json, tokenizer, safetensors) that transformers and vLLM load.

        Each rank writes its rows as byte ranges; nothing is gathered. All ranks return when it is whole.
        Configuration and tokenizer files are the model's own. dtype: None for the compute dtype.
        """
        self._state.wait()
        self._state.settle()
        job = self._export_job(folder, self._select_exported(self._state_shards(moments=False)), dtype)
        job.write()
        dist.barrier()

    def _select_exported(self, state: Shards) -> Shards:
        """Return the weights of an export, by their names in memory, as this rank writes them."""
        weights = {name.removeprefix("model."): shard for name, shard in state.items() if name.startswith("model.")}
        return {**weights, **self._buffer_shards()}

    def _export_job(self, folder: Path, weights: Shards, dtype: str | None) -> ExportJob:
        """Return the job of writing these weights in `dtype`, and the source's tensors that the model does not hold."""
        layout = self.layout(dtype or self._config.dtype)
        layout += [(row.name, row.shape, str(row.dtype)) for row in self._table.kept_rows]
        return WeightsJob(
            folder=folder,
            companions=self._companions,
            source=self._source,
            layout=layout,
            table=self._table,
            weights=weights,
            rank=self._spec.rank,
            world=self._spec.world,
        )

    # Memory and facts.

    def rest(self) -> None:
        """Give unused memory to engines on the device, and move states to the host as `memory.residency()` says."""
        self._state.enter("generate")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def memory(self) -> dict[str, float]:
        """Return `process_memory()` and the bytes moved so far between device and host by the table of
        `memory.residency()`: moved_to_host, moved_to_device."""
        return process_memory(self._device) | self._state.totals()

    def info(self) -> dict[str, Any]:
        """Return facts by name. active_parameters: weights that a token is multiplied with, without the embedding."""
        cuda = self._device.type == "cuda"
        return {
            "parameters": self._facts.sizes.parameters,
            "active_parameters": self._facts.sizes.active_parameters,
            "adapter_parameters": self._config.adapters.parameters if self._config.adapters else 0,
            "vocab_size": self._facts.sizes.vocab,
            "dtype": self._config.dtype,
            "device": str(self._device),
            "device_name": torch.cuda.get_device_name(self._device) if cuda else "cpu",
        }

    def suspects(self, side: str = "on both sides") -> str:
        """Return a sentence with the parts of the model that an engine may compute differently, see `suspects`."""
        return suspects(self._facts.kinds, self._facts.sizes.experts, side)

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()

    # The methods that a backend adds.

    @abstractmethod
    def _log_probs(self, micro_batches: list[MicroBatch], role: Role) -> list[list[NDArray[np.float32]]]:
        """Do the work of `log_probs`. role: a resident's own model computes; any other role has the live weights."""

    @abstractmethod
    def _live_weights(self, below_adapters: bool) -> dict[str, Tensor]:
        """Return this rank's live weights by the backend's own names, in its own memory.

        below_adapters: the frozen weights that adapters are added to, not the adapters.
        """

    @abstractmethod
    def _read_weights(self, folder: Path, live: dict[str, Tensor]) -> dict[str, Tensor]:
        """Read the weights of a Hugging Face folder, cut and named as `live`, onto the host in the compute dtype."""

    @abstractmethod
    def _run_passes(
        self, micro_batches: list[MicroBatch], loss: Loss, metrics: MetricAccumulator, *, backward: bool
    ) -> None:
        """Pass every micro-batch forwards and, if `backward`, back; add to `metrics` the outputs this rank counts.

        An empty micro-batch joins every collective and counts nothing.
        """

    @abstractmethod
    def _zero_gradients(self) -> None:
        """Forget all gradients."""

    @abstractmethod
    def _reduce_gradients(self) -> None:
        """Add the gradients up over ranks, where the backward pass has not done so."""

    @abstractmethod
    def _clip(self, loss: Tensor, normalizer: float) -> float:
        """Divide and clip the gradients; return their norm, equal on all ranks, see `update.divide_and_clip`.

        loss: this rank's share, float64; ranks' shares add up. State that was away may still be on its way back.
        """

    @abstractmethod
    def _move_weights(self, lr: float) -> None:
        """Make an optimizer step of the gradients that `_clip` left."""

    @abstractmethod
    def _rehearse(self, loss: Tensor) -> None:
        """Make a step at rate 0 of gradients that are all 0, and set the step counts back to 0."""

    @abstractmethod
    def _shards(self) -> list[Shard]:
        """Do the work of `shards`."""

    @abstractmethod
    def _state_shards(self, *, moments: bool = True) -> dict[str, TensorShard]:
        """Return weights and optimizer state by their names in a checkpoint, as this rank writes them.

        Ranks that hold the same boxes divide them: no box is written twice. Names: model.NAME, exp_avg.NAME,
        exp_avg_sq.NAME and step.NAME, for the model's own parameter names. moments: False for the weights alone.
        """

    def _buffer_shards(self) -> dict[str, TensorShard]:
        """Return the buffers of the model's folder that this rank writes into an export."""
        return {}

    @abstractmethod
    def _load_checkpoint(self, folder: Path) -> None:
        """Read weights and optimizer state after `updates` updates."""


def make_trainer(spec: TrainerSpec) -> TrainerRank:
    """Build the rank's trainer: `TRAINER` of rlctl.training.BACKEND.trainer. One that fails leaves no process group."""
    trainer_class: type[TrainerRank] = importlib.import_module(trainer_module(spec.config.backend)).TRAINER
    try:
        return trainer_class(spec)
    except Exception:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
