"""The rules of the house, as far as a machine can see them.

Data flows one way: cli -> config -> cluster -> grpo | sft -> {data, generation, rewards, training, refit} ->
workers; nothing imports what stands before it. Some modules are everybody's, being plain: `PLAIN`. Telemetry may be
used by all and imports none but itself and config.schema.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "rlctl"
FILES = sorted(PACKAGE.rglob("*.py"))
RANK = {"cli": 0, "bench": 1, "config": 1, "environment": 1, "cluster": 2, "grpo": 3, "sft": 3}
RANK |= dict.fromkeys(("data", "generation", "rewards", "training", "refit"), 4) | {"workers": 5}
PLAIN = ("schema", "cluster_schema", "resolve", "parallel", "residency", "errors", "architecture")
PLAIN = tuple(f"rlctl.config.{name}" for name in PLAIN)
ONLY_IN = {"vllm": ("generation",), "megatron": ("training/megatron",), "typer": ("cli",), "rich": ("cli", "telemetry")}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: relative imports hide where a thing comes from"
            yield node.module
            if node.module == "rlctl":
                yield from (f"rlctl.{alias.name}" for alias in node.names)


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def test_nothing_imports_what_stands_before_it() -> None:
    wrong = []
    for path in FILES:
        for name in imports(path):
            target = name.split(".")[1] if name.startswith("rlctl.") else ""
            if name in PLAIN or target not in RANK:
                continue
            mine = RANK.get(part(path))
            if (mine is None and part(path) == "telemetry") or (mine is not None and RANK[target] < mine):
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert wrong == []


def test_engines_and_terminals_are_touched_in_their_own_folders_alone() -> None:
    wrong = []
    for path in FILES:
        where = path.relative_to(PACKAGE).as_posix()
        for name in imports(path):
            homes = ONLY_IN.get(name.split(".")[0])
            if homes and not where.startswith(tuple(f"{home}/" for home in homes)):
                wrong.append(f"{where} imports {name}")
    assert wrong == []


def test_every_module_says_what_it_holds() -> None:
    silent = [path for path in FILES if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def test_every_part_has_a_place_in_the_order() -> None:
    folders = {part(path) for path in FILES if path.parent != PACKAGE}
    assert folders - RANK.keys() <= {"telemetry"}


def test_files_fit_in_a_readers_head() -> None:
    sizes = sorted(len(path.read_text().splitlines()) for path in FILES)
    assert sizes[-1] <= 450
    assert sizes[len(sizes) * 9 // 10] <= 300


def test_functions_do_one_thing() -> None:
    sizes = sorted(
        (node.end_lineno or 0) - node.lineno + 1
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert sizes[-1] <= 80
    assert sizes[len(sizes) * 9 // 10] <= 35
