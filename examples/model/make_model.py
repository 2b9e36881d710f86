"""Make a small model of another architecture, with random weights and the tokenizer of the tiny sums."""

from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlctl.config.builtin import RECIPES

FOLDER = "llama-tiny"
TOKENIZER = AutoTokenizer.from_pretrained(RECIPES / "tiny/qwen3-tiny")
SHAPE = LlamaConfig(
    vocab_size=32,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    eos_token_id=TOKENIZER.eos_token_id,
    pad_token_id=TOKENIZER.pad_token_id,
)

if __name__ == "__main__":
    LlamaForCausalLM(SHAPE).save_pretrained(FOLDER)
    TOKENIZER.save_pretrained(FOLDER)
    print(FOLDER)
