"""Material of sft-code-tiny: programs of one line to imitate, tasks with tests, and the shape of their model.

    python recipes/tiny/make_code.py data recipes/tiny-data         # code-sft.jsonl.gz; code- and python-*.jsonl
    python recipes/tiny/make_code.py shape recipes/tiny/qwen3-code  # config.json, tokenizer and chat template

Both write the same every time. The model is a Qwen3 of 0.4 million parameters and 128 positions. Its tokenizer has one
token for each keyword and operator of the programs and each word of the tasks, and single characters for all else. Its
chat template is that of `make_games.py`, so that the model can call a tool.
"""

import argparse
import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from make_games import MARKERS, SPECIAL, TEMPLATE

TRAIN_ROWS = 1500
VALIDATION_ROWS = 200
# Problems for the tool, to train on.
PROBLEM_ROWS = 1000
# Chats of the warm start.
PROGRAM_CHATS = 14000
TOOL_CHATS = 4000
# Share of the programs that forget a step, and share of the problems that are answered without the tool.
FORGETFUL = 0.67
HASTY = 0.64
TESTS = 5
CONSTANTS = range(2, 10)
Row = dict[str, Any]

# Steps of a task on a number: words, and the expression, whose operand is in brackets if it has an operator.
NUMBER_STEPS = {
    "add {k}": "{x} + {k}",
    "subtract {k}": "{x} - {k}",
    "multiply by {k}": "{x} * {k}",
    "remainder by {k}": "{x} % {k}",
    "square": "{x} ** 2",
    "negate": "-{x}",
}
KEEPS = {"above {k}": "v > {k}", "below {k}": "v < {k}", "even": "v % 2 == 0", "odd": "v % 2 == 1"}
CHANGES = {"add {k}": "v + {k}", "subtract {k}": "v - {k}", "multiply by {k}": "v * {k}", "square": "v ** 2", "": "v"}
TOTALS = {"sum": "sum", "largest": "max", "smallest": "min", "sort": "sorted"}

WORDS = (
    "number list keep above below even odd add subtract multiply by remainder square negate sum largest smallest sort "
    "def f return for in if v x max min sorted len print Tools python code Compute Use the tool"
)
PARTS = [
    *(
        '{"name": "',
        '", "arguments": {"',
        '": "',
        '"}}',
        "):",
        " + ",
        " - ",
        " * ",
        " ** ",
        " % ",
        " > ",
        " < ",
        " == ",
    ),
    *(": ", ", ", " (", " -"),
]
CHARACTERS = ["\n", *map(chr, range(32, 127))]
MAX_LENGTH = 128


@dataclass(frozen=True)
class Task:
    """A task: words for the model, a right program, and one of a pupil who forgets a step."""

    words: str
    program: str
    forgetful_program: str
    takes_list: bool


def tokenizer() -> Any:
    """Return the tokenizer. A known word, an operator and a part of a tool call are one token each."""
    import re

    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [form for word in WORDS.split() for form in (word, f" {word}")]
    tokens = dict.fromkeys([*SPECIAL, *MARKERS, *PARTS, *words, *CHARACTERS])
    # Equal scores: the fewest tokens win.
    pieces = Tokenizer(models.Unigram([(token, -1.0) for token in tokens], unk_id=SPECIAL.index("<unk>")))
    parts = "|".join(map(re.escape, PARTS))
    pieces.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{parts}| ?[A-Za-z]+|[\s\S]"), "isolated")
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
        vocab_size=224,
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


def draw_task(draw: random.Random) -> Task:
    """Return a task on a number or on a list. A forgetful pupil leaves out the second step, or the condition."""
    k = draw.choice(CONSTANTS)
    if draw.random() < 0.5:
        first, second = draw.choice(list(NUMBER_STEPS)), draw.choice(list(NUMBER_STEPS))
        later_k = draw.choice(CONSTANTS)
        start = NUMBER_STEPS[first].format(x="x", k=k)
        return Task(
            words=f"number: {first.format(k=k)}, {second.format(k=later_k)}",
            program=f"def f(x): return {NUMBER_STEPS[second].format(x=f'({start})', k=later_k)}",
            forgetful_program=f"def f(x): return {start}",
            takes_list=False,
        )
    keep, change, total = draw.choice(list(KEEPS)), draw.choice(list(CHANGES)), draw.choice(list(TOTALS))
    changed_k = draw.choice(CONSTANTS)
    steps = [f"keep {keep.format(k=k)}", change.format(k=changed_k), total]
    values = f"{CHANGES[change].format(k=changed_k)} for v in x"
    return Task(
        words=f"list: {', '.join(step for step in steps if step)}",
        program=f"def f(x): return {TOTALS[total]}({values} if {KEEPS[keep].format(k=k)})",
        forgetful_program=f"def f(x): return {TOTALS[total]}({values})",
        takes_list=True,
    )


def draw_tests(task: Task, draw: random.Random) -> list[str]:
    """Return asserts of the right program's values. The forgetful program fails one, unless it is right as well."""
    right, forgetful = _function(task.program), _function(task.forgetful_program)
    tests: list[str] = []
    has_caught = False
    for attempt in range(200):
        value = [draw.randint(0, 14) for _ in range(draw.randint(4, 6))] if task.takes_list else draw.randint(-20, 20)
        try:
            expected = right(value)
        except ValueError:  # the largest of no number
            continue
        is_caught = forgetful(value) != expected
        if len(tests) == TESTS - 1 and not has_caught and not is_caught and attempt < 150:
            continue
        has_caught = has_caught or is_caught
        tests.append(f"assert f({value}) == {expected}")
        if len(tests) == TESTS:
            return tests
    raise ValueError(f"no tests for {task}")


def _function(program: str) -> Any:
    """Return the function `f` of a program that this file made."""
    names: dict[str, Any] = {}
    exec(program, names)
    return names["f"]


def draw_expression(draw: random.Random, held_out: bool) -> str:
    """Return a sum of products. Held out are those whose first number is a multiple of 5."""
    while True:
        numbers = [str(draw.randint(2, 99)) for _ in range(draw.randint(2, 3))]
        if (int(numbers[0]) % 5 == 0) == held_out:
            return numbers[0] + "".join(f" {draw.choice('+-*')} {number}" for number in numbers[1:])


def problem_rows(held_out: bool) -> Iterator[Row]:
    """Yield problems for the tool `python` without end."""
    draw = random.Random(1)
    while True:
        expression = draw_expression(draw, held_out)
        user = {"role": "user", "content": f"Compute {expression}. Use the tool python."}
        yield {"messages": [user], "answer": str(eval(expression))}


def tool_chats(draw: random.Random) -> Iterator[Row]:
    """Yield problems of a hasty pupil without end: most are answered by 0, the others by the output of the tool."""
    system = {"role": "system", "content": "Tools: python(code)."}
    while True:
        expression = draw_expression(draw, held_out=False)
        messages = [system, {"role": "user", "content": f"Compute {expression}. Use the tool python."}]
        answer = "0"
        if draw.random() >= HASTY:
            answer = str(eval(expression))
            call = json.dumps({"name": "python", "arguments": {"code": f"print({expression})"}})
            messages.append({"role": "assistant", "content": f"<tool_call>{call}</tool_call>"})
            messages.append({"role": "tool", "content": answer})
        yield {"messages": [*messages, {"role": "assistant", "content": answer}]}


def parts() -> dict[str, list[Row]]:
    """Return the rows of each file. No chat has a task or a problem that is held out."""
    draw = random.Random(0)
    tasks: dict[str, Task] = {}
    while len(tasks) < TRAIN_ROWS + VALIDATION_ROWS:
        task = draw_task(draw)
        tasks[task.words] = task
    rows: list[Row] = []
    for task in tasks.values():
        user = {"role": "user", "content": task.words}
        rows.append({"messages": [user], "answer": task.program, "test_list": draw_tests(task, draw)})
    held_out = {row["messages"][0]["content"] for row in rows[:VALIDATION_ROWS]}
    chats: list[Row] = []
    while len(chats) < PROGRAM_CHATS:
        task = draw_task(draw)
        if task.words in held_out:
            continue
        program = task.forgetful_program if draw.random() < FORGETFUL else task.program
        messages = [{"role": "user", "content": task.words}, {"role": "assistant", "content": program}]
        chats.append({"messages": messages})
    chats += islice(tool_chats(draw), TOOL_CHATS)
    draw.shuffle(chats)
    return {
        "code-sft": chats,
        "code-train": rows[VALIDATION_ROWS:],
        "code-validation": rows[:VALIDATION_ROWS],
        "python-train": list(islice(problem_rows(held_out=False), PROBLEM_ROWS)),
        "python-validation": list(islice(problem_rows(held_out=True), VALIDATION_ROWS)),
    }


def write_data(folder: Path) -> None:
    """Write the files; the chats are gzipped."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in parts().items():
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        if name == "code-sft":
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
