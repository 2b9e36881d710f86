"""Any mistake on the command line or in a config: one clear line, exit code 2, under two seconds of CPU, nothing
started."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlctl.config.fields import schema_keys
from rlctl.config.schema import GrpoConfig
from rlctl.launch import assembly
from tests.unit.cli.conftest import Rlctl
from tests.waiting import PATIENCE_S

# Time limit: forty times the longest measured time, 0.5 s. Endless or exponential work exceeds it on any machine.
LONGEST_S = 20.0
RECIPE = "grpo.recipe.yaml"

OVERRIDES: dict[str, tuple[list[str], str]] = {
    "a value that no file can be named": (["rewards.0.name=" + "x" * 300], "must be exact, regex, math_verify"),
    "a model that no file can be named": (["model.path=" + "m" * 300], "no file or folder mmm"),
    "a reward of nothing": (["rewards=[':']"], "no module"),
    "a run's name too long": (["run.name=" + "m" * 300], "must be at most 200 letters, since it names a folder"),
    "a folder's name too long": (["run.dir=" + "m" * 300], "is longer than a folder's name can be, 200 letters"),
    "bytes that are no UTF-8": (["run.name=\udcff"], "must be text that UTF-8 and file names can hold"),
    "a key twice": (["run={seed: 1, seed: 2}"], "seed: written twice"),
    "a million engines": (["generation.num_engines=1000000"], "must be at most 16384, not 1000000"),
    "a million ranks": (["trainer.num_ranks=1000000"], "must be at most 16384, not 1000000"),
    "a billion rollouts": (["grpo.num_generations_per_prompt=1000000000"], "must be at most 1048576"),
    "a billion rollouts in all": (
        ["grpo.num_prompts_per_step=1000000", "grpo.num_generations_per_prompt=1000"],
        "1,000,000 prompts x 1,000 rollouts are more than a step can hold, 1,048,576",
    ),
    "ranks with a hundred divisors": (
        ["trainer.num_ranks=15120", "trainer.backend=megatron", "grpo.num_prompts_per_step=32768",
         "trainer.megatron.tensor_model_parallel_size=11", "trainer.megatron.expert_model_parallel_size=13"],
        "; try ",
    ),
    "a seed of 20 digits": (["run.seed=" + "9" * 20], "must be at most 9223372036854775807"),
    "a seed of 400 digits": (["run.seed=" + "9" * 400], "must be at most 9223372036854775807"),
    "a weight of 400 digits": (["rewards.0.weight=" + "9" * 400], "must be a finite number, not 999"),
    "a negative weight of 400 digits": (["rewards.0.weight=-" + "9" * 400], "must be a finite number, not -999"),
    "infinity": (["rewards.0.weight=.inf"], "must be a finite number, not .inf"),
    "infinity in a word": (["trainer.optimizer.lr=inf"], "must be a finite number, above 0, not 'inf'"),
    "infinity out of digits": (["trainer.optimizer.lr=1e999"], "must be a finite number, above 0, not 1e999"),
    "not a number": (["grpo.loss.clip_high=.nan"], "must be a finite number, at least 0, not .nan"),
    "not a number, in a word": (["grpo.loss.clip_high=-NaN"], "must be a finite number, at least 0, not '-NaN'"),
    "infinity where a whole number is asked": (["grpo.num_steps=.inf"], "must be a whole number, not .inf"),
    "a file for a folder": (["run.dir=/etc/passwd"], "/etc/passwd is no folder: choose another one"),
    "a folder in a file": (["run.dir=/etc/passwd/runs"], "/etc/passwd is no folder: choose another one"),
    "a device for a folder": (["run.dir=/dev/null"], "/dev/null is no folder: choose another one"),
    "no folder": (["run.dir=''"], "is empty: a path is needed"),
    "nobody's folder": (["run.dir=~nobody-here/x"], "~nobody-here is no user of this machine"),
    "nobody's model": (["model.path=~nobody-here/x"], "no file or folder ~nobody-here/x"),
    "a pipe for data": (["data.train.path=pipe.jsonl"], "must name a file or folder, which it is not: pipe.jsonl"),
    "a reference to itself": (["run.name=${run.name}"], "run.name refers to itself"),
    "a circle of references": (["run.name=${run.dir}", "run.dir=${run.name}"], "run.dir refers to itself"),
    "a section within itself": (["run=${run}"], "run refers to itself"),
    "a section in its own value": (["x={y: '${x}'}"], "x.y refers to itself"),
    "a looked-up reference": (["a=b", "run.name=${${a}}"], "must name its key, not look it up"),
    "a resolver that evaluates": (["run.dir=${oc.create:[a]}"], "only keys, ${a.b}, and variables"),
    "half a pattern": (["rewards=[{name: regex, pattern: '(a'}]"], "no regular expression: missing )"),
    "half a reference": (["run.name=${"], "a reference without its closing bracket"),
    "nodes without a number": (["placement.nodes=true"], "must be text or null, not true"),
    "a kind that is a list": (["kind=[grpo]"], "must be one of grpo, sft"),
}  # fmt: skip

FILES: dict[str, tuple[str | bytes, str]] = {
    "a config within itself": ("&a\nrun: *a\n", "an alias (*) within the value that it stands for"),
    "1 MB": ("run: {name: " + "x" * (1 << 20) + "}\n", "cannot be read: is larger than 256 KiB"),
    "500 unknown keys": ("".join(f"k{n}: 1\n" for n in range(500)), "and 350 more"),
    "bytes that are no UTF-8": (b"run: {name: \xff\xfe}\n", "cannot be read: not UTF-8 text"),
    "UTF-16": ("run: {}\n".encode("utf-16"), "cannot be read: not UTF-8 text"),
    "a key twice": ("run: {seed: 1, seed: 2}\n", "seed: written twice"),
    "a tag of another tool": ("data: !include data.yaml\n", "tag !include is not allowed: write plain values"),
}
RECIPES = {
    "no file can be so called": ("x" * 300, "no such recipe or file"),
    "a pipe": ("pipe.yaml", "no such recipe or file"),
    "a folder": ("model", "no such recipe or file"),
    "a link to itself": ("loop.yaml", "no such recipe or file"),
}
COMMANDS = (["config", "check"], ["train", "grpo", "--dry-run"], ["train", "grpo"])


@contextmanager
def bound_time() -> Iterator[None]:
    """Raise TimeoutError after `LONGEST_S` of this process's time, or after minutes of wall time.

    A machine may be busy, and a pipe waits without end.
    """

    def stop(signum: int, frame: Any) -> NoReturn:
        raise TimeoutError(f"took over {LONGEST_S} s" if signum == signal.SIGPROF else "waits")

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, LONGEST_S), signal.SIGALRM: (signal.ITIMER_REAL, PATIENCE_S)}
    old_handlers = {number: signal.signal(number, stop) for number in timers}
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer, _ in timers.values():
            signal.setitimer(timer, 0)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


@pytest.fixture
def read_refusal(rlctl: Rlctl, home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that runs every command, asserts its refusal, and returns the text of the refusal."""

    def refuse_start(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a run was started")

    monkeypatch.setattr(assembly, "launch", refuse_start)
    for name in ("pipe.yaml", "pipe.jsonl"):
        os.mkfifo(home / name)
    (home / "loop.yaml").symlink_to("loop.yaml")

    def run_every_command(*arguments: str) -> str:
        refusals = set[str]()
        for command in COMMANDS:
            refusals.add(run_refused_command(rlctl, *command, *arguments))
        assert len(refusals) == 1
        return refusals.pop()

    return run_every_command


def run_refused_command(rlctl: Rlctl, *arguments: str) -> str:
    """Assert that a command refuses its arguments in bounded time and text. Return the text."""
    with bound_time():
        done = rlctl(*arguments)
    assert (done.code, done.out) == (2, ""), arguments[:3]
    *problems, count = done.err.splitlines()
    assert count.endswith("nothing was started")
    assert len(problems) <= 151
    assert max(map(len, problems)) < 1300
    return done.err


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override(read_refusal: Callable[..., str], name: str) -> None:
    overrides, expected = OVERRIDES[name]
    assert expected in read_refusal(RECIPE, *overrides)


@pytest.mark.parametrize("name", FILES)
def test_a_file(read_refusal: Callable[..., str], home: Path, name: str) -> None:
    text, expected = FILES[name]
    content = text.encode() if isinstance(text, str) else text
    # The anchor and the mark of UTF-16 must be at the beginning of the file.
    if not content.startswith((b"&a", b"\xff\xfe")):
        content = b"defaults: grpo.recipe.yaml\n" + content
    (home / "mistaken.yaml").write_bytes(content)
    assert expected in read_refusal("mistaken.yaml")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe(read_refusal: Callable[..., str], name: str) -> None:
    recipe, expected = RECIPES[name]
    assert expected in read_refusal(recipe)


def test_a_folder_that_cannot_be_made_is_one_line_where_it_is_found_out(rlctl: Rlctl) -> None:
    """Write below /proc and /sys, where the kernel refuses even a superuser."""
    for folder in ("/proc/runs", "/sys/runs"):
        for command in ("--dry-run", "trainer.num_ranks=1"):
            done = rlctl("train", "grpo", RECIPE, f"run.dir={folder}", command)
            assert done.code == 2
            assert [line for line in done.err.splitlines() if "error" in line and folder in line], done.err


def test_more_processes_than_a_machine_without_gpus_can_share_are_not_started(rlctl: Rlctl) -> None:
    done = rlctl("train", "grpo", RECIPE, "generation.num_engines=5000")
    assert done.code == 2
    assert "1 trainer rank and 5000 engines: at most 256 processes share a machine without GPUs" in done.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["runs", "show", "x" * 300],
        ["runs", "logs", "x" * 300],
        ["runs", "stop", "x" * 300],
        ["runs", "list", "--dir", "x" * 300],
        ["recipes", "show", "x" * 300],
        ["recipes", "copy", "grpo-tiny", "x" * 300],
        ["recipes", "copy", "grpo-tiny", "/etc/passwd/x.yaml"],
        ["recipes", "copy", "grpo-tiny", "/proc/x.yaml"],
        ["recipes", "copy", "grpo-tiny", "/proc/folder/x.yaml"],
        ["cluster", "up", "x" * 300],
        ["train", "grpo", "--resume", "x" * 300],
    ],
)
def test_a_path_that_can_be_none_in_any_command(rlctl: Rlctl, arguments: list[str]) -> None:
    with bound_time():
        done = rlctl(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert len(done.err.splitlines()) <= 2


KEYS = [key.replace(".N", ".0") for key, _ in schema_keys(GrpoConfig)]
key_parts = st.lists(st.sampled_from(["run", "model", "rewards", "0", "1", "path", "x"]), max_size=4)
keys = st.sampled_from(KEYS) | key_parts.map(".".join)
last_key_parts = st.sampled_from(KEYS).map(lambda key: key.split(".")[-1])
scalars = st.text(max_size=30) | st.integers().map(str) | st.floats().map(str) | st.sampled_from(
    ["[]", "{}", "null", "~", "&a [*a]", "*a", "${run}", "${a", "!!int x", "<<", "? x", "- x", "%", "@", "`", "---",
     "...", "/dev/zero", "/", "..", "~", "'", '"', "[[", "{{", "${oc.env:HOME}", "${.x}", "9" * 30, "-1", "1e400"]
)  # fmt: skip


def write_list(texts: list[str]) -> str:
    """Return a list of YAML in one line."""
    return f"[{', '.join(texts)}]"


def write_section(text_by_key: dict[str, str]) -> str:
    """Return a section of YAML in one line."""
    pairs = [f"{key}: {text}" for key, text in text_by_key.items()]
    return "{" + ", ".join(pairs) + "}"


def nest_values(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Return lists and sections of values."""
    lists = st.lists(values, max_size=3).map(write_list)
    sections = st.dictionaries(last_key_parts, values, max_size=3).map(write_section)
    return lists | sections


nested_values = st.recursive(scalars, nest_values, max_leaves=6)
overrides = st.tuples(keys, nested_values).map("=".join)
FUZZ = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@given(typed_overrides=st.lists(overrides, min_size=1, max_size=3))
@FUZZ
def test_any_overrides(rlctl: Rlctl, typed_overrides: list[str]) -> None:
    with bound_time():
        assert rlctl("config", "check", RECIPE, *typed_overrides).code in (0, 2)


@given(
    pairs=st.lists(st.tuples(keys, nested_values), max_size=4),
    noise=st.text("[]{}&*!|>%@`'\",:#?- \n\tax0", max_size=40),
)
@FUZZ
def test_any_file(rlctl: Rlctl, home: Path, pairs: list[tuple[str, str]], noise: str) -> None:
    lines = [f"{key.split('.')[0]}: {value}" for key, value in pairs]
    text = "\n".join(["defaults: grpo.recipe.yaml", *lines, noise])
    (home / "fuzzed.yaml").write_bytes(text.encode())
    with bound_time():
        assert rlctl("config", "check", "fuzzed.yaml").code in (0, 2)
    with bound_time():
        assert rlctl("config", "show", "fuzzed.yaml").code in (0, 2)


@pytest.mark.parametrize(
    ("overrides", "replaced_override"),
    [
        (["run.seed=1", "run.seed=2"], "run.seed=1"),
        (["run.seed=1", "run.seed=2", "run.seed=3"], "run.seed=2"),
        (["generation={temperature: 0.5}", "generation.temperature=1"], "generation={temperature: 0.5}"),
        (["generation.temperature=1", "generation={temperature: 0.5, top_p: 0.9}"], "generation.temperature=1"),
        (["generation={temperature: 0.5}", "generation.top_p=0.9"], None),
        (["rewards=[{name: exact, weight: 3}]", "rewards.0.weight=2"], "rewards=[{name: exact, weight: 3}]"),
        (["rewards.0.weight=2", "rewards=[exact]"], "rewards.0.weight=2"),
        (["rewards=[exact]", "rewards.0.weight=2"], None),
        (["lora.rank=4", "lora=null"], "lora.rank=4"),
        (["lora=null", "lora.rank=4"], "lora=null"),
        (["lora={}", "lora.rank=4"], None),
        (["grpo.loss=gspo", "grpo.loss.clip_high=0.3"], None),
        (["grpo.loss={name: gspo, level: token}", "grpo.loss=cispo"], "grpo.loss={name: gspo, level: token}"),
        (["grpo.loss.name=gspo", "grpo.loss=grpo"], "grpo.loss.name=gspo"),
    ],
)
def test_an_override_that_takes_the_place_of_an_earlier_one_is_noted(
    rlctl: Rlctl, overrides: list[str], replaced_override: str | None
) -> None:
    done = rlctl("config", "check", "grpo.recipe.yaml", *overrides)
    assert done.code == 0, done.err
    text = " ".join(done.err.split())
    num_notes = text.count("takes the place of")
    if replaced_override is None:
        assert num_notes == 0, done.err
    else:
        assert num_notes == len(overrides) - 1, done.err
        last_override = f"note: override {len(overrides)}: {overrides[-1]}"
        assert f"{last_override}: takes the place of {replaced_override}" in text


@pytest.mark.parametrize(
    "command",
    [
        ["train", "grpo", "grpo.recipe.yaml", "--dry-run", "{}=1", "{}=2"],
        ["config", "show", "grpo.recipe.yaml", "{}=1", "{}=2"],
        ["config", "diff", "grpo.recipe.yaml", "grpo.recipe.yaml", "{}=1", "{}=2"],
        ["data", "preview", "grpo.recipe.yaml", "run.name=new", "{}=1", "{}=2"],
        ["loss", "check", "grpo", "{}=1", "{}=2"],
        ["bench", "sft", "--model", "none", "--set", "{}=1", "--set", "{}=2"],
    ],
)
def test_every_command_with_overrides_notes_a_repeated_one(rlctl: Rlctl, command: list[str]) -> None:
    words = [word.format("run.seed") for word in command]
    text = " ".join(rlctl(*words).err.split())
    assert text.count("takes the place of run.seed=1") == text.count("takes the place of") == 1


def test_a_repeated_override_is_noted_beside_errors(rlctl: Rlctl) -> None:
    done = rlctl("config", "check", "grpo.recipe.yaml", "run.seed=1", "run.seed=x")
    assert done.code == 2 and "note: override 2: run.seed=x: takes the place of run.seed=1" in done.err
