"""Parameter table of a model: a row for each tensor of its checkpoint, with its place in memory.

Names are the folder's own. Places come from transformers' conversion of a checkpoint, reversed on meta tensors: each
tensor on disk is then a view, a rectangular part (box), of one parameter or buffer. A conversion that computes is
refused. Reading, sharding, refit, checkpoints and export take names from here alone.
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
# Tensors on disk that a text model may leave alone: draft heads, vision, audio, computed tables.
_LEFT_ALONE = re.compile(
    r"(^|.*\.)(mtp|nextn)\..*|(.*[._])?(vision|visual|image|audio|video|multi_modal|multimodal|mm)[._].*"
    r"|.*rotary_emb\.inv_freq|.*\.position_ids"
)


@dataclass(frozen=True)
class TensorRow:
    """One tensor on disk and its box in memory."""

    name: str
    # On disk.
    shape: Shape
    # Dtype on disk, such as bfloat16; None if the folder has no weights.
    dtype: str | None
    # Parameter or persistent buffer of the causal LM; None: not part of the text model, kept for the export.
    target: str | None
    # Shape of the target, and begin and extent of the box in it.
    whole: Shape = ()
    start: Shape = ()
    size: Shape = ()
    buffer: bool = False
    # Below adapters: it stays as it is.
    frozen: bool = False

    @property
    def trained(self) -> bool:
        """True if it has gradients, and a checkpoint saves it."""
        return self.sent and not self.buffer

    @property
    def sent(self) -> bool:
        """True if refits and exports have it: a tensor of the model, buffers too, unless it is frozen."""
        return self.target is not None and not self.frozen

    @cached_property
    def axes(self) -> Shape:
        """Dimension of the target for each dimension on disk; -1 for a dimension of 1 that the target lacks."""
        real = [axis for axis, size in enumerate(self.size) if size != 1]
        return tuple(real.pop(0) if size != 1 else -1 for size in self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Box as an index of the whole target."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.size))

    def view(self, target: Tensor) -> Tensor:
        """Return the tensor as it is on disk, a view of the whole target."""
        return target[self.slices].view(self.shape)

    def part(self, piece: Tensor, first: Shape) -> tuple[Shape, Tensor] | None:
        """Return (begin on disk, view) of the part that lies in a box of the target; None if none does.

        piece: the target's box that begins at `first`.
        """
        if not self.size:
            return (0,) * len(self.shape), piece.view(self.shape)
        begin = [max(own, other) for own, other in zip(self.start, first)]
        ends = zip(self.start, self.size, first, piece.shape)
        end = [min(own + size, other + count) for own, size, other, count in ends]
        if any(b >= e for b, e in zip(begin, end)):
            return None
        view = piece[tuple(slice(b - at, e - at) for b, e, at in zip(begin, end, first))]
        cut = [b - own for b, own in zip(begin, self.start)]
        shape = [1 if axis < 0 else view.shape[axis] for axis in self.axes]
        return tuple(0 if axis < 0 else cut[axis] for axis in self.axes), view.view(shape)

    def place(self, start: Shape, extent: Shape) -> tuple[Shape, Shape]:
        """Return (begin, extent) in the target of a part that begins at `start` on disk."""
        begin, size = list(self.start), [1] * len(self.size)
        for axis, offset, count in zip(self.axes, start, extent):
            if axis >= 0:
                begin[axis], size[axis] = begin[axis] + offset, count
        return tuple(begin), tuple(size)


class ParameterTable:
    """Rows of a model, in the order of its parameters, then its buffers, then tensors that are kept unread."""

    def __init__(self, rows: Iterable[TensorRow]) -> None:
        self.rows = tuple(rows)
        self._of: dict[str, list[TensorRow]] = {}
        for row in self.rows:
            if row.target is not None:
                self._of.setdefault(row.target, []).append(row)

    @cached_property
    def by_name(self) -> dict[str, TensorRow]:
        """Rows by the name on disk."""
        return {row.name: row for row in self.rows}

    @cached_property
    def is_mixed(self) -> bool:
        """True if the folder has parameters in bfloat16 and others in float32."""
        return {"bfloat16", "float32"} <= {row.dtype for row in self.rows if row.trained}

    @property
    def kept(self) -> list[TensorRow]:
        """Rows that the model does not hold. An export copies them from the source."""
        return [row for row in self.rows if row.target is None]

    @property
    def sent(self) -> list[TensorRow]:
        """Rows that a refit sends."""
        return [row for row in self.rows if row.sent]

    def rows_of(self, target: str) -> list[TensorRow]:
        """Return the rows of a parameter or persistent buffer. Raises KeyError."""
        return self._of[target]

    def holds(self, target: str) -> bool:
        """Return True if a tensor on disk belongs to this parameter or buffer."""
        return target in self._of

    def sends(self, target: str) -> bool:
        """Return True if a refit sends this parameter or buffer."""
        return any(row.sent for row in self._of.get(target, ()))

    def below(self, adapters: Iterable[AdapterTensor]) -> "ParameterTable":
        """Return the table of the model with adapters: the same rows, frozen, then a row for each adapter."""
        rows = [replace(row, frozen=True) for row in self.rows]
        for each in adapters:
            rows.append(TensorRow(each.name, each.shape, "float32", each.name, each.shape, (0, 0), each.shape))
        return ParameterTable(rows)

    def views(self, target: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the names on disk of a whole parameter or buffer, with their views of `tensor`."""
        for row in self._of[target]:
            yield row.name, row.view(tensor)


def persistent_buffers(lm: Any) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint holds."""
    modules = lm.named_modules()
    computed = {f"{place}.{name}" for place, module in modules for name in module._non_persistent_buffers_set}
    return {name: buffer for name, buffer in lm.named_buffers() if name not in computed}


def tensors_of(lm: Any) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; a tied head is its embedding."""
    head, embedding = lm.get_output_embeddings(), lm.get_input_embeddings()
    tied = head is not None and bool(getattr(lm.config, "tie_word_embeddings", False)) and head is not embedding
    shared = {name for name, p in lm.named_parameters() if tied and p is head.weight and p is not embedding.weight}
    named: dict[str, Tensor] = {name: p.detach() for name, p in lm.named_parameters() if name not in shared}
    return named | persistent_buffers(lm)


def derive_table(lm: Any, disk: Mapping[str, tuple[str, Shape]] | None, folder: object) -> ParameterTable:
    """Return the table of a causal LM on the meta device.

    disk: name -> (dtype, shape) of the folder's tensors; None: it has no weights, and gets transformers' names. folder:
    for messages.

    Raises ModelError naming a tensor that is computed on the way, lacks a place, or is missing on disk.
    """
    held = tensors_of(lm)
    buffers = persistent_buffers(lm).keys()
    rows = [replace(row, buffer=row.target in buffers) for row in _boxes(lm, held)]
    if disk is None:
        return ParameterTable(_ordered(rows, held))
    rename = _prefix(lm, [row.name for row in rows], disk)
    found: list[TensorRow] = []
    by_target: dict[str, list[TensorRow]] = {}
    for row in rows:
        by_target.setdefault(str(row.target), []).append(replace(row, name=rename(row.name)))
    for target, own in by_target.items():
        found += _on_disk(target, held[target], own, rename, disk, folder)
    read = {row.name for row in found}
    left = [name for name in disk if name not in read]
    return ParameterTable([*_ordered(found, held), *_kept_rows(lm, left, disk, folder)])


def _on_disk(
    target: str,
    tensor: Tensor,
    own: list[TensorRow],
    rename: Callable[[str], str],
    disk: Mapping[str, tuple[str, Shape]],
    folder: object,
) -> Iterator[TensorRow]:
    """Yield the rows of a target with the folder's dtypes: under converted names, or whole under its name in memory."""
    shape = tuple(tensor.shape)
    if any(row.name not in disk for row in own) and rename(target) in disk:
        own = [TensorRow(rename(target), shape, None, target, shape, (0,) * len(shape), shape, own[0].buffer)]
    missing = [row.name for row in own if row.name not in disk]
    if missing and own[0].buffer:
        # As transformers does: a buffer that is not on disk is computed.
        return
    if missing:
        raise ModelError(f"{folder} has no tensor {missing[0]}, which transformers' {target} is read from")
    for row in own:
        dtype, found = disk[row.name]
        if found != row.shape:
            raise ModelError(f"{folder}: {row.name} has shape {found}, the configuration says {row.shape}")
        yield replace(row, dtype=dtype)


def _kept_rows(lm: Any, left: list[str], disk: Mapping[str, tuple[str, Shape]], folder: object) -> Iterator[TensorRow]:
    """Yield a row for each tensor on disk that the model does not hold. Raises ModelError for one without a reason."""
    ignored = [re.compile(each) for each in getattr(lm, "_keys_to_ignore_on_load_unexpected", None) or ()]
    head = next((name for name, module in lm.named_modules() if module is lm.get_output_embeddings()), None)
    for name in left:
        if lm.config.tie_word_embeddings and head and name.endswith(f"{head}.weight"):
            # A copy of the embedding, which the export leaves out.
            continue
        if not _LEFT_ALONE.fullmatch(name) and not any(each.search(name) for each in ignored):
            raise ModelError(
                f"{folder}: {name} is no part of transformers' {type(lm).__name__}, which would leave it untrained; "
                "needed: a release of transformers that reads it"
            )
        yield TensorRow(name, disk[name][1], disk[name][0], None)


def _ordered(rows: list[TensorRow], held: Mapping[str, Tensor]) -> list[TensorRow]:
    order = {name: number for number, name in enumerate(held)}
    return sorted(rows, key=lambda row: (order[str(row.target)], row.start))


def _prefix(lm: Any, names: list[str], disk: Mapping[str, tuple[str, Shape]]) -> Callable[[str], str]:
    """Return the renaming under which most names are on disk: none, or that of a text model inside a larger one.

    transformers undoes such a prefix only for models that it loaded itself.
    """
    own = f"{lm.base_model_prefix}."

    def inside(name: str) -> str:
        return f"{own}language_model.{name.removeprefix(own)}" if name.startswith(own) else name

    def below(name: str) -> str:
        return f"language_model.{name}"

    choices: list[Callable[[str], str]] = [str, inside, below]
    return max(choices, key=lambda rename: sum(rename(name) in disk for name in names))


class _Views(TorchFunctionMode):
    """Mode without copies: `contiguous` and `clone` return their tensor, and a result stays a view of its source."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (Tensor.contiguous, Tensor.clone, torch.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def _boxes(lm: Any, held: Mapping[str, Tensor]) -> Iterator[TensorRow]:
    """Yield a row for each tensor of a checkpoint in transformers' own names. Raises ModelError."""
    from transformers.core_model_loading import revert_weight_conversion

    with torch.no_grad(), _Views():
        converted = revert_weight_conversion(lm, dict(held))
    # Views share their tensor's storage object, on the meta device too.
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in held.items()}
    for name, view in converted.items():
        target = owners.get(view.untyped_storage()._cdata)
        box = None if target is None else _box(held[target], view)
        if target is None or box is None:
            raise ModelError(
                f"model_type {lm.config.model_type}: transformers computes {name} when it writes a checkpoint; "
                "needed: a conversion that only cuts and renames"
            )
        yield TensorRow(name, tuple(view.shape), None, target, tuple(held[target].shape), *box)


def _box(whole: Tensor, view: Tensor) -> tuple[Shape, Shape] | None:
    """Return (begin, extent) of a view in its contiguous tensor; None if it is rearranged."""
    strides = {step: axis for axis, (step, size) in enumerate(zip(whole.stride(), whole.shape)) if size > 1}
    size, last = [1] * whole.ndim, -1
    for step, count in zip(view.stride(), view.shape):
        if count > 1:
            axis = strides.get(step, -1)
            if axis <= last:
                return None
            size[axis], last = count, axis
    rest, start = view.storage_offset(), []
    for step in whole.stride():
        start.append(rest // step if step else 0)
        rest %= step or 1
    inside = all(begin + count <= most for begin, count, most in zip(start, size, whole.shape))
    return (tuple(start), tuple(size)) if inside and rest == 0 else None
