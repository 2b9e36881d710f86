"""Tiny random Hugging Face folders of every supported architecture, for everybody's tests.

`make_model(tmp_path / "m", "qwen3")` takes a tenth of a second; the folder loads in transformers and vLLM.
"""

from pathlib import Path
from typing import Any

from rlctl.models.architectures import ARCHITECTURES, ArchitectureRow, WindowKeys

Kind = str
KINDS: tuple[Kind, ...] = tuple(ARCHITECTURES)
# A row that is not in the table: added, it makes an architecture.
MISTRAL = ArchitectureRow(
    causal_lm="MistralForCausalLM",
    qkv_bias=False,
    output_bias=False,
    window=WindowKeys("sliding_window", listed=False),
    tiny={"tie_word_embeddings": False, "sliding_window": None},
)
PAD, EOS = 0, 1
ALPHABET = "0123456789+-*/=?:. \nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\n' }}{% endfor %}"


def make_model(
    folder: Path,
    kind: Kind = "qwen3",
    *,
    tied: bool | None = None,
    vocab: int = 64,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    experts: int = 4,
    max_length: int = 256,
    seed: int = 0,
    scale: float = 4.0,
) -> Path:
    """Write a random float32 model and its character tokenizer; returns `folder`.

    tied: lm_head shares the embedding; None: as the kind's row has it. scale: factor on the random weights, so
    that log-probs are far from uniform and a wrong mask or position shows. Biases and norms are random too.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    row = ARCHITECTURES[kind]
    options: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_length,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": None,
    }
    if row.experts:
        options |= {row.experts.number[0]: experts, row.experts.width[0]: hidden}
    options |= row.tiny
    if tied is not None:
        options["tie_word_embeddings"] = tied
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(scale)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    make_tokenizer(folder, vocab)
    return Path(folder)


def make_tokenizer(folder: Path, vocab: int = 64) -> None:
    """A character tokenizer: <pad> 0, <eos> 1, <unk> 2, then as much of ALPHABET as fits; a chat template.

    Byte-level BPE without merges, since transformers rebuilds a qwen2 folder's tokenizer as exactly that.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *ALPHABET.replace(" ", "Ġ").replace("\n", "Ċ")][:vocab]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **special)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
