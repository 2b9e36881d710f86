"""Weights of Hugging Face folders: reading single tensors, and writing new folders."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlctl.config.errors import ModelError
from rlctl.config.json_files import read_object
from rlctl.models.facts import ModelFacts, has_weights
from rlctl.models.parameter_table import Layout, ParameterTable, Shape, TensorRow
from rlctl.models.safetensors_files import lay_out, write_at, write_box
from rlctl.models.weight_headers import check_weights, weight_files

_INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 * 10**9
COMPANIONS = (
    *("generation_config.json", "token*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "chat_t*"),
    "additional_chat_templates/*.jinja",
    # Engines need these files to load a vision-language model.
    "*processor_config.json",
)


class WeightFiles:
    """Reader of single tensors from a folder's safetensors.

    Raises ModelError if the folder's safetensors are missing, cut short or quantised.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        check_weights(folder)
        self.folder = folder
        # Tensor name -> open file with the tensor.
        self._file_of_tensor: dict[str, Any] = {}
        for file in weight_files(folder):
            handle: Any = safe_open(file, framework="pt")
            self._file_of_tensor |= dict.fromkeys(handle.keys(), handle)

    def names(self) -> list[str]:
        """Return the names of all tensors on disk."""
        return list(self._file_of_tensor)

    def tensor(self, name: str) -> Tensor:
        """Return the tensor with this name on disk. Raises KeyError."""
        tensor: Tensor = self._find_file(name).get_tensor(name)
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor on disk."""
        kind: torch.dtype = self._file_of_tensor[name].get_slice(name)[:1].dtype
        return kind

    def kind(self, name: str) -> str:
        """Return the name of a tensor's dtype, for example bfloat16."""
        return str(self.dtype(name)).removeprefix("torch.")

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor on disk."""
        return tuple(self._file_of_tensor[name].get_slice(name).get_shape())

    def part(self, name: str, shape: Shape, start: Shape, size: Shape) -> Tensor:
        """Read the box of tensor `name` from `start` with `size` elements in each dimension. Raises as `read_into`."""
        stored = self._find_file(name).get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise ValueError(f"{self.folder}: {name} has shape {tuple(stored.get_shape())}, expected {shape}")
        box: Tensor = stored[tuple(slice(begin, begin + count) for begin, count in zip(start, size))]
        return box

    def _find_file(self, name: str) -> Any:
        if name not in self._file_of_tensor:
            raise KeyError(f"{self.folder} has no tensor {name}")
        return self._file_of_tensor[name]

    def read_into(self, rows: Iterable[TensorRow], target: Tensor) -> None:
        """Fill `target`, a whole parameter or buffer, from its rows. Raises KeyError or ValueError with the tensor's
        name.
        """
        for row in rows:
            stored = self.tensor(row.name)
            if tuple(stored.shape) != row.shape:
                problem = f"{row.name} has shape {tuple(stored.shape)}, the configuration says {row.shape}"
                raise ValueError(f"{self.folder}: {problem}")
            row.view(target).copy_(stored)


# Number of rows of a matrix that are compared at one time.
_COMPARED_ROWS = 4096


def check_tied(folder: Path, table: ParameterTable, facts: ModelFacts) -> None:
    """Raise ModelError if config.json ties the output to the embedding, but the folder has a different output matrix.

    transformers would compute with both matrices; rlctl and its export would lose the output.
    """
    if not facts.sizes.tied or not has_weights(folder):
        return
    files = WeightFiles(folder)
    embedding = table.rows_of(f"{facts.embedding}.weight")[0]
    for name in files.names():
        # A tied output has no row in the table. Only its name shows it.
        if name in table.by_name or not name.endswith(f"{facts.head}.weight"):
            continue
        if files.shape(name) != embedding.shape or not _are_equal(files, name, embedding.name):
            raise ModelError(
                f"{folder}: {name} differs from {embedding.name}, to which config.json ties it: set "
                "tie_word_embeddings to false there to train both"
            )


def _are_equal(files: WeightFiles, name: str, other: str) -> bool:
    """Return True if two matrices of the same shape are equal in float32."""
    shape = files.shape(name)
    num_rows, width = shape
    for begin in range(0, num_rows, _COMPARED_ROWS):
        size = (min(_COMPARED_ROWS, num_rows - begin), width)
        part = files.part(name, shape, (begin, 0), size)
        other_part = files.part(other, shape, (begin, 0), size)
        if not torch.equal(part.float(), other_part.float()):
            return False
    return True


class FolderWriter:
    """Writer of parts of tensors (boxes) into a folder. Several processes write one folder, each its own byte ranges.

    Every process computes the same headers from the same layout. Raises OSError with the file's name. As a context
    manager it closes the files even after an error, because an open file keeps the disk space of a removed folder.
    """

    def __init__(self, folder: Path, layout: Layout) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._layout = layout
        # Tensor name -> name of its file.
        self._file_of = _shard_names(layout)
        self._dtypes: dict[str, torch.dtype] = {name: getattr(torch, kind) for name, _, kind in layout}
        layout_by_file: dict[str, Layout] = {}
        for name, shape, kind in layout:
            layout_by_file.setdefault(self._file_of[name], []).append((name, shape, kind))
        self._files = {file: lay_out(part, {"format": "pt"}) for file, part in layout_by_file.items()}
        # File name -> its open descriptor.
        self._descriptors: dict[str, int] = {}
        # Checksum: sum of the values of all bytes written to weight files.
        self._sum = 0

    def __enter__(self) -> "FolderWriter":
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}

    def write(self, name: str, start: Shape, part: Tensor) -> None:
        """Write `part` as the box of tensor `name` that begins at `start`, converted to the folder's dtype."""
        file = self._file_of[name]
        host_part = part.detach().to("cpu", self._dtypes[name])
        with _name_file(self._folder / file):
            self._sum += write_box(self._open_file(file), self._files[file].places[name], start, host_part)

    def write_headers(self) -> None:
        """Write the headers of all files, and the index if there are several files."""
        for file, layout in self._files.items():
            with _name_file(self._folder / file):
                write_at(self._open_file(file), layout.header, 0)
            self._sum += sum(layout.header)
        if len(self._files) > 1:
            total = sum(_nbytes(shape, dtype) for _, shape, dtype in self._layout)
            index = {"metadata": {"total_size": total}, "weight_map": self._file_of}
            (self._folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def sync(self) -> int:
        """Flush all files to the disk. Return the sum of the values of all bytes written to weight files."""
        for file, descriptor in self._descriptors.items():
            with _name_file(self._folder / file):
                os.fsync(descriptor)
        return self._sum

    def _open_file(self, file: str) -> int:
        """Return the descriptor of a weight file, opened once."""
        if file not in self._descriptors:
            # Write-only: a network file system must not read back a page into which another process writes.
            self._descriptors[file] = os.open(self._folder / file, os.O_WRONLY | os.O_CREAT, 0o644)
        return self._descriptors[file]


def list_weight_files(folder: Path) -> list[Path]:
    """Return the files of weights that exist in a folder, sorted by name."""
    return sorted(folder.glob("model*.safetensors"))


def write_folder(source: Path, folder: Path, layout: Layout, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a Hugging Face folder with whole `tensors`, in any order, and the other files of `source`."""
    with FolderWriter(folder, layout) as writer:
        Companions.read(source).write(folder, layout[0][2])
        writer.write_headers()
        for name, tensor in tensors:
            writer.write(name, (0,) * tensor.ndim, tensor)
        writer.sync()


@dataclass(frozen=True)
class Companions:
    """Contents of a model's files without weights, kept in memory because the folder may be deleted later."""

    # Contents of config.json.
    config: dict[str, Any]
    # Path in the folder -> content, for tokenizer, processors and generation config.
    files: dict[str, bytes]
    # Tokenizer that replaces the folder's; None: the folder's own is used.
    tokenizer: Any = None

    @classmethod
    def read(cls, folder: Path, tokenizer: str | None = None) -> "Companions":
        """Read the files of a Hugging Face folder. tokenizer: folder or hub name of a tokenizer that replaces the
        folder's.
        """
        contents: dict[str, bytes] = {}
        for pattern in COMPANIONS:
            for file in folder.glob(pattern):
                if file.is_file():
                    contents[str(file.relative_to(folder))] = file.read_bytes()
        other_tokenizer = None
        if tokenizer:
            from transformers import AutoTokenizer

            other_tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        return cls(config=read_object(folder / "config.json"), files=contents, tokenizer=other_tokenizer)

    def write(self, folder: Path, dtype: str | None) -> None:
        """Write the files into a folder. dtype: of its weights; None for an adapter folder, without config.json."""
        if dtype:
            # Configs of earlier releases of transformers have the key torch_dtype.
            key = "torch_dtype" if "torch_dtype" in self.config else "dtype"
            (folder / "config.json").write_text(json.dumps({**self.config, key: dtype}, indent=2) + "\n")
        for name, content in self.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        if self.tokenizer:
            self.tokenizer.save_pretrained(folder)


def save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file. A system error in safetensors' message is raised as OSError with the file's name."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        # safetensors writes the system's error number as text.
        match = re.search(r"os error (\d+)", str(error))
        if match is None:
            raise
        code = int(match[1])
        raise OSError(code, os.strerror(code), str(file)) from error


@contextmanager
def _name_file(file: Path) -> Iterator[None]:
    """Add the file's name to an OSError, because calls with a descriptor do not know it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error


def _shard_names(layout: Layout) -> dict[str, str]:
    """Return tensor name -> file name. Files are filled in order, each with at most SHARD_BYTES."""
    shard_numbers: dict[str, int] = {}
    num_shards = 0
    # Free bytes of the last file. It is negative after a tensor that is larger than a file.
    room = 0
    for name, shape, dtype in layout:
        size = _nbytes(shape, dtype)
        if size > room:
            num_shards += 1
            room = SHARD_BYTES
        shard_numbers[name] = num_shards
        room -= size
    if num_shards == 1:
        return dict.fromkeys(shard_numbers, "model.safetensors")
    return {name: f"model-{number:05d}-of-{num_shards:05d}.safetensors" for name, number in shard_numbers.items()}


def _nbytes(shape: Shape, dtype: str) -> int:
    size: int = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
    return size
