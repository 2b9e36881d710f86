"""Folders of models with a value head: a causal LM's decoder below a new head, or another value model's weights.

`python -m rlctl.models.value_folder SOURCE FOLDER SEED STD` writes one: a token classifier with one label, which
transformers loads. FOLDER is renamed into place at the end, so it is never incomplete. The same seed writes the
same bytes.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlctl.config.errors import ModelError
from rlctl.models.derive import table_of
from rlctl.models.hf_folder import Companions, FolderWriter, WeightFiles
from rlctl.models.meta_model import decoder_of, language_model, text_config, token_classifier, value_head
from rlctl.models.parameter_table import Layout, ParameterTable, derive_table


def write_value_folder(source: Path, folder: Path, seed: int, std: float = 0.0) -> None:
    """Write a token classifier with one label, whose decoder has the weights of `source`.

    source: a causal LM, or a classifier with one label, for example a reward model; its head is kept then. A new head
    is drawn from a normal distribution with deviation `std`, without bias. Raises ModelError for a model without token
    classifier in transformers, and for a head whose bias the classifier lacks.
    """
    config = text_config(source)
    model = token_classifier(config, source)
    source_model = language_model(source)
    source_table = table_of(source_model, source)
    table = derive_table(model, None, folder)
    names = _source_names(model, source_model, source)
    head_dtype = str(source_table.sent_rows[0].dtype)
    layout: Layout = []
    for row in table.rows:
        source_name = names.get(str(row.target))
        dtype = str(source_table.rows_of(source_name)[0].dtype) if source_name else head_dtype
        layout.append((row.name, row.shape, dtype))
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    companions = Companions.read(source)
    architecture = type(model).__name__
    written_config = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [architecture]}
    with FolderWriter(temporary, layout) as writer:
        replace(companions, config=written_config).write(temporary, layout[0][2])
        writer.write_headers()
        for name, tensor in _read_tensors(table, model, names, source_table, WeightFiles(source), seed=seed, std=std):
            writer.write(name, (0,) * tensor.ndim, tensor)
        writer.sync()
    os.replace(temporary, folder)


def _source_names(model: Any, source_model: Any, source: Path) -> dict[str, str]:
    """Return name -> name in the source, of the tensors of the classifier that the source has."""
    prefix = _path_of(model, decoder_of(model, source))
    source_prefix = _path_of(source_model, decoder_of(source_model, source))
    names = {}
    for name in (*dict(model.named_parameters()), *dict(model.named_buffers())):
        if name.startswith(f"{prefix}."):
            names[name] = f"{source_prefix}.{name.removeprefix(f'{prefix}.')}"
    if source_model.get_output_embeddings() is not None:
        return names
    head = _path_of(model, value_head(model))
    source_head = _path_of(source_model, value_head(source_model))
    head_names = dict(value_head(model).named_parameters())
    for name, _ in value_head(source_model).named_parameters():
        if name not in head_names:
            raise ModelError(
                f"{source}: its value head has a {name}, and transformers' {type(model).__name__} has none"
            )
        names[f"{head}.{name}"] = f"{source_head}.{name}"
    return names


def _path_of(model: Any, module: Any) -> str:
    paths = {id(other): str(path) for path, other in model.named_modules()}
    return paths[id(module)]


def _read_tensors(
    table: ParameterTable,
    model: Any,
    names: dict[str, str],
    source_table: ParameterTable,
    files: WeightFiles,
    *,
    seed: int,
    std: float,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name on disk, tensor) of the classifier, one parameter or buffer at a time."""
    generator = torch.Generator().manual_seed(seed)
    for target in dict.fromkeys(str(row.target) for row in table.rows):
        whole_tensor = torch.zeros(table.rows_of(target)[0].whole)
        if target in names:
            files.read_into(source_table.rows_of(names[target]), whole_tensor)
        elif target.endswith(".weight"):
            whole_tensor.normal_(0.0, std, generator=generator)
        yield from table.views(target, whole_tensor)


if __name__ == "__main__":
    write_value_folder(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
