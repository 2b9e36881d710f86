"""Writes a reward model that prefers right sums: a tiny sequence classifier, trained on pairs of answers (15 s)."""

import random

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlctl.config.builtin import RECIPES

STEPS = 200
PAIRS = 64
SOURCE = RECIPES / "tiny/qwen3-sums"

draws = random.Random(0)
torch.manual_seed(0)
# One thread is faster for a model of this size.
torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(SOURCE)
model = AutoModelForSequenceClassification.from_pretrained(SOURCE, num_labels=1, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def draw_pair() -> tuple[str, str]:
    """Return a right sum and a wrong one."""
    first, second = draws.randrange(50), draws.randrange(50)
    right = first + second
    wrong = draws.choice([other for other in range(99) if other != right])
    return f"{first}+{second}={right}", f"{first}+{second}={wrong}"


for step in range(1, STEPS + 1):
    pairs = [draw_pair() for _ in range(PAIRS)]
    texts = [right for right, _ in pairs] + [wrong for _, wrong in pairs]
    scores = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
    gaps = scores[:PAIRS] - scores[PAIRS:]
    loss = -torch.nn.functional.logsigmoid(gaps).mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}: {(gaps > 0).float().mean():.0%} of the pairs in the right order")
model.save_pretrained("reward-model")
tokenizer.save_pretrained("reward-model")
