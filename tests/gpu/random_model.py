"""Models of real shapes with random weights, made on the spot, and synthetic prompts for them.

    python -m tests.gpu.random_model FOLDER [--shape qwen3-0.6b]

FOLDER gets `model/`, `train.jsonl`, `validation.jsonl` and `reward.py`. The tokenizer knows one word a token id.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from rlctl.bench.workload import word_tokenizer

# Shapes of the published models of the same names.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-micro": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
}
REWARD = '''"""Rewards even words: something that a random model can learn to do more of."""


def score(prompt: str, completion: str, answer: str | None, row: dict) -> float:
    words = completion.split()
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))
'''


def make(folder: Path, shape: str, prompts: int = 512, prompt_tokens: int = 64, max_length: int = 4096) -> Path:
    """Write everything into `folder`; returns it. The same bytes every time, device aside."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    options = SHAPES[shape]
    torch.manual_seed(0)
    config = Qwen3Config(
        **options, max_position_embeddings=max_length, eos_token_id=1, pad_token_id=0, bos_token_id=None
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    word_tokenizer(int(options["vocab_size"])).save_pretrained(folder / "model")
    rng = random.Random(0)
    for name, count in (("train", prompts), ("validation", 64)):
        rows = (
            " ".join(f"w{rng.randrange(3, options['vocab_size'])}" for _ in range(prompt_tokens)) for _ in range(count)
        )
        text = "".join(json.dumps({"prompt": row, "answer": ""}) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "reward.py").write_text(REWARD)
    return folder


def overrides(folder: Path) -> list[str]:
    """What points a recipe at `folder`."""
    return [
        f"model.path={folder / 'model'}",
        f"data.train.path={folder / 'train.jsonl'}",
        f"data.validation.path={folder / 'validation.jsonl'}",
        f"rewards=[{{name: '{folder / 'reward.py'}:score'}}]",
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    chosen = parser.parse_args()
    print(make(chosen.folder, chosen.shape))
