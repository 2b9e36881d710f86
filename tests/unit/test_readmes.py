"""Every promise of a page holds: commands parse and their configs load, links and anchors lead somewhere.

A command of `rlctl` in a fenced block is taken apart by the command line's own parser. Those that read a config alone
are then run here, `rlctl train` up to the end of its checks, and `rlctl bench` up to the measurement. `PARSED_ONLY`
lists the others, each with the reason.
"""

import ast
import json
import re
import shlex
import shutil
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from rlctl.cli import bench as bench_commands
from rlctl.cli.arguments import split
from rlctl.cli.main import app
from rlctl.config.builtin import RECIPES
from rlctl.config.compose import compose
from rlctl.config.errors import ConfigError
from rlctl.config.fields import schema_key, schema_keys
from rlctl.config.load_cluster import load_cluster
from rlctl.config.provenance import leaves, read_file
from rlctl.config.schema import KINDS
from rlctl.preflight.load import load
from tests.unit import folders

ROOT = Path(__file__).parents[2]
FOLDERS = ("rlctl", "configs", "recipes", "examples", "tests")
FOLDER_PAGES = sorted(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))
# The instructions of Harbor's tasks are read by a model.
PAGES = [*sorted(ROOT.glob("*.md")), *(path for path in FOLDER_PAGES if path.name != "instruction.md")]
MOST_WORDS = 1000
# Beginning of a command -> the reason why it goes no further than the parser here.
PARSED_ONLY = {
    "rlctl cluster status": "needs a cluster; tests/system/test_cluster*.py start some",
    "rlctl cluster down": "needs a cluster",
    "rlctl cluster logs": "needs a cluster",
    "rlctl cluster env": "needs a cluster",
    "rlctl cluster list": "shows the reader's own clusters",
    "rlctl runs": "needs a run; tests/unit/cli/test_runs_command.py makes some",
    "rlctl eval": "needs a checkpoint; tests/system/test_eval.py trains one",
    "rlctl export": "needs a checkpoint; tests/unit/evaluation/test_export.py makes some",
    "rlctl chat": "needs a checkpoint; tests/system/test_chat.py talks to a tiny model",
    "rlctl env check": "with --model it needs a checkpoint; tests/system/test_env_check.py plays with a tiny model",
    "rlctl model check": "needs a model, and seconds; tests/system/test_zoo.py checks tiny ones",
    "rlctl doctor": "judges the reader's machine; tests/unit/cli/test_doctor.py",
    "rlctl data preview": "reads all rows, for seconds; tests/unit/cli/test_data.py",
}
RUN_HERE = ("rlctl config", "rlctl env", "rlctl loss", "rlctl recipes", "rlctl examples", "rlctl --version")
# The mistake of the example of a mistake.
IS_WRONG = "grpo.num_step=10"
# Files that the examples name.
RECIPE = {"grpo": folders.GRPO, "sft": folders.SFT}
AGENT = """
from urllib.request import Request, urlopen

def run(task, base_url, api_key):
    body = b'{"messages": [{"role": "user", "content": "go"}]}'
    key = {"Authorization": f"Bearer {api_key}"}
    urlopen(Request(f"{base_url}/chat/completions", body, key)).read()
    return 1.0
"""
CLUSTERS = {
    "my-cluster.yaml": "defaults: cluster/ssh.yaml\nhosts: [gpu1, gpu2]\n",
    "mine.yaml": "defaults: cluster/ssh.yaml\nhosts: [gpu1, gpu2]\n",
    "pods.yaml": "defaults: cluster/kubernetes.yaml\nimage: me/rlctl:1\n",
}


@dataclass(frozen=True)
class Block:
    """A fenced block: the place where it begins, its language and its lines."""

    place: str
    language: str
    lines: list[str]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> Iterator[Block]:
    block: Block | None = None
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        fence = re.match(r"\s*```(.*)", line)
        if block and fence:
            yield block
            block = None
        elif block:
            block.lines.append(line)
        elif fence:
            block = Block(f"{name_of(path)}:{number}", fence[1].strip(), [])
    assert block is None, f"{name_of(path)}: a block without an end"


ALL_BLOCKS = [block for path in PAGES for block in blocks(path)]
# A script of an example is read as a block of commands.
for _path in sorted((ROOT / "examples").glob("*/*.sh")):
    _lines = [line.replace('"$@"', "") for line in _path.read_text().splitlines() if line.startswith("rlctl ")]
    ALL_BLOCKS.append(Block(name_of(_path), "sh", _lines))
# Names of files that a page prints whole: the first line of a block is the name.
PRINTED_FILES = {block.lines[0].removeprefix("# ") for block in ALL_BLOCKS if block.lines}


def commands() -> list[tuple[str, str]]:
    """Return (place, command) of every command line, without comments and prompts, continued lines joined."""
    commands_by_place = []
    for block in ALL_BLOCKS:
        if block.language not in ("", "sh", "bash", "shell", "console"):
            continue
        lines = "\n".join(block.lines).replace("\\\n", " ").splitlines()
        if any(line.startswith("$ ") for line in lines):
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        for line in lines:
            words = shlex.split(line, comments=True)
            if words:
                inner = re.fullmatch(r'eval "\$\((.*)\)"', line.partition("  #")[0].strip())
                commands_by_place.append((block.place, inner[1] if inner else shlex.join(words)))
    return commands_by_place


COMMANDS = commands()
RLCTL = get_command(app)


def parse_command(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Return (path of the command, its parameters) as the command line understands `rlctl ...`. Raises its errors."""
    command: Any = RLCTL
    name = words[0]
    rest = [word for word in words[1:] if word != "--help"]
    while True:
        if rest and hasattr(command, "commands") and (rest[0] == "COMMAND" or rest[0].startswith("--c")):
            # `rlctl train --cluster NAME` stands for any kind.
            options = rest[1:] if rest[0] == "COMMAND" else rest
            rest = [next(iter(command.commands)), *options]
        if not rest and hasattr(command, "commands"):
            return name, {}
        context = command.make_context(name.rpartition(" ")[2], rest)
        if not hasattr(command, "commands"):
            return name, context.params
        word, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        name = f"{name} {word}"


def words_of(command: str) -> list[str]:
    """Return the words of a command without variables before and redirections behind."""
    words = shlex.split(command)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    for sign in (">", "|"):
        if sign in words:
            words = words[: words.index(sign)]
    return words


@pytest.fixture
def reader(home: Path) -> Path:
    """Make the current directory of somebody who follows a README: the files that the examples name are there."""
    (home / "my_rewards.py").write_text("def brevity(prompt, completion, answer, row):\n    return 0.0\n")
    (home / "my_loss.py").write_text((ROOT / "tests/plugins/my_loss.py").read_text())
    (home / "my_env.py").write_text("class Game:\n    def reset(self, **row):\n        return 'Go.'\n")
    (home / "my_agent.py").write_text(AGENT)
    (home / "tasks.jsonl").write_text('{"target": 1}\n')
    (home / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    for name, text in CLUSTERS.items():
        (home / name).write_text(text)
    # Models and runs that earlier commands of a page make.
    for name in ("llama-tiny", "warm"):
        (home / name).symlink_to(RECIPES / "tiny/qwen3-tiny")
    judge = shutil.copytree(RECIPES / "tiny/qwen3-tiny", home / "reward-model")
    config = json.loads((judge / "config.json").read_text())
    (judge / "config.json").write_text(
        json.dumps(config | {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1})
    )
    return home


def ids(commands_by_place: list[tuple[str, str]]) -> list[str]:
    return [f"{place} {command}"[:100] for place, command in commands_by_place]


@pytest.mark.parametrize(("place", "command"), COMMANDS, ids=ids(COMMANDS))
def test_a_command_in_a_block_works_as_far_as_it_can_be_tried_here(
    reader: Path, monkeypatch: pytest.MonkeyPatch, place: str, command: str
) -> None:
    words = words_of(command)
    if place.startswith("examples/") and place.count("/") > 1:
        # Commands of an example's page are typed in its folder.
        shutil.copytree(ROOT / Path(place).parent, reader, dirs_exist_ok=True)
    if words[0] == "make":
        targets = re.findall(r"(?m)^([a-z]+):", (ROOT / "Makefile").read_text())
        assert {word for word in words[1:] if "=" not in word} <= set(targets)
        return
    if words[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for extras in re.findall(r"(?:rlctl|\.)\[(.*?)\]", command):
            assert set(extras.split(",")) <= project["optional-dependencies"].keys()
        return
    if words[1:2] == ["-m"] and words[2].startswith("tests."):
        assert find_spec(words[2])
        return
    if "pytest" in words:
        paths = [word.partition("::")[0] for word in words[words.index("pytest") + 1 :] if word.startswith("tests")]
        assert paths and all((ROOT / path).exists() for path in paths)
        return
    if words[0] in ("python", "bash", "jupyter"):
        files = [word for word in words if word.endswith((".py", ".sh", ".ipynb"))]
        assert files and ((ROOT / files[0]).is_file() or (reader / files[0]).is_file() or files[0] in PRINTED_FILES)
        return
    assert words[0] == "rlctl", f"{place}: nothing here knows how to try `{command}`"
    check_rlctl(reader, monkeypatch, words)


def check_rlctl(reader: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    name, params = parse_command(words)
    recipe, overrides = split(params["arguments"]) if "arguments" in params else (None, [])
    kind = "sft" if "sft" in " ".join(words) else "grpo"
    if name.startswith("rlctl train"):
        kind = name.rpartition(" ")[2]
    for path in {recipe, params.get("a"), params.get("b")} - {None}:
        if str(path).endswith(".yaml") and name != "rlctl cluster up" and not (reader / str(path)).exists():
            (reader / str(path)).write_text(RECIPE[kind])
    if name.startswith("rlctl train"):
        if params.get("compiled_graph"):
            overrides.append("ray_compiled_graph.enabled=true")
        load(kind, recipe, overrides)
    elif name == "rlctl cluster up":
        (reader / "my-cluster.yaml").write_text(CLUSTERS["my-cluster.yaml"])
        load_cluster(recipe or "local", overrides)
        if params["job"]:
            parse_command(["rlctl", *shlex.split(params["job"])])
    elif name.startswith("rlctl bench"):
        mistakes: list[object] = []

        def check(bench: Any, as_json: bool, problems: Any = (), plot: Path | None = None) -> None:
            mistakes.extend([*problems, *bench.check()])

        monkeypatch.setattr(bench_commands, "run_bench", check)
        monkeypatch.setattr(bench_commands, "count_gpus", lambda: 0 if "tiny" in " ".join(words) else 8)
        for model in [word for word in words if word.startswith("path/")]:
            folders.write(reader / "written")
            (reader / model).parent.mkdir(parents=True, exist_ok=True)
            (reader / "written/model").rename(reader / model)
        assert CliRunner().invoke(app, words[1:]).exception is None
        assert mistakes == []
    elif name.startswith(RUN_HERE) and not params.get("model"):
        call = CliRunner().invoke(app, words[1:])
        assert isinstance(call.exception, ConfigError) if IS_WRONG in words else call.exit_code == 0, call.exception
    else:
        assert name.startswith(tuple(PARSED_ONLY)), f"neither run here nor in PARSED_ONLY: {name}"


def test_commands_that_are_only_parsed_are_still_there() -> None:
    arguments = {"rlctl runs": ["COMMAND"], "rlctl export": ["RUN", "FOLDER"], "rlctl chat": ["RUN"]}
    arguments |= {"rlctl env check": ["guess"], "rlctl model check": ["my-run"]}
    for command in PARSED_ONLY:
        parse_command([*command.split(), *arguments.get(command, [])])


def text_without_blocks(page: Path) -> str:
    return re.sub(r"(?ms)^```.*?^```", "", page.read_text())


def inline_commands() -> list[tuple[str, str]]:
    """Return (place, command) of every command within text."""
    commands_by_place = []
    for path in PAGES:
        for command in re.findall(r"`(rlctl [a-z][^`]*)`", text_without_blocks(path)):
            commands_by_place.append((name_of(path), command))
    return commands_by_place


INLINE = inline_commands()


@pytest.mark.parametrize(("place", "command"), INLINE, ids=ids(INLINE))
def test_a_command_within_text_is_one(place: str, command: str) -> None:
    words = [word for word in words_of(" ".join(command.split()).replace("KIND", "grpo")) if word != "..."]
    try:
        parse_command(words)
    except Exception as error:
        # An option may be named without its value.
        if type(error).__name__ != "BadOptionUsage":
            raise
        parse_command([*words, "1"])


@pytest.mark.parametrize("block", ALL_BLOCKS, ids=lambda block: block.place)
def test_blocks_of_yaml_and_python_are_that(block: Block) -> None:
    text = "\n".join(block.lines)
    if block.language == "python":
        ast.parse(text)
    if block.language == "yaml":
        for document in yaml.safe_load_all(text):
            assert document is not None


def test_yaml_with_defaults_is_a_config_whose_keys_are_known(tmp_path: Path) -> None:
    keys_of_schemas = set[str]()
    for kind in KINDS.values():
        keys_of_schemas |= {key for key, _ in schema_keys(kind)}
    for number, block in enumerate(block for block in ALL_BLOCKS if block.language == "yaml"):
        path = tmp_path / f"{number}.yaml"
        path.write_text("\n".join(block.lines))
        config = read_file(path).value or {}
        if "defaults" not in config:
            continue
        if "cluster/" in str(config["defaults"].value):  # type: ignore[index,call-overload]
            load_cluster(str(path), [])
            continue
        for config_key, _ in leaves(compose(path, [])):
            key = schema_key(config_key)
            section = key.rpartition(".")[0]
            assert key in keys_of_schemas or section in keys_of_schemas, f"{block.place}: {config_key}"


def test_the_first_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= MOST_WORDS


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings_by_slug = Counter[str]()
    names = set[str]()
    for heading in re.findall(r"(?m)^#+\s+(.*?)\s*$", text_without_blocks(path)):
        slug = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")
        number = headings_by_slug[slug]
        names.add(f"{slug}-{number}" if number else slug)
        headings_by_slug[slug] += 1
    return names


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    broken_links = []
    text = text_without_blocks(path)
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for target in [*re.findall(r"\]\(([^)\s]+)\)", text), *pictures]:
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        page = file / "README.md" if file.is_dir() and anchor else file
        if not file.exists() or not file.is_relative_to(ROOT) or (anchor and anchor not in anchors(page)):
            broken_links.append(target)
    assert broken_links == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_files_that_are_named_are_there(path: Path) -> None:
    a_file = re.compile(rf"({'|'.join(FOLDERS)})/[\w./-]+(\.py|\.yaml|\.md|/)$")
    tokens = [token for token in re.findall(r"`([\w./-]+)`", path.read_text()) if "NAME" not in token]
    files = [token for token in tokens if a_file.match(token)]
    assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("page", [path for path in PAGES if path.parent.parent == ROOT / "rlctl"], ids=name_of)
def test_a_folders_page_names_each_of_its_modules(page: Path) -> None:
    """A module of a deeper folder may be named by its folder, or on the folder's own page."""
    folder = page.parent
    unnamed_modules = []
    for path in folder.rglob("*.py"):
        parents = [parent for parent in path.parents if parent.is_relative_to(folder)]
        pages = [parent / "README.md" for parent in parents]
        text = "".join(page.read_text() for page in pages if page.exists())
        has_name = re.search(rf"`(?:[\w/]+/)?{re.escape(path.name)}`", text)
        has_folder = any(f"`{parent.relative_to(folder).as_posix()}/`" in text for parent in parents)
        if path.name != "__init__.py" and not has_name and not has_folder:
            unnamed_modules.append(path.relative_to(folder).as_posix())
    assert unnamed_modules == []


def test_every_page_is_reached_from_the_first_one() -> None:
    reached: set[Path] = set()
    ahead = [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        links = re.findall(r"\]\(([^)#\s:]+\.md)", page.read_text())
        targets = [(page.parent / link).resolve() for link in links]
        ahead += [target for target in targets if target.exists() and target not in reached]
    assert {name_of(path) for path in PAGES if path not in reached} == set()
