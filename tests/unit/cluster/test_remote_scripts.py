"""The check of a host travels as source, to any Python from 3.6 on; the others are those of the host's rlctl."""

import ast
import sys

from rlctl.cluster.hosts import script


def test_the_check_can_be_read_and_begun_by_any_python_from_3_6() -> None:
    tree = ast.parse(script("check.run", {"ports": []}), feature_version=(3, 6))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            annotations = [node.returns, *(each.annotation for each in node.args.args)]
            assert not any(isinstance(each, ast.Subscript | ast.BinOp) for each in annotations), node.name


def test_the_check_needs_nothing_that_may_be_absent() -> None:
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(script("check.run", {"ports": []})))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    assert imported <= sys.stdlib_module_names
