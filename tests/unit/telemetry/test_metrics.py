"""Declarations of metrics: their rows, the file of a run, and that no name of rlctl's own lacks a row."""

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from rlctl.config.plugins import METRICS
from rlctl.grpo.losses.sections import METRICS as LOSS_ROWS
from rlctl.telemetry import metrics
from rlctl.telemetry.metrics import (
    EPISODES,
    Metric,
    MetricTable,
    PanelRow,
    ReportChart,
    as_record,
    from_record,
    installed,
    read_rows,
    rows_problem,
    write_rows,
)

PACKAGE = Path(__file__).parents[3] / "rlctl"
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
# First parts of the names of metrics.
BEGINNINGS = {row.name.partition("/")[0] for row in installed().rows if "/" in row.name}
# Texts of the same form that are no metrics: groups of rollouts as trackers have them, and units.
OTHERS = {"rollouts/x", "rollouts/x_x.txt", "tokens/s/device", "tok/s/device"}
A_NAME = re.compile(r"-?[a-z]+/[\w./]*")


def texts_of(node: ast.AST) -> str:
    """Return the text of a literal, with x for each value in it; empty for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
    return ""


def keys_of(node: ast.AST) -> list[ast.expr]:
    """Return the keys of a dict, or of a place in one."""
    if isinstance(node, ast.Dict):
        return [key for key in node.keys if key]
    return [node.slice] if isinstance(node, ast.Subscript) else []


def names_in(tree: ast.Module) -> set[str]:
    """Return the literals of a module that read as names of metrics: a known beginning, or the key of a dict."""
    nodes = list(ast.walk(tree))
    inside = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    texts = {texts_of(node) for node in nodes if node not in inside}
    keys = {texts_of(key) for node in nodes for key in keys_of(node)}
    named = {text for text in texts if text.removeprefix("-").partition("/")[0] in BEGINNINGS} | keys
    return {text.removeprefix("-") for text in named if A_NAME.fullmatch(text)} - OTHERS


def is_declared(text: str) -> bool:
    """Return True if a literal is the name of a row, or stands for some: x is any text, and a slash at the end too."""
    if text.endswith(("/", "_")):
        return any(row.name.startswith(text) for row in installed().rows)
    some = re.compile(re.escape(text).replace("x", "\\w+"))
    return installed().find(text) is not None or any(some.fullmatch(row.name) for row in installed().rows)


def test_every_name_of_a_metric_in_the_code_has_a_row() -> None:
    wrong = {f"{path}: {name}" for path, tree in TREES.items() for name in names_in(tree) if not is_declared(name)}
    assert wrong == set()


def test_the_search_finds_an_undeclared_name() -> None:
    code = ast.parse(
        "metrics = {'loss/polcy': 1.0, f'mismatch/agge_{age}': 2.0, f'memory/{side}_gib': 3.0}; metrics['new/one'] = 4"
    )
    undeclared = {name for name in names_in(code) if not is_declared(name)}
    assert undeclared == {"loss/polcy", "mismatch/agge_x", "new/one"}


@pytest.mark.parametrize(
    "page", [*PACKAGE.rglob("README.md"), PACKAGE.parent / "README.md"], ids=lambda page: page.parent.name
)
def test_every_metric_that_a_page_names_has_a_row(page: Path) -> None:
    named = re.findall(r"`-?([a-z]+/[A-Za-z_/]+)`", page.read_text())
    assert {name for name in named if name.partition("/")[0] in BEGINNINGS and not is_declared(name)} == set()


def test_the_page_of_the_algorithm_has_every_metric_of_its_losses() -> None:
    table = (PACKAGE / "grpo/README.md").read_text().partition("## Metrics")[2]
    assert [row.name for row in LOSS_ROWS if f"`{row.name}`" not in table] == []


def test_the_example_of_a_further_metric_is_one_row_with_a_chart_and_a_panel() -> None:
    page = (PACKAGE / "dashboard/README.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Metric(" in block)
    row = eval(code, vars(metrics))  # our own text
    assert row.chart and row.panel and MetricTable([*installed().rows, row]).find("length/median") == row


def test_no_name_stands_in_more_than_two_files() -> None:
    """One declares it, one may measure it; all others read the row."""
    declared = {row.name for row in installed().rows}
    files = defaultdict(set)
    for path, tree in TREES.items():
        for name in names_in(tree) & declared:
            files[name].add(path)
    assert {name: sorted(where) for name, where in files.items() if len(where) > 2} == {}


def test_the_rows_are_declared_once_and_load_without_torch() -> None:
    code = (
        "import sys; from importlib import import_module; from rlctl.config.plugins import METRICS; "
        "rows = [row.name for module in METRICS for row in import_module(module).METRICS]; "
        "assert len(rows) == len(set(rows)), rows; print(*{'torch', 'ray', 'vllm', 'numpy', 'yaml'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_labels_fit_the_panel_and_a_title_names_one_chart() -> None:
    assert max(len(each.label) for row in installed().rows for each in row.panel) <= 10
    charts = {(row.chart.title, row.chart.section, row.chart.stacked) for row in installed().rows if row.chart}
    titles = [title for title, _, _ in charts if title]
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/my reward/mean", "reward/NAME/mean"),
        ("reward/turns_12", "reward/turns_K"),
        ("validation/gsm8k/accuracy", "validation/NAME/accuracy"),
        ("agent/overridden/top_p", "agent/overridden/NAME"),
        ("time/step", "time/step"),
        ("time/my_phase", "time/NAME"),
        ("age/groups_two", None),
        ("reward/other", None),
    ],
)
def test_a_name_has_its_own_row_or_that_of_its_family(name: str, declared: str | None) -> None:
    row = installed().find(name)
    assert (row.name if row else None) == declared


def test_rows_of_a_run_are_read_as_written_but_for_their_conditions(tmp_path: Path) -> None:
    own = Metric("gate/NAME", "gate", "share", chart=ReportChart(EPISODES, "Gate"), panel=[PanelRow("gate", used=True)])
    write_rows(tmp_path / "rows.json", [*installed().rows, own])
    table = read_rows(tmp_path / "rows.json")
    assert table and [as_record(row) for row in table.rows] == [as_record(row) for row in [*installed().rows, own]]
    assert table.rows[-1].panel == tuple(own.panel) and table.rows[-1].chart == own.chart


def test_a_file_of_a_later_version_is_read_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    later = as_record(Metric("a/b", "text", panel=[PanelRow("b")]))
    later["panel"][0]["more"] = later["more"] = later["chart"]["more"] = 1
    assert from_record(later) == Metric("a/b", "text", panel=(PanelRow("b"),))
    for damaged in ("", "[", "{}", "[1]", json.dumps([{"name": "a"}])):
        (tmp_path / "rows.json").write_text(damaged)
        assert read_rows(tmp_path / "rows.json") is None or damaged == "{}"
    assert read_rows(tmp_path / "none.json") is None


def test_the_later_of_two_rows_counts() -> None:
    table = MetricTable([*installed().rows, Metric("age/mean", "mine")])
    assert table.meaning("age/mean") == "mine" and len(table.rows) == len(installed().rows)


def test_a_wrong_declaration_is_told() -> None:
    with pytest.raises(
        ValueError, match=r"style=gren of row gate: must be one of cyan, green, .*; did you mean green\?"
    ):
        PanelRow("gate", style="gren")
    assert rows_problem(()) == rows_problem([Metric("a/b", "")]) == ""
    assert rows_problem({"a/b": "text"}) == (
        "`metrics` is {'a/b': 'text'}: give a tuple of rlctl.telemetry.metrics.Metric"
    )
    assert rows_problem(["a/b"]) != ""


def test_each_module_of_the_list_is_in_a_folder_that_measures() -> None:
    for module in METRICS:
        assert module.replace(".", "/").removeprefix("rlctl/") + ".py" in TREES
