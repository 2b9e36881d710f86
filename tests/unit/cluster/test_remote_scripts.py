"""Programs that travel as source to hosts where nothing need be installed."""

import ast

import pytest

from rlctl.cluster.hosts import program_text


def test_the_check_can_be_read_and_begun_by_any_python_from_3_6() -> None:
    tree = ast.parse(program_text("check"), feature_version=(3, 6))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            annotations = [node.returns, *(each.annotation for each in node.args.args)]
            assert not any(isinstance(each, ast.Subscript | ast.BinOp) for each in annotations), node.name


@pytest.mark.parametrize("file", ["check", "node", "head", "logs", "mirror", "task"])
def test_no_program_needs_a_neighbour(file: str) -> None:
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(program_text(file)))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    # Code on the head may use the head's rlctl, and says so where it does.
    assert ("rlctl" in imported) == (file == "head")
