"""What `rlctl bench` measures with: published model shapes by name, or any Hugging Face folder. No weights needed."""

import json
import shutil
from pathlib import Path
from typing import Any

_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128}


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    return _QWEN3 | sizes | {"num_attention_heads": heads, "num_key_value_heads": 8, "tie_word_embeddings": tied}


# From the config.json of the published models; `tiny` is rlctl's own, large enough to leave a CPU's caches.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _qwen3(512, 1536, 4, 8, True) | {"vocab_size": 32000, "head_dim": 64},
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, False),
    "qwen3-30b-a3b": _qwen3(2048, 6144, 48, 32, False)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
# No token ends an answer: requests run until their length is reached.
_COMMON = {"hidden_act": "silu", "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "bos_token_id": None}


def longest(folder: Path) -> int:
    """Tokens of the model's longest sequence."""
    return int(json.loads((folder / "config.json").read_text())["max_position_embeddings"])


def model_folder(model: str, parent: Path) -> Path:
    """A folder with the model's config.json: `model` itself if it is one, else written under `parent`.

    Raises ValueError for a name that is neither.
    """
    if (Path(model) / "config.json").is_file():
        return Path(model).absolute()
    if model not in SHAPES:
        raise ValueError(f"no folder with a config.json, nor one of {', '.join(SHAPES)}: {model}")
    folder = parent / model
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_COMMON | {"eos_token_id": None} | SHAPES[model]))
    return folder


def shape_folder(model: str, parent: Path) -> Path:
    """A folder under `parent` with the model's config.json and nothing else: a user's folder is only read, and its
    tokenizer left behind, since sizes of made-up data are counted in words.

    Raises ValueError as `model_folder` does.
    """
    config = model_folder(model, parent) / "config.json"
    folder = parent / "shape"
    folder.mkdir()
    shutil.copyfile(config, folder / "config.json")
    return folder
