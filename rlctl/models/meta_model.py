"""Causal LMs made from a config.json alone: without weights, for their shape, or with random ones, as a folder.

`python -m rlctl.models.meta_model SHAPE FOLDER SEED [quick]` writes a random one. SHAPE is a Hugging Face folder; its
weights are not read. FOLDER appears whole or not at all. The same seed writes the same bytes.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd

from rlctl.models import grouped_experts, hf_folder, packed_attention
from rlctl.models.architectures import ARCHITECTURES
from rlctl.models.observed import without_dropout
from rlctl.models.state_layers import install_restarts


def skeleton(folder: Path, device: torch.device) -> Any:
    """Return the causal LM with its parameters on the meta device and its rotary table on `device`.

    Its dropout is off, and its states begin with each sequence of a pack.
    Raises ValueError for an architecture outside the table or with sliding windows, or for dropout that stays.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    row = ARCHITECTURES.get(config.model_type)
    if row is None:
        raise ValueError(f"{folder} is a {config.model_type} model; rlctl trains {', '.join(ARCHITECTURES)}")
    # Without layer_types a window is every layer's.
    window = not row.window.listed and config.sliding_window is not None
    if window or set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        raise ValueError(f"{folder} uses sliding-window attention, which packed attention does not do")
    without_dropout(config)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=packed_attention.register(),
            experts_implementation=grouped_experts.register(),
        )
    if left := [name for name, module in lm.named_modules() if isinstance(module, _DropoutNd) and module.p]:
        raise ValueError(f"{folder} has dropout at {left[0]} that no key of its config.json turns off")
    install_restarts(lm)
    backbone = lm.get_submodule(row.backbone)
    backbone.rotary_emb = type(backbone.rotary_emb)(config=lm.config).to(device)
    return lm


def layout_of(lm: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return (name on disk, shape) of all tensors, tied ones once, in the order of the parameters."""
    head = f"{ARCHITECTURES[lm.config.model_type].head}.weight"
    return [
        (part, tuple(view.shape))
        for name, parameter in lm.named_parameters()
        if name != head or not lm.config.tie_word_embeddings
        for part, view in hf_folder.unfuse(name, parameter)
    ]


def write_random_model(shape: Path, folder: Path, seed: int, quick: bool = False) -> None:
    """Write a model with float32 weights as transformers draws them for the architecture (initializer_range).

    quick: draws bfloat16 on a GPU where there is one. A CPU takes minutes for 4 billion numbers.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    on_gpu = quick and torch.cuda.is_available()
    with torch.device("cuda" if on_gpu else "cpu"):
        dtype = torch.bfloat16 if on_gpu else torch.float32
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape), dtype=dtype)
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    for file in shape.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not (temporary / file.name).exists():
            shutil.copy(file, temporary / file.name)
    os.replace(temporary, folder)


if __name__ == "__main__":
    write_random_model(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), "quick" in sys.argv[4:])
