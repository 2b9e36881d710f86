"""Columns with tests: each public form is recognised, and any other is refused with the key to set."""

import base64
import json
import pickle
import zlib

import pytest

from rlctl.rewards.base import RewardError
from rlctl.rewards.programs.test_forms import read_tests

PAIR = {"input": "1 2\n", "output": "3\n", "testtype": "stdin"}
CALL = {"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}


def packed(pairs):
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(pairs)))).decode()


@pytest.mark.parametrize(
    ("row", "kind", "cases"),
    [
        # MBPP, both of its forms
        ({"test_list": ["assert f(1) == 2"], "test_setup_code": "import math"}, "asserts", ["assert f(1) == 2"]),
        ({"test_list": ["assert f(1) == 2"], "test_imports": ["import re"]}, "asserts", ["assert f(1) == 2"]),
        # APPS and TACO
        ({"input_output": json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})}, "input", [("1\n", "2\n")]),
        ({"input_output": {"inputs": [["1", "2"]], "outputs": [["3"]]}}, "input", [("1\n2", "3")]),
        (
            {"input_output": json.dumps({"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]})},
            "calls",
            [([1, 2], [[3], 3])],
        ),
        # LiveCodeBench
        (
            {"public_test_cases": json.dumps([PAIR]), "private_test_cases": packed([PAIR])},
            "input",
            [("1 2\n", "3\n")] * 2,
        ),
        (
            {"public_test_cases": json.dumps([CALL]), "metadata": json.dumps({"func_name": "f"})},
            "calls",
            [([[1, 2], 3], [6])],
        ),
        # KodCode and HumanEval
        ({"test": "from solution import f\ndef test_f():\n    assert f(1) == 2"}, "script", []),
        ({"test": "def check(candidate):\n    assert candidate(1) == 2", "entry_point": "f"}, "script", []),
        # verl
        (
            {"reward_model": {"ground_truth": json.dumps({"inputs": ["1"], "outputs": ["2"]})}},
            "input",
            [("1", "2")],
        ),
        # rlctl
        ({"tests": ["assert f(1) == 2"]}, "asserts", ["assert f(1) == 2"]),
        ({"tests": [{"input": "1", "output": "2"}]}, "input", [("1", "2")]),
        ({"tests": "import math\nassert f(1) == 2"}, "asserts", ["assert f(1) == 2"]),
    ],
)
def test_public_forms_are_read(row, kind, cases):
    suite = read_tests(row)
    assert (suite.kind, suite.cases) == (kind, cases)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "p", "unit_tests": "[]"}, "set rewards.N.column=unit_tests"),
        ({"prompt": "p"}, "known are tests"),
        ({"tests": []}, "list of tests is empty"),
        ({"tests": ["assert f(1"]}, "no Python"),
        ({"tests": [{"input": "1"}]}, "neither texts nor"),
        ({"test": "x = 1"}, "neither test functions nor asserts"),
        ({"input_output": {"inputs": ["1"], "outputs": []}}, "two lists of one length"),
        ({"public_test_cases": json.dumps([CALL])}, "no func_name"),
    ],
)
def test_other_columns_are_refused_with_the_key_to_set(row, words):
    with pytest.raises(RewardError, match=words):
        read_tests(row)


def test_a_named_column_is_read_in_place_of_the_known_ones():
    assert read_tests({"tests": ["assert 0"], "mine": ["assert 1"]}, "mine").cases == ["assert 1"]
    with pytest.raises(RewardError, match="no column mine"):
        read_tests({"tests": ["assert 0"]}, "mine")


def test_private_tests_run_no_code_of_their_own():
    class Evil:
        def __reduce__(self):
            return (print, ("ran",))

    evil = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    with pytest.raises(RewardError, match="private_test_cases: UnpicklingError"):
        read_tests({"private_test_cases": evil})
