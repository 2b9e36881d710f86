"""A Hugging Face causal LM without its weights: what tells every backend the shape of what it trains."""

from pathlib import Path
from typing import Any

import torch

from rlctl.models import hf_folder, packed_attention

KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe")


def skeleton(folder: Path, device: torch.device) -> Any:
    """The causal LM with its parameters on the meta device and its rotary table on `device`.

    Raises ValueError for an architecture outside KINDS or with sliding windows.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    if config.model_type not in KINDS:
        raise ValueError(f"{folder} is a {config.model_type} model; rlctl trains {', '.join(KINDS)}")
    # Qwen3-MoE has no layer_types: a window is every layer's.
    window = config.model_type == "qwen3_moe" and config.sliding_window is not None
    if window or set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        raise ValueError(f"{folder} uses sliding-window attention, which packed attention does not do")
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=packed_attention.register()
        )
    lm.model.rotary_emb = type(lm.model.rotary_emb)(config=lm.config).to(device)
    return lm


def layout_of(lm: Any) -> list[tuple[str, tuple[int, ...]]]:
    """(name on disk, shape) of all its tensors, tied ones once, in the order of its parameters."""
    return [
        (part, tuple(view.shape))
        for name, parameter in lm.named_parameters()
        if name != "lm_head.weight" or not lm.config.tie_word_embeddings
        for part, view in hf_folder.unfuse(name, parameter)
    ]


def active_parameters(layout: list[tuple[str, tuple[int, ...]]], config: Any) -> int:
    """Weights that a token is multiplied with: of the experts those that it goes to, of the embedding its output."""
    total = 0
    for name, shape in layout:
        size = torch.Size(shape).numel()
        if ".experts." in name:
            total += size * config.num_experts_per_tok // config.num_experts
        elif "embed_tokens" not in name or config.tie_word_embeddings:
            total += size
    return total
