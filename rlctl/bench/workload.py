"""The work of `rlctl bench grpo`: a model of a real shape with random weights, prompts, and a reward, in one folder."""

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


def make_workload(shape: Path, folder: Path, prompts: int) -> None:
    """shape: a folder with a config.json. Writes model/, train.jsonl and reward.py. Raises RuntimeError."""
    if not (shape / "tokenizer.json").exists():
        vocabulary = int(json.loads((shape / "config.json").read_text())["vocab_size"])
        _tokenizer(vocabulary).save_pretrained(shape)
    command = [sys.executable, "-m", "rlctl.training.random_init", str(shape), str(folder / "model"), "0"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise RuntimeError(f"no random model in the shape of {shape}: {made.stderr.strip().splitlines()[-1]}")
    rng = random.Random(0)
    rows = (" ".join(f"w{rng.randrange(2, 60)}" for _ in range(_PROMPT_WORDS)) for _ in range(prompts))
    text = "".join(json.dumps({"prompt": row, "answer": ""}) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(text)
    (folder / "reward.py").write_text(_REWARD)


def _tokenizer(size: int) -> Any:
    """A word a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(size)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w2")
