"""A Hugging Face causal LM without its weights: what tells every backend the shape of what it trains."""

from pathlib import Path
from typing import Any

import torch

from rlctl.models import hf_folder, packed_attention
from rlctl.models.architectures import ARCHITECTURES


def skeleton(folder: Path, device: torch.device) -> Any:
    """The causal LM with its parameters on the meta device and its rotary table on `device`.

    Raises ValueError for an architecture outside the table or with sliding windows.
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
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=packed_attention.register()
        )
    backbone = lm.get_submodule(row.backbone)
    backbone.rotary_emb = type(backbone.rotary_emb)(config=lm.config).to(device)
    return lm


def layout_of(lm: Any) -> list[tuple[str, tuple[int, ...]]]:
    """(name on disk, shape) of all its tensors, tied ones once, in the order of its parameters."""
    head = f"{ARCHITECTURES[lm.config.model_type].head}.weight"
    return [
        (part, tuple(view.shape))
        for name, parameter in lm.named_parameters()
        if name != head or not lm.config.tie_word_embeddings
        for part, view in hf_folder.unfuse(name, parameter)
    ]
