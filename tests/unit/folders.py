"""Writes a folder with all files that a recipe names: a model's config.json, a tokenizer, data, a user's rewards."""

import json
import shutil
from pathlib import Path

from rlctl.config.builtin import RECIPES

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}

GRPO = """\
defaults: grpo.yaml
model:
  path: model
data:
  train:
    path: train.jsonl
  max_prompt_length: 64
rewards:
  - name: exact
generation:
  max_new_tokens: 64
"""

SFT = """\
defaults: sft.yaml
model:
  path: model
data:
  train:
    path: chats.jsonl
"""


def weights(made_by: str = "tests") -> bytes:
    """Return the bytes of a safetensors file without tensors."""
    header = json.dumps({"__metadata__": {"made_by": made_by}}).encode()
    return len(header).to_bytes(8, "little") + header


def write(folder: Path) -> Path:
    """Write the files into `folder`, among them grpo.recipe.yaml and sft.recipe.yaml, which have no problems."""
    (folder / "model").mkdir(parents=True)
    (folder / "model/config.json").write_text(json.dumps(MODEL))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RECIPES / "tiny/qwen3-tiny" / name, folder / "model" / name)
    (folder / "model/model.safetensors").write_bytes(weights())
    (folder / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    (folder / "mine.py").write_text("def brevity(prompt, completion, answer, row):\n    return 0.0\n")
    (folder / "grpo.recipe.yaml").write_text(GRPO)
    (folder / "sft.recipe.yaml").write_text(SFT)
    return folder


def put_in_cache(hub: Path, name: str, folder: Path) -> Path:
    """Put a folder into a hub cache under a name, as a download would, and return its snapshot there."""
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots/0123"
    shutil.copytree(folder, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0123")
    return snapshot
