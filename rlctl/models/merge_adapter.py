"""Merging of an adapter into its base model: each adapted weight becomes W + scale * B A.

The sum is computed in float32 and cast once. Only the functions import torch.

`python -m rlctl.models.merge_adapter ADAPTER BASE FOLDER` writes a merged model. FOLDER is renamed into place at the
end, so it is never incomplete.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.models.adapter_folder import AdapterFile, read_spec
from rlctl.models.adapters import LORA_A, LORA_B

if TYPE_CHECKING:
    from torch import Tensor


def write_merged(base: Path, adapter: Path, folder: Path, dtype: str | None = None) -> list[str]:
    """Write the merged model as a Hugging Face folder. Return the names of the dtypes in it.

    dtype: of the floating-point tensors; None: as in the base. Raises ModelError.
    """
    import torch

    from rlctl.models.derive import load_facts, table_of
    from rlctl.models.hf_folder import WeightFiles, write_folder
    from rlctl.models.meta_model import language_model

    files = WeightFiles(base)
    table = table_of(language_model(base), base)
    spec = read_spec(adapter, load_facts(base).sizes.linears)
    adapter_file = AdapterFile(adapter)
    adapted = {f"{target.name}.weight": target.name for target in spec.targets}
    layout = []
    for row in table.rows:
        kind = files.kind(row.name)
        if dtype and files.dtype(row.name).is_floating_point:
            kind = dtype
        layout.append((row.name, row.shape, kind))

    def merged_tensors() -> Iterator[tuple[str, "Tensor"]]:
        for row, (name, _, kind) in zip(table.rows, layout):
            weight = files.tensor(name)
            if target := adapted.get(str(row.target)):
                product = adapter_file.tensor(target + LORA_B) @ adapter_file.tensor(target + LORA_A)
                weight = weight.float() + row.view(product.contiguous()) * spec.scale
            yield name, weight.to(getattr(torch, kind))

    write_folder(base, folder, layout, merged_tensors())
    return sorted({kind for _, _, kind in layout})


def main(adapter: Path, base: Path, folder: Path) -> None:
    """Write a merged model in float32 to a temporary folder, then rename it to `folder`."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    write_merged(base, adapter, temporary, "float32")
    os.replace(temporary, folder)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
