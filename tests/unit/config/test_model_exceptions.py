"""Exceptions by model are rows of one file, each with its test; no other module names a model type."""

import ast
from pathlib import Path

from rlctl.config.model_exceptions import EXCEPTIONS
from tests.unit.test_house import FILES, PACKAGE, nodes, tree

ROOT = PACKAGE.parent
# Files that may name model types.
HOMES = ("config/model_exceptions.py", "preflight/engines/", "preflight/backends/")
# (file, text): the reason why the text is no exception by model.
NO_EXCEPTION = {
    ("bench/workload.py", "llama"): "a shape that is measured",
    ("bench/workload.py", "qwen3"): "a shape that is measured",
    ("bench/workload.py", "qwen3_moe"): "a shape that is measured",
    ("cluster/jobs/upload.py", "git"): "a program",
    ("config/environment_schema.py", "mistral"): "a format of tool calls",
    ("dashboard/report/vega.py", "clip"): "a property of a chart's mark",
    ("environments/tool_formats.py", "mistral"): "a format of tool calls",
    ("models/model_sizes.py", "bit"): "the end of a key, load_in_4bit",
}


def read_texts(path: Path) -> set[str]:
    constants = [node.value for node in nodes(path) if isinstance(node, ast.Constant)]
    return {constant for constant in constants if isinstance(constant, str)}


def test_a_model_type_is_named_in_the_file_of_exceptions_alone() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_types = set[tuple[str, str]]()
    for path in FILES:
        file = path.relative_to(PACKAGE).as_posix()
        if not file.startswith(HOMES):
            model_types |= {(file, text) for text in read_texts(path) & CONFIG_MAPPING_NAMES.keys()}
    assert model_types == NO_EXCEPTION.keys()


def test_the_test_of_every_exception_exists() -> None:
    for row in EXCEPTIONS:
        file, _, name = row.test.partition("::")
        defined = {node.name for node in ast.walk(tree(ROOT / file)) if isinstance(node, ast.FunctionDef)}
        assert name in defined, row


def test_a_model_type_has_one_value_a_subject() -> None:
    places = [(row.model_type, row.subject) for row in EXCEPTIONS]
    assert len(set(places)) == len(places)
