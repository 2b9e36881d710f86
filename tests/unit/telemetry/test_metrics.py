"""Declarations of metrics: their rows, a run's file of rows, and every metric of rlctl has a row."""

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from itertools import chain
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
    installed_rows,
    read_rows,
    rows_problem,
    write_rows,
)

PACKAGE = Path(__file__).parents[3] / "rlctl"
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
# First parts of the names of metrics.
BEGINNINGS = {row.name.partition("/")[0] for row in installed_rows().rows if "/" in row.name}
# Texts of the same form that are no metrics: groups of rollouts as trackers have them, units, and paths.
TEXTS_OF_THE_SAME_FORM = {
    "rollouts/x", "rollouts/x_x.txt", "tokens/s/device", "tok/s/device", "programs/s",
    "environment/Dockerfile", "logs/verifier/.made", "raylet/raylet",
}  # fmt: skip
NAME_FORM = re.compile(r"-?[a-z]+/[\w./]*")


def text_of_literal(node: ast.AST) -> str:
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
    parts = set(chain.from_iterable(node.values for node in nodes if isinstance(node, ast.JoinedStr)))
    texts = {text_of_literal(node) for node in nodes if node not in parts}
    keys = {text_of_literal(key) for key in chain.from_iterable(map(keys_of, nodes))}
    candidates = {text for text in texts if text.removeprefix("-").partition("/")[0] in BEGINNINGS} | keys
    return {text.removeprefix("-") for text in candidates if NAME_FORM.fullmatch(text)} - TEXTS_OF_THE_SAME_FORM


def is_declared(text: str) -> bool:
    """Return True if a literal is the name of a row, or the form of several.

    x stands for any text. A slash or an underscore at the end stands for any ending.
    """
    if text.endswith(("/", "_")):
        return any(row.name.startswith(text) for row in installed_rows().rows)
    form = re.compile(re.escape(text).replace("x", "\\w+"))
    return installed_rows().find(text) is not None or any(form.fullmatch(row.name) for row in installed_rows().rows)


def test_every_name_of_a_metric_in_the_code_has_a_row() -> None:
    undeclared = set[str]()
    for path, tree in TREES.items():
        undeclared |= {f"{path}: {name}" for name in names_in(tree) if not is_declared(name)}
    assert undeclared == set()


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
    names = re.findall(r"`-?([a-z]+/[A-Za-z_/]+)`", page.read_text())
    assert {name for name in names if name.partition("/")[0] in BEGINNINGS and not is_declared(name)} == set()


def test_the_page_of_the_algorithm_has_every_metric_of_its_losses() -> None:
    table = (PACKAGE / "grpo/README.md").read_text().partition("## Metrics")[2]
    assert [row.name for row in LOSS_ROWS if f"`{row.name}`" not in table] == []


def test_the_example_of_a_further_metric_is_one_row_with_a_chart_and_a_panel() -> None:
    page = (PACKAGE / "dashboard/README.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Metric(" in block)
    row = eval(code, vars(metrics))  # our own text
    assert row.chart and row.panel and MetricTable([*installed_rows().rows, row]).find("length/median") == row


def test_no_name_stands_in_more_than_two_files() -> None:
    """One file declares a metric, and one may compute it. All other files must use the declared row."""
    declared = {row.name for row in installed_rows().rows}
    files = defaultdict(set)
    for path, tree in TREES.items():
        for name in names_in(tree) & declared:
            files[name].add(path)
    assert {name: sorted(paths) for name, paths in files.items() if len(paths) > 2} == {}


def test_the_rows_are_declared_once_and_load_without_torch() -> None:
    code = (
        "import sys; from importlib import import_module; from rlctl.config.plugins import METRICS; "
        "rows = [row.name for module in METRICS for row in import_module(module).METRICS]; "
        "assert len(rows) == len(set(rows)), rows; print(*{'torch', 'ray', 'vllm', 'numpy', 'yaml'} & set(sys.modules))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (process.stdout.strip(), process.stderr) == ("", "")


def test_labels_fit_the_panel_and_a_title_names_one_chart() -> None:
    rows = installed_rows().rows
    panel_rows = chain.from_iterable(row.panel for row in rows)
    assert max(len(panel_row.label) for panel_row in panel_rows) <= 10
    charts = {(row.chart.title, row.chart.section, row.chart.stacked) for row in rows if row.chart}
    titles = [title for title, _, _ in charts if title]
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize(
    ("name", "declared_name"),
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
def test_a_name_has_its_own_row_or_that_of_its_family(name: str, declared_name: str | None) -> None:
    row = installed_rows().find(name)
    assert (row.name if row else None) == declared_name


def test_rows_of_a_run_are_read_as_written_but_for_their_conditions(tmp_path: Path) -> None:
    gate = Metric(
        "gate/NAME", "gate", "share", chart=ReportChart(EPISODES, "Gate"), panel=[PanelRow("gate", used=True)]
    )
    rows = [*installed_rows().rows, gate]
    write_rows(tmp_path / "rows.json", rows)
    table = read_rows(tmp_path / "rows.json")
    assert table and list(map(as_record, table.rows)) == list(map(as_record, rows))
    assert table.rows[-1].panel == tuple(gate.panel) and table.rows[-1].chart == gate.chart


def test_a_file_of_a_later_version_is_read_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    record = as_record(Metric("a/b", "text", panel=[PanelRow("b")]))
    for fields in (record, record["panel"][0], record["chart"]):
        fields["key of a later version"] = 1
    assert from_record(record) == Metric("a/b", "text", panel=(PanelRow("b"),))
    for text in ("", "[", "{}", "[1]", json.dumps([{"name": "a"}])):
        (tmp_path / "rows.json").write_text(text)
        assert read_rows(tmp_path / "rows.json") is None or text == "{}"
    assert read_rows(tmp_path / "none.json") is None


def test_the_later_of_two_rows_counts() -> None:
    table = MetricTable([*installed_rows().rows, Metric("age/mean", "mine")])
    assert table.meaning("age/mean") == "mine" and len(table.rows) == len(installed_rows().rows)


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
