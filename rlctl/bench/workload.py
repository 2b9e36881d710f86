"""Work to measure runs with: a model of a real shape with random weights, and data; its tokenizer has a word a token.

Everything goes into one folder.
"""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

_REWARD = '''"""Rewards even words: something that a random model can learn to do more of."""


def score(prompt, completion, answer, row):
    words = completion.split()
    return sum(word[-1] in "02468" for word in words) / max(1, len(words))
'''
_PROMPT_WORDS = 64


def make_tokenizer(shape: Path) -> None:
    """shape: a folder of the bench's own with a config.json, which gets a tokenizer if it has none yet."""
    if not (shape / "tokenizer.json").exists():
        vocabulary = int(json.loads((shape / "config.json").read_text())["vocab_size"])
        word_tokenizer(vocabulary).save_pretrained(shape)


def make_random_model(shape: Path, folder: Path) -> None:
    """shape: as for `make_tokenizer`. Writes model/. Raises RuntimeError."""
    make_tokenizer(shape)
    command = [sys.executable, "-m", "rlctl.training.random_init", str(shape), str(folder / "model"), "0", "quick"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise RuntimeError(f"no random model in the shape of {shape}: {made.stderr.strip().splitlines()[-1]}")


def make_prompts(folder: Path, count: int) -> None:
    """Writes train.jsonl and reward.py."""
    rng = random.Random(0)
    _write(folder, [{"prompt": _words(rng, _PROMPT_WORDS), "answer": ""} for _ in range(count)])
    (folder / "reward.py").write_text(_REWARD)


def make_samples(folder: Path, count: int, tokens: int) -> None:
    """Writes train.jsonl: every sample as long as `tokens`, of which all but the first are trained on."""
    rng = random.Random(0)
    # The end token comes by itself.
    _write(folder, [{"prompt": _words(rng, 1) + " ", "answer": _words(rng, tokens - 2)} for _ in range(count)])


def _write(folder: Path, rows: list[dict[str, str]]) -> None:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _words(rng: random.Random, count: int) -> str:
    return " ".join(f"w{rng.randrange(3, 60)}" for _ in range(count))


def word_tokenizer(size: int) -> Any:
    """A word a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<pad>", "<end>", "<unknown>")
    names = [*special, *(f"w{index}" for index in range(len(special), size))]
    words = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=special[2]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=special[0], eos_token=special[1], unk_token=special[2]
    )
