"""Weights of Hugging Face folders: read one tensor at a time, written as new folders."""

import json
import os
import re
import shutil
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlctl.models.parameter_table import Layout, Shape, TensorRow
from rlctl.models.weight_headers import check_weights, weight_files

SHARD_BYTES = 4 * 10**9
COMPANIONS = ("generation_config.json", "token*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "chat_t*")


class WeightFiles:
    """Safetensors of a folder, read one tensor at a time.

    Raises ModelError if the folder's safetensors are missing, cut short or quantised.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        check_weights(folder)
        self.folder = folder
        self._file: dict[str, Any] = {}
        for file in weight_files(folder):
            handle: Any = safe_open(file, framework="pt")
            self._file |= dict.fromkeys(handle.keys(), handle)

    def names(self) -> list[str]:
        """Return the names of all tensors on disk."""
        return list(self._file)

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of a name on disk. Raises KeyError."""
        value: Tensor = self._file_of(name).get_tensor(name)
        return value

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor on disk."""
        kind: torch.dtype = self._file[name].get_slice(name)[:1].dtype
        return kind

    def kind(self, name: str) -> str:
        """Return the name of a tensor's dtype, such as bfloat16."""
        return str(self.dtype(name)).removeprefix("torch.")

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor on disk."""
        return tuple(self._file[name].get_slice(name).get_shape())

    def part(self, name: str, shape: Shape, start: Shape, size: Shape) -> Tensor:
        """Read `size` numbers a dimension of tensor `name` from `start` on, and no others. Raises as `read_into`."""
        found = self._file_of(name).get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise ValueError(f"{self.folder}: {name} has shape {tuple(found.get_shape())}, expected {shape}")
        value: Tensor = found[tuple(slice(begin, begin + count) for begin, count in zip(start, size))]
        return value

    def _file_of(self, name: str) -> Any:
        if name not in self._file:
            raise KeyError(f"{self.folder} has no tensor {name}")
        return self._file[name]

    def read_into(self, rows: Iterable[TensorRow], target: Tensor) -> None:
        """Fill `target`, a whole parameter or buffer, from its rows. Raises KeyError, ValueError naming the tensor."""
        for row in rows:
            value = self.tensor(row.name)
            if tuple(value.shape) != row.shape:
                expected, found = row.shape, tuple(value.shape)
                raise ValueError(f"{self.folder}: {row.name} has shape {found}, the configuration says {expected}")
            row.view(target).copy_(value)


def write_folder(source: Path, folder: Path, layout: Layout, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a Hugging Face folder of `tensors`, in the order of `layout`, with the other files of `source`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = layout[0][2]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    copy_companions(source, folder)
    _write_weights(folder, layout, tensors)


def copy_companions(source: Path, folder: Path) -> None:
    """Copy tokenizer and generation config of a Hugging Face folder."""
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)


def write_folder_together(source: Path, folder: Path, layout: Layout, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write the folder from rank 0, of tensors that all ranks make together. All ranks return when it is whole."""
    if dist.get_rank() == 0:
        write_folder(source, folder, layout, tensors)
    else:
        deque(tensors, maxlen=0)
    dist.barrier()


def save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file. Raises OSError with its name, where safetensors has the system's error as text."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        if (code := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(file)) from error


def _write_weights(folder: Path, layout: Layout, tensors: Iterable[tuple[str, Tensor]]) -> None:
    file_of = _shards(layout)
    last = {file: name for name, file in file_of.items()}
    held: dict[str, Tensor] = {}
    for name, tensor in tensors:
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if last[file_of[name]] == name:
            save_tensors(held, folder / file_of[name])
            (folder / file_of[name]).chmod(0o644)  # safetensors makes it the owner's alone
            held = {}
    if len(last) > 1:
        total = sum(_nbytes(shape, dtype) for _, shape, dtype in layout)
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _shards(layout: Layout) -> dict[str, str]:
    """Return tensor name -> file name; files are filled in order up to SHARD_BYTES each."""
    number, room, numbers = 0, 0, {}
    for name, shape, dtype in layout:
        size = _nbytes(shape, dtype)
        if size > room:
            number, room = number + 1, SHARD_BYTES
        numbers[name] = number
        room -= size
    if number == 1:
        return dict.fromkeys(numbers, "model.safetensors")
    return {name: f"model-{n:05d}-of-{number:05d}.safetensors" for name, n in numbers.items()}


def _nbytes(shape: Shape, dtype: str) -> int:
    size: int = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
    return size
