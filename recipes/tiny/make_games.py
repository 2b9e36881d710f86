"""Material of sft-games-tiny: chats to imitate, tasks, and the shape of a chat model.

    python recipes/tiny/make_games.py data recipes/tiny-data          # games-sft.jsonl.gz, tasks of both games
    python recipes/tiny/make_games.py shape recipes/tiny/qwen3-games  # config.json, tokenizer and chat template

Both write the same every time. The model is a Qwen3 of 0.4 million parameters and 256 positions. Its tokenizer has the
words of the two games, the numbers up to 99, and single characters for all else, so that it can read any ASCII text.
"""

import argparse
import gzip
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from rlctl.environments import calculator, guess

# Rows of each game: to train on, to hold out, and chats of the warm start.
TRAIN_ROWS, VALIDATION_ROWS, GUESS_CHATS, CALCULATOR_CHATS = 1000, 200, 12000, 6000
# Share of the teacher's games that heed the hints, and share of its problems given to the tool.
HEEDING, ASKING = 0.36, 0.36
# Numbers of a range in the warm start, and in the tasks, where some ranges are held out.
SIZES, TASK_SIZE = (14, 17), 15
# Distance that a player goes in the direction of each hint. With 5 guesses this finds any of 15 numbers.
STRIDES = (4, 2, 1, 1)
Row = dict[str, Any]

SPECIAL = ["<pad>", "<|end|>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
MARKERS = ["<tool_call>", "</tool_call>"]
# Words of the games in every chat: few, so that chats and runs are short.
PHRASES = [
    "I am thinking of a number from ",
    " to ",
    ". You have ",
    " guesses. Answer with one number.",
    "Tools: answer(value), calculate(expression).",
    "Compute ",
    ". Use the tool calculate, then give the result to the tool answer.",
    "Thank you.",
]
# Parts of a call's JSON, and operators with their spaces.
PARTS = ['{"name": "', '", "arguments": {"', '": "', '": ', '"}}', "}}", " + ", " - ", " * "]
WORDS = (
    "I am thinking of a number from to You have guesses Answer with one higher lower "
    "Compute Use the tool calculate then give result answer Tools expression value Thank you Done Error"
)
NUMBERS = [str(number) for number in range(10)] + [f"{number:02}" for number in range(100)]
CHARACTERS = ["\n", *map(chr, range(32, 127))]
MAX_LENGTH = 256

# One marker begins a message, one ends it. Nothing is ever rewritten, so that a chat only grows.
TEMPLATE = """\
{%- set ns = namespace(system='') %}
{%- if messages and messages[0].role == 'system' %}{% set ns.system = messages[0].content %}{% endif %}
{%- if tools %}
    {%- if ns.system %}{% set ns.system = ns.system + ' ' %}{% endif %}
    {%- set ns.system = ns.system + 'Tools:' %}
    {%- for tool in tools %}
        {%- set names = tool.function.parameters.properties | list | join(', ') %}
        {%- set ns.system = ns.system + ' ' + tool.function.name + '(' + names + ')' + ('.' if loop.last else ',') %}
    {%- endfor %}
{%- endif %}
{%- if ns.system %}{{ '<|system|>' + ns.system + '<|end|>' }}{% endif %}
{%- for message in messages %}
    {%- if message.role in ('user', 'assistant', 'tool') %}
        {{- '<|' + message.role + '|>' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {{- '<tool_call>{"name": "' + function.name + '", "arguments": ' + function.arguments | tojson }}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>' }}
    {%- elif not (message.role == 'system' and loop.first) %}
        {{- raise_exception('a chat has an optional system message, then user, assistant and tool messages') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""


def tokenizer() -> Any:
    """Return the tokenizer. Known phrases and words, numbers of two digits and parts of calls are one token."""
    import re

    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [form for word in WORDS.split() for form in (word, f" {word}")]
    tokens = dict.fromkeys([*SPECIAL, *MARKERS, *NUMBERS, *PHRASES, *PARTS, *words, *CHARACTERS])
    # Equal scores: the fewest tokens win.
    pieces = Tokenizer(models.Unigram([(token, -1.0) for token in tokens], unk_id=SPECIAL.index("<unk>")))
    parts = "|".join(map(re.escape, [*PHRASES, *PARTS]))
    pieces.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{parts}| ?[A-Za-z]+|[0-9]{{1,2}}|[\s\S]"), "isolated")
    pieces.decoder = decoders.Fuse()
    pieces.add_special_tokens(SPECIAL)
    pieces.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=pieces,
        pad_token="<pad>",
        eos_token="<|end|>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def model_config(tokens: Any) -> Any:
    """Return the model's shape."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=288,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        # Wider than usual: the loss of the first steps falls faster, and ends the same.
        initializer_range=0.08,
        tie_word_embeddings=True,
        pad_token_id=tokens.pad_token_id,
        eos_token_id=tokens.eos_token_id,
        bos_token_id=None,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )


def guess_chats(draw: random.Random) -> Iterator[Row]:
    """Yield games without end. All begin next to the middle of the range. Then most players are stubborn and repeat
    themselves; the others go 4, 2, 1 and 1 in the direction of the hints.
    """
    while True:
        size = draw.randint(*SIZES)
        low = draw.randint(1, 100 - size)
        if size == TASK_SIZE and low % 5 == 0:  # held out
            continue
        high, game = low + size - 1, guess.Guess()
        strides = STRIDES if draw.random() < HEEDING else (0, 0, 0, 0)
        messages = [{"role": "user", "content": game.reset(low, high, draw.randint(low, high))}]
        said = (low + high) // 2 + draw.randint(-1, 1)
        for stride in (*strides, 0):
            messages.append({"role": "assistant", "content": str(said)})
            if not (hint := game.step(str(said))):
                break
            messages.append({"role": "user", "content": hint})
            said += stride if hint == "higher" else -stride
        yield {"messages": messages}


def calculator_chats(draw: random.Random) -> Iterator[Row]:
    """Yield problems of a poor pupil without end: most are answered by 0, the others by the tool's result."""
    system = {"role": "system", "content": "Tools: answer(value), calculate(expression)."}
    for row in calculator.tasks(seed=1):
        problem, value = calculator.Calculator(), 0
        messages = [system, {"role": "user", "content": problem.reset(**row)}]
        if draw.random() < ASKING:
            value = int(result := problem.calculate(row["expression"]))
            messages += [_call("calculate", expression=row["expression"]), {"role": "tool", "content": result}]
        messages += [_call("answer", value=value), {"role": "tool", "content": problem.answer(value)}]
        yield {"messages": [*messages, {"role": "assistant", "content": "Done."}]}


def _call(name: str, **arguments: Any) -> dict[str, str]:
    """Return the assistant's message that calls a tool."""
    called = json.dumps({"name": name, "arguments": arguments})
    return {"role": "assistant", "content": f"<tool_call>{called}</tool_call>"}


def parts() -> dict[str, list[Row]]:
    """Return the rows of each file. No chat has a range or a problem that is held out."""
    draw = random.Random(0)
    chats = [*islice(guess_chats(draw), GUESS_CHATS), *islice(calculator_chats(draw), CALCULATOR_CHATS)]
    draw.shuffle(chats)
    found = {"games-sft": chats}
    for name, game in (("guess", guess), ("calculator", calculator)):
        found[f"{name}-train"] = list(islice(game.tasks(seed=0), TRAIN_ROWS))
        found[f"{name}-validation"] = list(islice(game.tasks(seed=0, held_out=True), VALIDATION_ROWS))
    return found


def write_data(folder: Path) -> None:
    """Write the files; the chats are gzipped."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in parts().items():
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        if name == "games-sft":
            (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
        else:
            (folder / f"{name}.jsonl").write_bytes(lines)


def write_shape(folder: Path) -> None:
    """Write config.json and the tokenizer."""
    tokens = tokenizer()
    model_config(tokens).save_pretrained(folder)
    tokens.save_pretrained(folder)


def main() -> None:
    """Write the files named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["data", "shape"])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    {"data": write_data, "shape": write_shape}[arguments.what](arguments.folder)


if __name__ == "__main__":
    main()
