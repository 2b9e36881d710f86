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
from tests.unit.cli.conftest import Done, Rlctl
from tests.waiting import PATIENCE_S

# Forty times the longest time, 0.5 s: work without end, or doubling with each line, takes longer anywhere.
LONGEST_S = 20.0
RECIPE = "grpo.recipe.yaml"

OVERRIDES: dict[str, tuple[list[str], str]] = {
    "a value that no file can be named": (["rewards.0.name=" + "x" * 300], "must be exact, regex, math_verify"),
    "a key that no file can be named": (["x" * 300 + "=1"], "unknown key"),
    "a model that no file can be named": (["model.path=" + "m" * 300], "no file or folder mmm"),
    "a data set that no file can be named": (["data.train.path=" + "m" * 5000 + ".jsonl"], "no file or folder mmm"),
    "a hub name that no hub has": (["model.path=a/" + "m" * 300], "no file or folder a/mmm"),
    "a reward in a file of no name": (["rewards=['" + "m" * 300 + ".py:f']"], "no file or folder mmm"),
    "a reward in a module of no name": (["rewards=['" + "m." * 3000 + "x:f']"], "no module m.m."),
    "a reward of nothing": (["rewards=[':']"], "no module"),
    "a run's name too long": (["run.name=" + "m" * 300], "must be at most 200 letters, since it names a folder"),
    "a folder's name too long": (["run.dir=" + "m" * 300], "is longer than a folder's name can be, 200 letters"),
    "a path too long": (["run.dir=" + "/m" * 5000], "is 10,000 letters long: at most 3,000"),
    "100 KB": (["run.name=" + "m" * 100_000], "must be at most 200 letters"),
    "NUL": (["run.dir=a\0b"], "must be text that UTF-8 and file names can hold"),
    "an escaped NUL": (['data.chat_template="a\\0b"'], "must be text that UTF-8 and file names can hold"),
    "half a character": (['data.system_prompt="\\ud800"'], "must be text that UTF-8 and file names can hold"),
    "bytes that are no UTF-8": (["run.name=\udcff"], "must be text that UTF-8 and file names can hold"),
    "an alias within its anchor": (["run=&a {seed: *a}"], "an alias (*) within the value that it stands for"),
    "a list within itself": (["rewards=&a [*a]"], "an alias (*) within the value that it stands for"),
    "a key twice": (["run={seed: 1, seed: 2}"], "seed: written twice"),
    "a million engines": (["generation.num_engines=1000000"], "must be at most 16384, not 1000000"),
    "a million ranks": (["trainer.num_ranks=1000000"], "must be at most 16384, not 1000000"),
    "a million tensor ranks": (["generation.tensor_parallel_size=1000000"], "must be at most 16384"),
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
    "a tensor size of 30 digits": (
        ["trainer.backend=megatron", "trainer.megatron.tensor_model_parallel_size=" + "9" * 30],
        "must be at most 9223372036854775807",
    ),
    "a seed of 20 digits": (["run.seed=" + "9" * 20], "must be at most 9223372036854775807"),
    "a wait beyond every clock": (["run.deadline_s=1e300"], "must be at most 100000000, not 1e300"),
    "threads without end": (["trainer.threads=1000000000"], "must be at most 16384"),
    "infinity": (["rewards.0.weight=.inf"], "must be finite, not inf"),
    "not a number": (["grpo.loss.clip_high=.nan"], "must be at least 0, not nan"),
    "1e999": (["trainer.optimizer.lr=1e999"], "must be above 0, not inf"),
    "an entry of 5,000 digits": (["rewards." + "9" * 5000 + ".name=exact"], "no list entry 999"),
    "a file for a folder": (["run.dir=/etc/passwd"], "/etc/passwd is no folder: choose another one"),
    "a folder in a file": (["run.dir=/etc/passwd/runs"], "/etc/passwd is no folder: choose another one"),
    "a device for a folder": (["run.dir=/dev/null"], "/dev/null is no folder: choose another one"),
    "no folder": (["run.dir=''"], "is empty: a path is needed"),
    "nobody's folder": (["run.dir=~nobody-here/x"], "~nobody-here is no user of this machine"),
    "nobody's model": (["model.path=~nobody-here/x"], "no file or folder ~nobody-here/x"),
    "a device for a model": (["model.path=/dev/zero"], "must name a file or folder, which it is not: /dev/zero"),
    "a device for a template": (["data.chat_template=/dev/zero"], "must name a file, which it is not: /dev/zero"),
    "a device for data": (["data.train.path=/dev/zero"], "must name a file or folder, which it is not: /dev/zero"),
    "a pipe for data": (["data.train.path=pipe.jsonl"], "must name a file or folder, which it is not: pipe.jsonl"),
    "a pipe for a reward": (["rewards=['pipe.py:f']"], "must name a file, which it is not: pipe.py"),
    "a pattern of 2,000 groups in each other": (
        ["rewards=[{name: regex, pattern: '" + "(" * 2000 + ")" * 2000 + "'}]"], "no regular expression"),
    "a repetition without end": (
        ["rewards=[{name: regex, pattern: '(a){1,99999999999999999999}'}]"], "the repetition number is too large"),
    "a reference to itself": (["run.name=${run.name}"], "run.name refers to itself"),
    "a circle of references": (["run.name=${run.dir}", "run.dir=${run.name}"], "run.dir refers to itself"),
    "a section within itself": (["run=${run}"], "run refers to itself"),
    "a section in its own value": (["x={y: '${x}'}"], "x.y refers to itself"),
    "a looked-up reference": (["a=b", "run.name=${${a}}"], "must name its key, not look it up"),
    "a resolver that evaluates": (["run.dir=${oc.create:[a]}"], "only keys, ${a.b}, and variables"),
    "half a reference": (["run.name=${"], "a reference without its closing bracket"),
    "a kind that is a list": (["kind=[grpo]"], "must be one of grpo, sft"),
    "a tag that lies": (["run.seed=!!int abc"], "must be a whole number, not '!!int abc'"),
    "a boolean that lies": (["run.probe=!!bool abc"], "must be true or false, not '!!bool abc'"),
    "a call in a tag": (["run=!!python/object/apply:os.system ['touch called']"], "must be a section"),
    "escape sequences": (["run.name=\x1b[31m"], "must be letters, digits"),
}  # fmt: skip

FILES: dict[str, tuple[str | bytes, str]] = {
    "a config within itself": ("&a\nrun: *a\n", "an alias (*) within the value that it stands for"),
    "100,000 brackets": ("run: " + "[" * 100_000, "nested too deep, in a file or an override"),
    "1 MB": ("run: {name: " + "x" * (1 << 20) + "}\n", "cannot be read: is larger than 256 KiB"),
    "500 unknown keys": ("".join(f"k{n}: 1\n" for n in range(500)), "and 350 more"),
    "bytes that are no UTF-8": (b"run: {name: \xff\xfe}\n", "cannot be read: not UTF-8 text"),
    "UTF-16": ("run: {}\n".encode("utf-16"), "cannot be read: not UTF-8 text"),
    "NUL": ("run: {name: a\0b}\n", "not YAML: unacceptable character #x0000"),
    "a key twice": ("run: {seed: 1, seed: 2}\n", "seed: written twice"),
    "a call in a tag": (
        "run: !!python/object/apply:os.system ['touch called']\n",
        "is not allowed: write plain values",
    ),
    "a parent of no name": ("defaults: " + "x" * 300 + "\n", "no file xxx"),
    "a parent with NUL": ('defaults: "a\\0b"\n', "no file a"),
    "a parent without end": ("defaults: /dev/zero\n", "no file /dev/zero"),
    "a parent that is a pipe": ("defaults: pipe.yaml\n", "no file pipe.yaml"),
    "2**20 parents": (
        "defaults: [grpo.recipe.yaml, power0.yaml]\nrun: 1\n",
        "must be a section of `key: value`, not 1",
    ),
}
RECIPES = {
    "no file can be so called": ("x" * 300, "no such recipe or file"),
    "a path too long": ("x/" * 5000, "no such recipe or file"),
    "a pipe": ("pipe.yaml", "no such recipe or file"),
    "a device": ("/dev/zero", "no such recipe or file"),
    "a folder": ("model", "no such recipe or file"),
    "a link to itself": ("loop.yaml", "no such recipe or file"),
    "memory": ("/proc/self/mem", "cannot be read"),
    "NUL": ("a\0b", "no such recipe or file"),
    "nobody's": ("~nobody-here/x", "no such recipe or file"),
}
COMMANDS = (["config", "check"], ["train", "grpo", "--dry-run"], ["train", "grpo"])


@contextmanager
def bounded() -> Iterator[None]:
    """`LONGEST_S` of this process's time, and minutes of wall time: a machine may be busy, a pipe waits without end."""

    def stop(signum: int, frame: Any) -> NoReturn:
        raise TimeoutError(f"took over {LONGEST_S} s" if signum == signal.SIGPROF else "waits")

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, LONGEST_S), signal.SIGALRM: (signal.ITIMER_REAL, PATIENCE_S)}
    before = {number: signal.signal(number, stop) for number in timers}
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer, _ in timers.values():
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
def refused(rlctl: Rlctl, home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Asserts that every command refuses its input; returns the text of one refusal."""

    def started(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a run was started")

    monkeypatch.setattr(assembly, "launch", started)
    for name in ("pipe.yaml", "pipe.jsonl", "pipe.py"):
        os.mkfifo(home / name)
    (home / "loop.yaml").symlink_to("loop.yaml")

    def every(*arguments: str) -> str:
        said = {command[-1]: _refusal(rlctl, *command, *arguments) for command in COMMANDS}
        assert len({done.err for done in said.values()}) == 1
        assert not (home / "called").exists()
        return said["check"].err

    return every


def _refusal(rlctl: Rlctl, *arguments: str) -> Done:
    with bounded():
        done = rlctl(*arguments)
    assert (done.code, done.out) == (2, ""), arguments[:3]
    *problems, count = done.err.splitlines()
    assert count.endswith("nothing was started")
    assert len(problems) <= 151
    assert max(map(len, problems)) < 1300
    return done


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override(refused: Callable[..., str], name: str) -> None:
    overrides, expected = OVERRIDES[name]
    assert expected in refused(RECIPE, *overrides)


@pytest.mark.parametrize("name", FILES)
def test_a_file(refused: Callable[..., str], home: Path, name: str) -> None:
    for n in range(40):
        (home / f"power{n}.yaml").write_text(f"defaults: [power{n + 1}.yaml, power{n + 1}.yaml]\n" * (n < 20))
    text, expected = FILES[name]
    data = text.encode() if isinstance(text, str) else text
    inherits = b"" if data.startswith((b"defaults", b"&a")) else b"defaults: grpo.recipe.yaml\n"
    (home / "hostile.yaml").write_bytes(data if data.startswith(b"\xff\xfe") else inherits + data)
    assert expected in refused("hostile.yaml")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe(refused: Callable[..., str], name: str) -> None:
    recipe, expected = RECIPES[name]
    assert expected in refused(recipe)


def test_a_folder_that_cannot_be_made_is_one_line_where_it_is_found_out(rlctl: Rlctl) -> None:
    """A superuser may write anywhere but where the kernel refuses."""
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
    with bounded():
        done = rlctl(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert len(done.err.splitlines()) <= 2


KEYS = [key.replace(".N", ".0") for key, _ in schema_keys(GrpoConfig)]
names = st.lists(st.sampled_from(["run", "model", "rewards", "0", "1", "path", "x"]), max_size=4)
keys = st.sampled_from(KEYS) | names.map(".".join)
scalars = st.text(max_size=30) | st.integers().map(str) | st.floats().map(str) | st.sampled_from(
    ["[]", "{}", "null", "~", "&a [*a]", "*a", "${run}", "${a", "!!int x", "<<", "? x", "- x", "%", "@", "`", "---",
     "...", "/dev/zero", "/", "..", "~", "\0", "'", '"', "[[", "{{", "${oc.env:HOME}", "${.x}", "9" * 30, "-1", "1e400"]
)  # fmt: skip
nested = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda each: f"[{', '.join(each)}]")
        | st.dictionaries(st.sampled_from(KEYS).map(lambda key: key.split(".")[-1]), inner, max_size=3).map(
            lambda each: "{" + ", ".join(f"{key}: {value}" for key, value in each.items()) + "}"
        )
    ),
    max_leaves=6,
)
overrides = st.tuples(keys, nested).map("=".join)
FUZZ = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@given(typed=st.lists(overrides, min_size=1, max_size=3))
@FUZZ
def test_any_overrides(rlctl: Rlctl, typed: list[str]) -> None:
    with bounded():
        assert rlctl("config", "check", RECIPE, *typed).code in (0, 2)


@given(
    pairs=st.lists(st.tuples(keys, nested), max_size=4),
    noise=st.text("[]{}&*!|>%@`'\",:#?- \n\tax0\0\ud800", max_size=40),
)
@FUZZ
def test_any_file(rlctl: Rlctl, home: Path, pairs: list[tuple[str, str]], noise: str) -> None:
    lines = [f"{key.split('.')[0]}: {value}" for key, value in pairs]
    text = "\n".join(["defaults: grpo.recipe.yaml", *lines, noise])
    (home / "fuzzed.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    with bounded():
        assert rlctl("config", "check", "fuzzed.yaml").code in (0, 2)
    with bounded():
        assert rlctl("config", "show", "fuzzed.yaml").code in (0, 2)
