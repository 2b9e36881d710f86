"""The program in a completion, and the programs whose results may be kept."""

import pytest

from rlctl.rewards.programs.code_block import find_program, is_repeatable

PYTHON = "```python\nx = 1\n```"


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("def f(x): return x", "def f(x): return x"),
        (f"Here it is:\n{PYTHON}\nDone.", "x = 1\n"),
        (f"{PYTHON}\nBetter:\n```py\nx = 2\n```", "x = 2\n"),
        (f"{PYTHON}\nOutput:\n```\n1\n```", "x = 1\n"),
        ("```\nx = 3\n```", "x = 3\n"),
        ("~~~Python3\nx = 4\n~~~", "x = 4\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("```cpp\nint x;\n```", ""),
        ("```python\nx = 5", "x = 5"),
        ("  ```python\nx = 6\n  ```", "x = 6\n"),
        (f"<think>{PYTHON}</think>\n```python\nx = 7\n```", "x = 7\n"),
        (f"<think>\n{PYTHON}\n", ""),
        ("", ""),
    ],
)
def test_the_last_block_of_python_is_the_program(completion, program):
    assert find_program(completion) == program


def test_any_language_is_found_for_a_command():
    assert find_program("```js\nlet x\n```\n```\nout\n```", ()) == "let x\n"


@pytest.mark.parametrize(
    ("program", "repeatable"),
    [
        ("def f(x): return sum(v for v in x)", True),
        ("from math import gcd\nimport itertools\nclass A:\n def __init__(self): self.x = 1", True),
        ("import collections.abc", True),
        ("def f(x: return", True),
        ("import time\ndef f(x): return time.time()", False),
        ("from random import random", False),
        ("import numpy", False),
        ("def f(x): return id(x)", False),
        ("def f(x): return getattr(x, 'y')", False),
        ("f = (1).__class__.__base__", False),
        ("import sys\nm = sys.modules", False),
        ("print(open('/proc/uptime').read())", False),
        ("from . import x", False),
    ],
)
def test_a_program_that_may_read_a_clock_or_chance_is_not_repeatable(program, repeatable):
    assert is_repeatable(program) is repeatable
