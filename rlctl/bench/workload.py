"""Models and data for benches: a model's shape by name or from a Hugging Face folder, random weights, random text.

In the data's tokenizer each word is one token, so lengths in tokens are exact.
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlctl.config.errors import ConfigError, Problem, did_you_mean
from rlctl.preflight.load import load
from rlctl.preflight.settled import SettledGrpo
from rlctl.utils.process import run_module

_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128}


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    return _QWEN3 | sizes | {"num_attention_heads": heads, "num_key_value_heads": 8, "tie_word_embeddings": tied}


_EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Sizes from config.json of the published models. `tiny` is rlctl's own: small, but too large for a CPU's caches.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _qwen3(512, 1536, 4, 8, True) | {"vocab_size": 32000, "head_dim": 64},
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, False),
    "qwen3-30b-a3b": _qwen3(2048, 6144, 48, 32, False) | _EXPERTS | {"moe_intermediate_size": 768},
    "qwen3-235b-a22b": _qwen3(4096, 12288, 94, 64, False) | _EXPERTS | {"moe_intermediate_size": 1536},
    "llama-8b": {
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
_CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
# No end token, so that a request always samples its full length.
_COMMON = {"hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "bos_token_id": None}


_REWARD = '''"""Rewards even words: something that a random model can learn to do more of."""


def score(prompt, completion, answer, row):
    words = completion.split()
    return sum(word[-1] in "02468" for word in words) / max(1, len(words))
'''
# Words, and so tokens, of a prompt.
PROMPT_WORDS = 64


def model_problems(model: str) -> list[Problem]:
    """Return a problem if `--model` is neither a shape's name nor a folder with a config.json."""
    if model in SHAPES or (Path(model) / "config.json").is_file():
        return []
    allowed = f"{', '.join(SHAPES)}, or a folder with a config.json"
    return [Problem("--model", "", f"{model} is no model{did_you_mean(model, SHAPES)}; allowed: {allowed}")]


def longest(model: str) -> int:
    """Return the model's longest sequence (max_position_embeddings), in tokens."""
    return int(json.loads(_config_text(model))["max_position_embeddings"])


def model_folder(model: str, parent: Path) -> Path:
    """Return a folder with a config.json: `model` itself if it is a folder, else a new one for the shape `model`."""
    return Path(model).absolute() if (Path(model) / "config.json").is_file() else _folder(parent / model, model)


def shape_folder(model: str, parent: Path) -> Path:
    """Write and return the folder `parent`/shape, with the model's config.json and a tokenizer of one word a token.

    If `model` is a user's folder, it is only read. Its tokenizer is not used, because lengths of the data are counted
    in words.
    """
    folder = _folder(parent / "shape", model)
    word_tokenizer(int(json.loads(_config_text(model))["vocab_size"])).save_pretrained(folder)
    return folder


def _folder(folder: Path, model: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(_config_text(model))
    return folder


def _config_text(model: str) -> str:
    """Return the text of the model's config.json. Raises ValueError for a model that `model_problems` refuses."""
    if (file := Path(model) / "config.json").is_file():
        return file.read_text()
    if model not in SHAPES:
        raise ValueError(f"no folder with a config.json, nor one of {', '.join(SHAPES)}: {model}")
    causal_lm = _CLASSES[SHAPES[model]["model_type"]]
    return json.dumps(_COMMON | {"architectures": [causal_lm], "eos_token_id": None} | SHAPES[model])


def make_random_model(shape: Path, folder: Path) -> None:
    """Write a model with random weights to `folder`/model. shape: the folder of `shape_folder`.

    Raises RuntimeError if the model cannot be made.
    """
    process = run_module("rlctl.models.meta_model", str(shape), str(folder / "model"), "0", "quick")
    if process.returncode:
        raise RuntimeError(f"no random model in the shape of {shape}: {process.stderr.strip().splitlines()[-1]}")


def make_prompts(folder: Path, count: int) -> None:
    """Write train.jsonl with `count` random prompts, and reward.py, to a folder."""
    rng = random.Random(0)
    _write(folder, [{"prompt": random_words(rng, PROMPT_WORDS), "answer": ""} for _ in range(count)])
    (folder / "reward.py").write_text(_REWARD)


def make_samples(folder: Path, count: int, tokens: int) -> None:
    """Write train.jsonl with `count` samples of `tokens` tokens each. All tokens but the first are trained on."""
    rng = random.Random(0)
    # tokens - 2: the prompt is one token, and an end token is added when samples are read.
    _write(
        folder, [{"prompt": random_words(rng, 1) + " ", "answer": random_words(rng, tokens - 2)} for _ in range(count)]
    )


def _write(folder: Path, rows: list[dict[str, str]]) -> None:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def grpo_run(settings: Sequence[str], overrides: Sequence[str]) -> SettledGrpo:
    """Return the settled config of a GRPO run, for an unknown machine.

    settings: overrides by the bench. overrides: those that the user gave by --set.
    Raises ConfigError, in which the user's overrides are named "--set ...".
    """
    try:
        return load("grpo", None, list(overrides), command_overrides=settings).settled
    except ConfigError as error:
        problems = []
        for problem in error.problems:
            problems.append(replace(problem, where=re.sub(r"^override \d+: ", "--set ", problem.where)))
        raise ConfigError(problems) from None


def random_words(rng: random.Random, count: int) -> str:
    """Return a text of `count` random words of `word_tokenizer`, without special tokens."""
    return " ".join(f"w{rng.randrange(3, 60)}" for _ in range(count))


def word_tokenizer(size: int) -> Any:
    """Return a tokenizer with a vocabulary of `size` words. Each word of a text is one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<end>", "<unknown>"]
    names = special + [f"w{index}" for index in range(len(special), size)]
    words = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=special[2]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=special[0], eos_token=special[1], unk_token=special[2]
    )
