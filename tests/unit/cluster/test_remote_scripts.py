"""The script that checks a host is sent as source and runs on Python 3.6 or later. Others are of the host's rlctl."""

import ast
import subprocess
import sys

from rlctl.cluster.hosts import script


def test_the_check_can_be_read_and_begun_by_any_python_from_3_6() -> None:
    tree = ast.parse(script("check.run", {"ports": []}), feature_version=(3, 6))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            annotations = [node.returns, *(argument.annotation for argument in node.args.args)]
            has_new_form = any(isinstance(annotation, ast.Subscript | ast.BinOp) for annotation in annotations)
            assert not has_new_form, node.name


def test_the_check_needs_nothing_that_may_be_absent() -> None:
    names = set[str]()
    for node in ast.walk(ast.parse(script("check.run", {"ports": []}))):
        if isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_a_node_starts_with_the_environment_of_its_host() -> None:
    program = "import os; before = dict(os.environ); import rlctl.cluster.remote_scripts.node"
    command = [sys.executable, "-c", f"{program}; assert dict(os.environ) == before, set(os.environ) - set(before)"]
    process = subprocess.run(command, env={}, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
