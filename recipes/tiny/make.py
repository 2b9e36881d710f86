"""Makes the tiny recipe's material: the sums to train and validate on, and a model that has learnt nothing yet.

    python recipes/tiny/make.py data recipes/tiny-data        # train.jsonl, validation.jsonl: disjoint
    python recipes/tiny/make.py init runs/tiny-init --seed 0  # Hugging Face folder with random weights

Both write the same bytes every time. The model is a Qwen3 of a few hundred thousand parameters over a tokenizer
of single characters; what is committed in `recipes/tiny/model` is that folder after the warm start
(`rlctl train sft recipes/sft-tiny.yaml`).
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

OPERANDS = range(50)
VALIDATION_ROWS = 200
SPECIAL = ["<pad>", "<eos>", "<unk>"]
CHARACTERS = "0123456789+-*= "
MAX_LENGTH = 64


def rows() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Train and validation rows: every sum of two `OPERANDS`, split at random once and for all."""
    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in OPERANDS for b in OPERANDS]
    random.Random(0).shuffle(sums)
    return sums[VALIDATION_ROWS:], sums[:VALIDATION_ROWS]


def write_data(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in zip(("train", "validation"), rows(), strict=True):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def tokenizer() -> Any:
    """One token a character; no token is put in front or behind."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def model_config(tokens: Any) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        pad_token_id=tokens.pad_token_id,
        eos_token_id=tokens.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )


def write_init(folder: Path, seed: int) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(seed)
    tokens = tokenizer()
    Qwen3ForCausalLM(model_config(tokens)).save_pretrained(folder)
    tokens.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["data", "init"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.what == "data":
        write_data(arguments.folder)
    else:
        write_init(arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
