"""The stages of a preparation: what each of them knows, refuses and imports, without a command line."""

import json
import subprocess
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from rlctl.config.errors import ConfigError
from rlctl.data.files import DataError
from rlctl.data.load_data import RowReader, RunRows
from rlctl.launch.first_row import local_chat
from rlctl.launch.loading import load_run_samples, load_run_tasks
from rlctl.launch.prepare import RunRequest, prepare
from rlctl.preflight import machine
from rlctl.preflight.load import load
from rlctl.utils.devices import Gpu
from tests.unit import folders

# Behind this column the text of a short prompt is longer than that of a long prompt.
WIDE = "z" * 500
SHORT = [{"prompt": "1+1=", "answer": "2", "source": WIDE}] * 40
LONG = {"prompt": "1+" * 40 + "=", "answer": "40"}
BOOM = {"prompt": "boom", "answer": "2", "source": "z" * 250}
REFUSES = """{% for m in messages %}{% if 'boom' in m['content'] %}{{ raise_exception('no booms') }}{% endif %}\
{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fill the current directory by `folders.write`, and hide all GPUs."""
    monkeypatch.chdir(folders.write(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "home/refuses.jinja").write_text(REFUSES)
    return tmp_path / "home"


def write_rows(home: Path, rows: list[dict[str, str]]) -> str:
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "data.train.path=rows.jsonl"


class RecordedProgress:
    """Progress as a list of lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def busy(self, activity: str) -> AbstractContextManager[None]:
        self.lines.append(activity)
        return nullcontext()

    def note(self, lines: Iterable[str]) -> None:
        self.lines += lines


def find_error_of_the_run(kind: str, overrides: list[str]) -> str:
    """Return the error that ends a run which tokenizes its rows while Ray starts."""
    settled = load(kind, f"{kind}-tiny", overrides).settled
    chat = local_chat(settled.config)
    rows: RunRows = RowReader(settled.config).read()
    with pytest.raises(DataError) as raised:
        if settled.grpo:
            load_run_tasks(settled.grpo, rows, chat, lambda *_, **__: None)
        elif settled.sft:
            load_run_samples(settled.sft, rows, chat, lambda *_, **__: None)
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "rows", "overrides", "expected"),
    [
        ("grpo", [*SHORT, LONG, *SHORT], [], "prompt r40 has 81 tokens; with generation.max_new_tokens="),
        ("grpo", [LONG] * 3, ["data.max_prompt_length=20"], "every prompt is longer than data.max_prompt_length=20"),
        ("grpo", [*SHORT, BOOM, *[LONG] * 40], ["data.chat_template=refuses.jinja"], ":41: the chat template refuses"),
        ("sft", [LONG] * 3, [], "every prompt fills the longest sequence of 64 tokens (model.max_length)"),
        ("sft", [LONG] * 3, ["data.max_prompt_length=50"], "is longer than data.max_prompt_length=50"),
        ("sft", [*SHORT, BOOM, *[LONG] * 40], ["data.chat_template=refuses.jinja"], ":41: the chat template refuses"),
    ],
)  # fmt: skip
def test_a_dry_run_refuses_the_rows_that_the_run_refuses_with_the_same_words(
    home: Path, kind: str, rows: list[dict[str, str]], overrides: list[str], expected: str
) -> None:
    overrides = [write_rows(home, rows), *overrides]
    with pytest.raises(ConfigError) as raised:
        prepare(RunRequest(kind, f"{kind}-tiny", overrides, is_dry=True), "read")
    assert [str(problem) for problem in raised.value.problems] == [f"data: {find_error_of_the_run(kind, overrides)}"]
    assert expected in str(raised.value)


def test_a_dry_run_refuses_the_rows_of_a_recipe_that_leave_no_room(home: Path) -> None:
    write_rows(home, [LONG])
    overrides = ["validation.recipe=grpo-tiny", "validation.recipe.data.validation.path=rows.jsonl"]
    with pytest.raises(ConfigError, match=r"^data: prompt r0 has 81 tokens; with generation\.max_new_tokens="):
        prepare(RunRequest("sft", "sft-tiny", overrides, is_dry=True), "read")


def test_the_config_is_checked_without_torch_ray_or_an_engine(home: Path) -> None:
    program = (
        "import sys; from rlctl.launch.prepare import RunRequest, prepare; "
        "prepare(RunRequest('grpo', 'grpo.recipe.yaml', []), 'checked'); "
        "print(sorted({'torch', 'ray', 'vllm', 'transformers', 'typer'} & sys.modules.keys()))"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout == "[]\n"


def test_each_stage_adds_to_the_one_before(home: Path) -> None:
    progress = RecordedProgress()
    prepared = prepare(RunRequest("grpo", "grpo.recipe.yaml", ["generation.num_engines=1"]), "checked", progress)
    assert (prepared.plan, prepared.row_counts, progress.lines) == (None, None, [])
    prepared.advance("planned")
    assert prepared.plan and prepared.plan.placement and prepared.settled.device == "cpu"
    assert (prepared.problems, prepared.row_counts) == ([], None)
    prepared.advance("read")
    assert (prepared.row_counts, progress.lines) == ({"train": 1, "validation": 0}, ["reading the data"])
    # The run takes the rows that were read.
    (home / "train.jsonl").unlink()
    assert len(prepared.reader.take().train) == 1


def test_a_plan_that_does_not_fit_is_returned_and_ends_the_next_stage(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "read_gpus", lambda: ([Gpu("small", 1 << 20)], "580.1"))
    (home / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\nno row\n')
    prepared = prepare(RunRequest("grpo", "grpo.recipe.yaml", []), "planned")
    assert [problem.key for problem in prepared.problems] == ["trainer.num_ranks"]
    with pytest.raises(ConfigError) as raised:
        prepared.advance("read")
    assert raised.value.problems == prepared.problems


def test_a_dry_run_notes_what_a_person_should_look_at_in_any_row(home: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows = [SHORT[0], {**SHORT[0], "tools": tools}, {**LONG, "tools": tools}]
    (home / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    progress = RecordedProgress()
    request = RunRequest("grpo", "grpo.recipe.yaml", ["data.max_prompt_length=100"], is_dry=True)
    prepare(request, "read", progress)
    assert progress.lines[:2] == ["loading the tokenizer", "reading the data"]
    assert len(progress.lines) == 3
    assert progress.lines[2].startswith("2 rows have tools, and the chat template shows none")
