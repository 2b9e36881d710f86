"""Parameter table of a model: one row for each tensor on disk, with its location in the model's parameters.

Names are those in the folder. Locations come from transformers' conversion of a checkpoint, which is reversed on meta
tensors: each tensor on disk is then a view of one parameter or buffer, a rectangular part called box. A conversion that
computes new values is refused. Reading, sharding, refit, checkpoints and export all use this table.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlctl.config.errors import ModelError
from rlctl.models.adapters import AdapterTensor

Shape = tuple[int, ...]
# (name, shape, dtype) of each tensor.
Layout = list[tuple[str, Shape, str]]
# Names of tensors on disk that a text model may ignore: draft heads, vision, audio, computed tables.
_LEFT_ALONE = re.compile(
    r"(^|.*\.)(mtp|nextn)\..*|(.*[._])?(vision|visual|image|audio|video|multi_modal|multimodal|mm)[._].*"
    r"|.*rotary_emb\.inv_freq|.*\.position_ids"
)


@dataclass(frozen=True)
class TensorRow:
    """One tensor on disk, and its box in a parameter or buffer (the target)."""

    name: str
    # Shape on disk.
    shape: Shape
    # Dtype on disk, for example bfloat16; None if the folder has no weights.
    dtype: str | None
    # Name of a parameter or persistent buffer of the model. None: not in the text model; an export copies the
    # tensor.
    target: str | None
    # whole: shape of the target. start, size: begin and extent of the box in the target.
    whole: Shape = ()
    start: Shape = ()
    size: Shape = ()
    buffer: bool = False
    # True for weights under adapters, which are not trained.
    frozen: bool = False

    @property
    def is_trained(self) -> bool:
        """True if the tensor is trained. Checkpoints save trained tensors."""
        return self.is_sent and not self.buffer

    @property
    def is_sent(self) -> bool:
        """True if refits and exports contain the tensor: a parameter or buffer of the model that is not frozen."""
        return self.target is not None and not self.frozen

    @cached_property
    def axes(self) -> Shape:
        """Dimension of the target for each dimension on disk; -1 for a dimension of size 1 that the target does not
        have.
        """
        long_axes = iter([axis for axis, size in enumerate(self.size) if size != 1])
        return tuple(next(long_axes) if size != 1 else -1 for size in self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the whole target."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.size))

    def view(self, target: Tensor) -> Tensor:
        """Return the tensor in its shape on disk, as a view of the whole target."""
        return target[self.slices].view(self.shape)

    def part(self, piece: Tensor, first: Shape) -> tuple[Shape, Tensor] | None:
        """Return the part of this tensor inside `piece` as (begin on disk, view of `piece`); None if they do not
        overlap.

        piece: a box of the target, for example a rank's shard, that begins at `first` in the target.
        """
        if not self.size:
            # The target is a single number without dimensions.
            return (0,) * len(self.shape), piece.view(self.shape)
        slices = []
        offsets = []
        for row_start, row_size, piece_start, piece_size in zip(self.start, self.size, first, piece.shape):
            begin = max(row_start, piece_start)
            end = min(row_start + row_size, piece_start + piece_size)
            if begin >= end:
                return None
            slices.append(slice(begin - piece_start, end - piece_start))
            offsets.append(begin - row_start)
        overlap = piece[tuple(slices)]
        shape = [1 if axis < 0 else overlap.shape[axis] for axis in self.axes]
        return tuple(0 if axis < 0 else offsets[axis] for axis in self.axes), overlap.view(shape)

    def place(self, start: Shape, extent: Shape) -> tuple[Shape, Shape]:
        """Return (begin, extent) in the target for the part that begins at `start` on disk and has this `extent`."""
        begin = list(self.start)
        size = [1] * len(self.size)
        for axis, offset, count in zip(self.axes, start, extent):
            if axis >= 0:
                begin[axis] += offset
                size[axis] = count
        return tuple(begin), tuple(size)


class ParameterTable:
    """Rows of a model, in the order: parameters, buffers, then tensors that are only copied by an export."""

    def __init__(self, rows: Iterable[TensorRow]) -> None:
        self.rows = tuple(rows)
        self._rows_by_target: dict[str, list[TensorRow]] = {}
        for row in self.rows:
            if row.target is not None:
                self._rows_by_target.setdefault(row.target, []).append(row)

    @cached_property
    def by_name(self) -> dict[str, TensorRow]:
        """Name on disk -> row."""
        return {row.name: row for row in self.rows}

    @cached_property
    def is_mixed(self) -> bool:
        """True if the folder has parameters in bfloat16 and others in float32."""
        return {"bfloat16", "float32"} <= {row.dtype for row in self.rows if row.is_trained}

    @property
    def kept_rows(self) -> list[TensorRow]:
        """Rows of tensors that are not in the model. An export copies them from the source."""
        return [row for row in self.rows if row.target is None]

    @property
    def sent_rows(self) -> list[TensorRow]:
        """Rows that a refit sends."""
        return [row for row in self.rows if row.is_sent]

    def rows_of(self, target: str) -> list[TensorRow]:
        """Return the rows of a parameter or persistent buffer. Raises KeyError."""
        return self._rows_by_target[target]

    def holds(self, target: str) -> bool:
        """Return True if a tensor on disk belongs to this parameter or buffer."""
        return target in self._rows_by_target

    def sends(self, target: str) -> bool:
        """Return True if a refit sends this parameter or buffer."""
        return any(row.is_sent for row in self._rows_by_target.get(target, ()))

    def with_adapters(self, adapters: Iterable[AdapterTensor]) -> "ParameterTable":
        """Return the table of the model with adapters: the same rows, frozen, then a row for each adapter tensor."""
        rows = [replace(row, frozen=True) for row in self.rows]
        for adapter in adapters:
            rows.append(_whole_row(adapter.name, adapter.shape, dtype="float32", target=adapter.name))
        return ParameterTable(rows)

    def views(self, target: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (name on disk, view of `tensor`) for each row of `target`. tensor: the whole parameter or buffer."""
        for row in self._rows_by_target[target]:
            yield row.name, row.view(tensor)


def _whole_row(name: str, shape: Shape, dtype: str | None, target: str, buffer: bool = False) -> TensorRow:
    """Return the row of a tensor that fills its whole target."""
    return TensorRow(
        name=name,
        shape=shape,
        dtype=dtype,
        target=target,
        whole=shape,
        start=(0,) * len(shape),
        size=shape,
        buffer=buffer,
    )


def persistent_buffers(lm: Any) -> dict[str, Tensor]:
    """Return name -> buffer, of the buffers that checkpoints contain."""
    computed: set[str] = set()
    for path, module in lm.named_modules():
        computed |= {f"{path}.{name}" for name in module._non_persistent_buffers_set}
    return {name: buffer for name, buffer in lm.named_buffers() if name not in computed}


def tensors_of(lm: Any) -> dict[str, Tensor]:
    """Return name -> tensor, of parameters and persistent buffers. A tied head is left out."""
    head = lm.get_output_embeddings()
    embedding = lm.get_input_embeddings()
    is_tied = head is not None and bool(getattr(lm.config, "tie_word_embeddings", False)) and head is not embedding
    tensors: dict[str, Tensor] = {}
    for name, parameter in lm.named_parameters():
        is_tied_head = is_tied and parameter is head.weight and parameter is not embedding.weight
        if not is_tied_head:
            tensors[name] = parameter.detach()
    return tensors | persistent_buffers(lm)


def derive_table(lm: Any, disk: Mapping[str, tuple[str, Shape]] | None, folder: object) -> ParameterTable:
    """Derive the table of a language model on the meta device.

    disk: name -> (dtype, shape) of the folder's tensors. None: the folder has no weights, and the rows get
    transformers' names. folder: for messages.

    Raises ModelError with the name of a tensor that is computed by the conversion, belongs to no parameter, or is
    missing on disk.
    """
    tensors = tensors_of(lm)
    buffers = persistent_buffers(lm).keys()
    rows = [replace(row, buffer=row.target in buffers) for row in _converted_rows(lm, tensors)]
    if disk is None:
        return ParameterTable(_sort_rows(rows, tensors))
    rename = _find_renaming(lm, [row.name for row in rows], disk)
    rows_by_target: dict[str, list[TensorRow]] = {}
    for row in rows:
        rows_by_target.setdefault(str(row.target), []).append(replace(row, name=rename(row.name)))
    disk_rows: list[TensorRow] = []
    for target, target_rows in rows_by_target.items():
        # Some folders have a tensor as it is in memory, without transformers' conversion.
        name_in_memory = rename(target)
        if any(row.name not in disk for row in target_rows) and name_in_memory in disk:
            shape = tuple(tensors[target].shape)
            is_buffer = target_rows[0].buffer
            target_rows = [_whole_row(name_in_memory, shape, dtype=None, target=target, buffer=is_buffer)]
        disk_rows += _rows_on_disk(target, target_rows, disk, folder)
    read_names = {row.name for row in disk_rows}
    unread_names = [name for name in disk if name not in read_names]
    return ParameterTable([*_sort_rows(disk_rows, tensors), *_kept_rows(lm, unread_names, disk, folder)])


def _rows_on_disk(
    target: str, rows: list[TensorRow], disk: Mapping[str, tuple[str, Shape]], folder: object
) -> Iterator[TensorRow]:
    """Yield the rows of a target with their dtypes on disk. Raises ModelError for a missing tensor or another shape."""
    missing = [row.name for row in rows if row.name not in disk]
    if missing and rows[0].buffer:
        # A buffer that is not on disk is computed, as transformers does.
        return
    if missing:
        raise ModelError(f"{folder} has no tensor {missing[0]}, which transformers' {target} is read from")
    for row in rows:
        dtype, shape = disk[row.name]
        if shape != row.shape:
            raise ModelError(f"{folder}: {row.name} has shape {shape}, the configuration says {row.shape}")
        yield replace(row, dtype=dtype)


def _kept_rows(lm: Any, names: list[str], disk: Mapping[str, tuple[str, Shape]], folder: object) -> Iterator[TensorRow]:
    """Yield a row for each tensor on disk that is not in the model. Raises ModelError for a tensor that may not be
    ignored.
    """
    patterns = getattr(lm, "_keys_to_ignore_on_load_unexpected", None) or ()
    head = next((name for name, module in lm.named_modules() if module is lm.get_output_embeddings()), None)
    for name in names:
        if lm.config.tie_word_embeddings and head and name.endswith(f"{head}.weight"):
            # A tied head is a copy of the embedding, which an export leaves out.
            continue
        if not _LEFT_ALONE.fullmatch(name) and not any(re.search(pattern, name) for pattern in patterns):
            raise ModelError(
                f"{folder}: {name} is no part of transformers' {type(lm).__name__}, which would leave it untrained; "
                "needed: a release of transformers that reads it"
            )
        dtype, shape = disk[name]
        yield TensorRow(name, shape, dtype, target=None)


def _sort_rows(rows: list[TensorRow], tensors: Mapping[str, Tensor]) -> list[TensorRow]:
    order = {name: number for number, name in enumerate(tensors)}
    return sorted(rows, key=lambda row: (order[str(row.target)], row.start))


def _find_renaming(lm: Any, names: list[str], disk: Mapping[str, tuple[str, Shape]]) -> Callable[[str], str]:
    """Return the function on names under which most names are on disk: identity, or a prefix for a text model in a
    larger one.

    transformers handles such a prefix only for models that it loaded itself.
    """
    base_prefix = f"{lm.base_model_prefix}."

    def insert_part(name: str) -> str:
        return f"{base_prefix}language_model.{name.removeprefix(base_prefix)}" if name.startswith(base_prefix) else name

    def prepend_part(name: str) -> str:
        return f"language_model.{name}"

    choices: list[Callable[[str], str]] = [str, insert_part, prepend_part]
    return max(choices, key=lambda rename: sum(rename(name) in disk for name in names))


class _Views(TorchFunctionMode):
    """Mode in which `contiguous` and `clone` return their tensor without a copy, so that each result is a view of its
    source.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (Tensor.contiguous, Tensor.clone, torch.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def _converted_rows(lm: Any, tensors: Mapping[str, Tensor]) -> Iterator[TensorRow]:
    """Yield a row for each tensor of a checkpoint, with transformers' names. Raises ModelError."""
    from transformers.core_model_loading import revert_weight_conversion

    with torch.no_grad(), _Views():
        converted = revert_weight_conversion(lm, dict(tensors))
    # A view has the storage of its tensor, on the meta device too.
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}
    for name, view in converted.items():
        target = owners.get(view.untyped_storage()._cdata)
        box = None if target is None else _box_of_view(tensors[target], view)
        if target is None or box is None:
            raise ModelError(
                f"model_type {lm.config.model_type}: transformers computes {name} when it writes a checkpoint; "
                "needed: a conversion that only cuts and renames"
            )
        start, size = box
        yield TensorRow(
            name=name,
            shape=tuple(view.shape),
            dtype=None,
            target=target,
            whole=tuple(tensors[target].shape),
            start=start,
            size=size,
        )


def _box_of_view(tensor: Tensor, view: Tensor) -> tuple[Shape, Shape] | None:
    """Return (begin, extent) of a view in its contiguous tensor; None if the view is no box, for example transposed."""
    # In a contiguous tensor each long dimension has its own stride.
    axis_of_stride = {}
    for axis, (stride, count) in enumerate(zip(tensor.stride(), tensor.shape)):
        if count > 1:
            axis_of_stride[stride] = axis
    size = [1] * tensor.ndim
    last_axis = -1
    for stride, count in zip(view.stride(), view.shape):
        if count > 1:
            axis = axis_of_stride.get(stride, -1)
            if axis <= last_axis:
                return None
            size[axis] = count
            last_axis = axis
    # The offset of the view gives its first index in each dimension.
    start = []
    offset = view.storage_offset()
    for stride in tensor.stride():
        start.append(offset // stride if stride else 0)
        offset %= stride or 1
    is_inside = all(begin + count <= length for begin, count, length in zip(start, size, tensor.shape))
    return (tuple(start), tuple(size)) if is_inside and offset == 0 else None
