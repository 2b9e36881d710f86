"""Writes tiny random Hugging Face model folders for tests, of four architectures or of any other.

`make_model(tmp_path / "m", "qwen3")` takes a tenth of a second; the folder loads in transformers and vLLM.
"""

from pathlib import Path
from typing import Any

Kind = str
# Keys of config.json besides the sizes. These kinds train with both backends.
OPTIONS: dict[Kind, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"tie_word_embeddings": False, "num_experts_per_tok": 2, "norm_topk_prob": True},
}
KINDS: tuple[Kind, ...] = tuple(OPTIONS)
PAD = 0
EOS = 1
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
    more: dict[str, Any] | None = None,
) -> Path:
    """Write a random float32 model and its character tokenizer; return `folder`.

    tied: lm_head shares the embedding; None: as OPTIONS has it. more: further keys of config.json. scale: factor on
    the random weights. It makes log-probs far from uniform, and a wrong mask or position shows. Biases and norms are
    random too.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

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
    if kind == "qwen3_moe":
        options |= {"num_experts": experts, "moe_intermediate_size": hidden}
    options |= OPTIONS.get(kind, {}) | (more or {})
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
    """Write a character tokenizer: <pad> 0, <eos> 1, <unk> 2, then as much of ALPHABET as fits; and a chat template.

    Byte-level BPE without merges, since transformers rebuilds a qwen2 folder's tokenizer as exactly that.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *ALPHABET.replace(" ", "Ġ").replace("\n", "Ċ")][:vocab]
    core = Tokenizer(models.BPE({word: token_id for token_id, word in enumerate(words)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **special)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
