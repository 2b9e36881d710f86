"""Models of real shapes with random weights, made on the spot, and synthetic prompts for them.

    python -m tests.gpu.random_model FOLDER [--shape qwen3-0.6b]

FOLDER gets `model/`, `train.jsonl`, `validation.jsonl` and `reward.py`. The tokenizer knows one word a token id.
"""

import argparse
import json
import random
from pathlib import Path

from rlctl.bench.models import SHAPES, model_folder
from rlctl.bench.workload import word_tokenizer

REWARD = '''"""Rewards even words: something that a random model can learn to do more of."""


def score(prompt: str, completion: str, answer: str | None, row: dict) -> float:
    words = completion.split()
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))
'''


def make(folder: Path, shape: str, prompts: int = 512, prompt_tokens: int = 64) -> Path:
    """Write everything into `folder`; returns it. The same bytes every time, device aside."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    # The tokenizer's own.
    config = AutoConfig.from_pretrained(model_folder(shape, folder), eos_token_id=1, pad_token_id=0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    word_tokenizer(config.vocab_size).save_pretrained(folder / "model")
    rng = random.Random(0)
    for name, count in (("train", prompts), ("validation", 64)):
        rows = (" ".join(f"w{rng.randrange(3, config.vocab_size)}" for _ in range(prompt_tokens)) for _ in range(count))
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
