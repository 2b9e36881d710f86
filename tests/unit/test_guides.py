"""Guides name keys, metrics and messages that exist; figures of CHOOSING.md stand in the pages that measured them."""

import ast
import re
from itertools import chain
from pathlib import Path

import pytest

from rlctl.config.fields import schema_keys
from rlctl.config.schema import KINDS
from rlctl.preflight.load import load
from rlctl.telemetry.metrics import installed_rows
from tests.unit.test_house import FILES, tree

ROOT = Path(__file__).parents[2]
CHOOSING = ROOT / "recipes/CHOOSING.md"
TROUBLESHOOTING = ROOT / "rlctl/dashboard/TROUBLESHOOTING.md"
GUIDES = [ROOT / "recipes/TUTORIAL.md", CHOOSING, TROUBLESHOOTING]
MEASURED = [ROOT / "recipes/README.md", ROOT / "rlctl/bench/README.md"]
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w-])")


def spans(page: Path) -> list[str]:
    """Return the inline code of a page."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    return re.findall(r"`([^`]+)`", text)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_keys_and_their_values_are_those_of_the_schema(page: Path) -> None:
    known_keys = set(chain.from_iterable((key for key, _ in schema_keys(kind)) for kind in KINDS.values()))
    sections = {key.partition(".")[0] for key in known_keys}
    words = " ".join(spans(page)).split()
    for overrides in map(str.split, spans(page)):
        if all(re.fullmatch(r"[a-z]+(\.[a-z_]+)+=\S+", override) for override in overrides):
            load("grpo", "grpo-tiny", overrides)
    keys = {word.partition("=")[0] for word in words if re.fullmatch(r"[a-z]+(\.[a-z_]+)+(=\S+)?", word)}
    keys = {key for key in keys if key.partition(".")[0] in sections and key.rpartition(".")[2] not in ("yaml", "py")}
    assert keys and keys - known_keys == set()


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_metrics_are_recorded_ones(page: Path) -> None:
    rows = installed_rows()
    groups = ("advantage", "age", "engines", "groups", "idle", "length", "loss", "memory", "mismatch", "reward", "time")
    groups += ("environment", "tokens", "train", "validation")
    names = {span for span in spans(page) if re.fullmatch(rf"({'|'.join(groups)})/[a-z_]+", span)}
    assert {name for name in names if not rows.find(name)} == set()


def literals() -> str:
    """Return every text of the package, one a line, with a 0 for each value within it."""
    texts = list[str]()
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "0" for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_messages_of_troubleshooting_are_those_of_the_product() -> None:
    rows = re.findall(r"^\| (.*?) \|", TROUBLESHOOTING.read_text(), re.MULTILINE)
    quoted = chain.from_iterable(re.findall(r"`([^`]+)`", row) for row in rows)
    messages = {text for text in quoted if " " in text and not text.startswith("rlctl")}
    product = literals()
    assert len(messages) > 20
    assert {message for message in messages if message not in product} == set()


def test_figures_of_choosing_stand_where_they_were_measured() -> None:
    text = re.sub(r"(?ms)^```.*?^```|`[^`]*`|\]\([^)]*\)|^\d\. ", "", CHOOSING.read_text())
    derived = set[str]()
    for cells in re.findall(r"^\|(.* \d+ (?:CPU cores|H200) \|.*)\|$", text, re.MULTILINE):
        _, _, step, hundred_steps = cells.split("|")
        seconds = float(NUMBER.findall(step)[-1])
        minutes = NUMBER.findall(hundred_steps)[0]
        assert float(minutes) == pytest.approx(100 * seconds / 60, abs=0.5)
        derived.add(minutes)
    assert len(derived) == 5
    figures = {figure for figure in NUMBER.findall(text) if len(figure) > 1} - derived
    measured = set(NUMBER.findall(" ".join(page.read_text() for page in MEASURED)))
    # The hours of 100 steps of 32.0 s.
    assert figures - measured == {"0.9"}
