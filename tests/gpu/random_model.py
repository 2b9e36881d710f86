"""Models of real shapes with random weights, made on the spot, and synthetic prompts.

    python -m tests.gpu.random_model FOLDER [--shape qwen3-0.6b]

The folder gets `model/`, `train.jsonl`, `validation.jsonl` and `FOLDER/reward.py`.
The tokenizer knows one word a token id.
"""

import argparse
import json
import random
from pathlib import Path

from rlctl.bench.workload import SHAPES, model_folder, word_tokenizer
from rlctl.models.meta_model import write_random_model

REWARD = '''"""Rewards even words: something that a random model can learn to do more of."""


def score(prompt: str, completion: str, answer: str | None, row: dict) -> float:
    words = completion.split()
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))
'''


def make(folder: Path, shape: str, prompts: int = 512, prompt_tokens: int = 64) -> Path:
    """Write everything into `folder`, with the same bytes every time on one kind of device; return the folder."""
    source = model_folder(shape, folder)
    # The tokenizer's own.
    config = json.loads((source / "config.json").read_text()) | {"eos_token_id": 1, "pad_token_id": 0}
    (source / "config.json").write_text(json.dumps(config))
    size = config["vocab_size"]
    word_tokenizer(size).save_pretrained(source)
    write_random_model(source, folder / "model", 0, quick=True)
    rng = random.Random(0)
    for name, count in (("train", prompts), ("validation", 64)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for _ in range(count):
                prompt = " ".join(f"w{rng.randrange(3, size)}" for _ in range(prompt_tokens))
                file.write(json.dumps({"prompt": prompt, "answer": ""}) + "\n")
    (folder / "reward.py").write_text(REWARD)
    return folder


def overrides(folder: Path) -> list[str]:
    """Return the overrides that point a recipe at `folder`."""
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
    arguments = parser.parse_args()
    print(make(arguments.folder, arguments.shape))
