"""Writes reward models for tests: Hugging Face sequence classifiers with one label."""

import shutil
from pathlib import Path

from tests.tiny_models import Kind, make_model

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def make_reward_model(folder: Path, kind: Kind = "qwen3", *, seed: int = 0, max_length: int = 256) -> Path:
    """Write a random float32 sequence classifier and its character tokenizer; return `folder`."""
    base = make_model(folder.with_name(f"{folder.name}-base"), kind, seed=seed, max_length=max_length)
    return add_value_head(base, folder, seed)


def add_value_head(base: Path, folder: Path, seed: int = 0) -> Path:
    """Write a sequence classifier with the decoder and tokenizer of a causal LM, and a random head; return `folder`."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    for name in _TOKENIZER:
        if (base / name).exists():
            shutil.copy(base / name, folder / name)
    return folder


def class_values(folder: Path, sequences: list[list[int]], *, side: str = "alone") -> list[float]:
    """Return transformers' value of each sequence: alone, or as rows of one batch padded on the side left or right."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    pad = model.config.pad_token_id
    longest = max(map(len, sequences))
    with torch.no_grad():
        if side == "alone":
            return [float(model(torch.tensor([tokens])).logits) for tokens in sequences]
        rows = []
        masks = []
        for tokens in sequences:
            padding = [pad] * (longest - len(tokens))
            present = [1] * len(tokens)
            absent = [0] * len(padding)
            rows.append(padding + tokens if side == "left" else tokens + padding)
            masks.append(absent + present if side == "left" else present + absent)
        mask = torch.tensor(masks)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        output = model(torch.tensor(rows), attention_mask=mask, position_ids=positions)
        values: list[float] = output.logits[:, 0].tolist()
        return values
