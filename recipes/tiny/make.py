"""Makes the tiny recipe's material: sums to learn, and the shape of a model with its tokenizer.

    python recipes/tiny/make.py data recipes/tiny-data     # train, validation and sft .jsonl
    python recipes/tiny/make.py shape recipes/tiny/qwen3-tiny   # config.json and tokenizer, no weights

Both write the same bytes every time. The model is a Qwen3 of 0.45 million parameters over a tokenizer of single
characters. `sft.jsonl` is its poor teacher: three answers in five are printed backwards (12+7=91). A warm start on it
gives a model that can add but is right a third of the time. GRPO begins there: the model soon learns the order of
digits, then the rest of adding. `recipes/tiny/qwen3-tiny/model.safetensors` is the export of that warm start (`rlctl
train sft sft-tiny`). `recipes/tiny/qwen3-sums`, the teacher of `opd-tiny`, is the export of `rlctl train grpo` with its
defaults: `rlctl export RUN recipes/tiny/qwen3-sums --dtype bfloat16`.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

OPERANDS = range(50)
VALIDATION_ROWS = 200
SFT_COPIES = 2
BACKWARDS = 0.6
SPECIAL = ["<pad>", "<eos>", "<unk>"]
CHARACTERS = "0123456789+-*= "
MAX_LENGTH = 64

Row = dict[str, str]


def parts() -> dict[str, list[Row]]:
    """train and validation split every sum of two `OPERANDS`; sft has those sums, a share of `BACKWARDS` wrong."""
    draw = random.Random(0)
    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in OPERANDS for b in OPERANDS]
    draw.shuffle(sums)
    train, validation = sums[VALIDATION_ROWS:], sums[:VALIDATION_ROWS]
    taught = [
        {**row, "answer": row["answer"][::-1] if draw.random() < BACKWARDS else row["answer"]}
        for row in train
        for _ in range(SFT_COPIES)
    ]
    return {"train": train, "validation": validation, "sft": taught}


def write_data(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in parts().items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


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
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )


def write_shape(folder: Path) -> None:
    tokens = tokenizer()
    model_config(tokens).save_pretrained(folder)
    tokens.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["data", "shape"])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "data":
        write_data(arguments.folder)
    else:
        write_shape(arguments.folder)


if __name__ == "__main__":
    main()
