"""recipes/TUTORIAL.md: its files are written and its commands are run, in the order of the page."""

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.faults.runs import WITHOUT_VLLM

PAGE = Path(__file__).parents[2] / "recipes" / "TUTORIAL.md"
# A run of the page takes minutes. This one takes seconds, and every part of the program.
SMALL = {
    "grpo": {"num_steps": 2, "num_prompts_per_step": 8, "num_generations_per_prompt": 4},
    "generation": {"max_new_tokens": 4, "kv_cache_mib": 64, "engine": {"name": WITHOUT_VLLM.partition("=")[2]}},
    "validation": {"every": 2, "max_prompts": 8},
    "checkpoint": {"every": 2},
}
PROGRAMS = {"rlctl": [sys.executable, "-m", "rlctl"], "python": [sys.executable]}


def blocks(language: str, section: str = PAGE.read_text()) -> Iterator[str]:
    """Yield the text of each fenced block of a language, in order."""
    for block in re.finditer(r"^```(\w*)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
        if block[1] == language:
            yield block[2]


def write_files(folder: Path) -> None:
    """Write each block that begins with a file's name."""
    for language in ("python", "yaml"):
        for text in blocks(language):
            name = text.partition("\n")[0].removeprefix("# ")
            (folder / name).write_text(text)


def commands(first: int, last: int) -> list[str]:
    """Return the commands of sections `first` to `last`."""
    sections = re.split(r"^## \d+\. .*$", PAGE.read_text(), flags=re.MULTILINE)
    lines = list[str]()
    for section in sections[first : last + 1]:
        for block in blocks("", section):
            lines += block.splitlines()
    return lines


def run_command(command: str, folder: Path) -> str:
    """Run a command of the page in `folder`; return its output."""
    program, *arguments = command.split()
    process = subprocess.run(
        [*PROGRAMS[program], *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=900
    )
    assert process.returncode == 0, f"{command}\n{process.stdout}\n{process.stderr}"
    return process.stdout + process.stderr


def test_each_file_and_each_command_before_a_run_works(tmp_path: Path) -> None:
    write_files(tmp_path)
    output_by_command = {command: run_command(command, tmp_path) for command in commands(1, 4)}
    with (tmp_path / "digits.csv").open() as file:
        assert list(csv.reader(file))[1] == ["10+16=", "6"]
    checked = output_by_command["rlctl config check digits.yaml --try-rewards"]
    for line in next(blocks("text")).splitlines():
        assert line.replace("digits.csv", str(tmp_path / "digits.csv")) in checked
    assert "276.2 MiB of" in output_by_command["rlctl train grpo digits.yaml --dry-run"]


@pytest.mark.long  # a minute; further parts are tested elsewhere
def test_each_command_from_the_run_on_works(tmp_path: Path) -> None:
    write_files(tmp_path)
    output_by_command = {command: run_command(command, tmp_path) for command in commands(1, 4)}
    recipe = yaml.safe_load((tmp_path / "digits.yaml").read_text())
    (tmp_path / "digits.yaml").write_text(yaml.safe_dump(recipe | SMALL))
    output_by_command |= {command: run_command(command, tmp_path) for command in commands(5, 9)}
    assert "pass@4" in output_by_command["rlctl eval digits -k 4"]
    compared = " ".join(output_by_command["rlctl eval --compare strict digits"].split())
    # Both results are greedy: the page's verdict is about the models, not about temperatures.
    assert compared.count("1 answer each, greedy") == 2
    assert "Settings differ (scored_by)" in compared and "chance" in compared
    assert (tmp_path / "runs/digits/report.html").is_file()
    assert (tmp_path / "digits-hf/model.safetensors").is_file()


@pytest.mark.long  # the page as it is printed
def test_the_tutorial_as_it_is_printed_learns_the_last_digit(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_files(tmp_path)
    for command in (*commands(1, 5), *commands(9, 9)):
        run_command(command, tmp_path)
    records = [json.loads(line) for line in (tmp_path / "runs/digits/metrics.jsonl").read_text().splitlines()]
    accuracies = [record["validation/accuracy"] for record in records if record["kind"] == "validation"]
    assert accuracies[0] < 0.05
    assert accuracies[-1] > 0.85
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "digits-hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "digits-hf")
    question = tokenizer("12+7=", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(model.generate(question, max_new_tokens=4, do_sample=False)[0]) == "12+7=9<eos>"
