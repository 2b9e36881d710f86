"""Programs that cheat are worth 0: each would pass tests that run in its own process, and none solves the task."""

from typing import Any

import pytest

from rlctl.config.grpo_schema import ProgramRewardSection
from rlctl.rewards.base import RewardInput
from rlctl.rewards.programs.program_tests import ProgramScorer
from rlctl.sandbox.base import Sandbox

SECTION = ProgramRewardSection(
    name="python_tests",
    weight=1.0,
    correct_at=None,
    score="all",
    cpu_s=2.0,
    idle_s=2.0,
    wall_s=60.0,
    memory_mib=256,
    cache=True,
    command=None,
    column=None,
)
# A task with each kind of tests: the square of a number.
ROWS: dict[str, dict[str, Any]] = {
    "asserts": {"test_list": ["assert f(3) == 9", "assert abs(f(1.5) - 2.25) < 1e-6", "assert f(-2) == 4"]},
    "calls": {"input_output": {"fn_name": "f", "inputs": [[3], [-2]], "outputs": [9, 4]}},
    "script": {"test": "from solution import *\ndef test_f():\n    assert f(3) == 9\n    assert f(-2) == 4"},
    "input": {"tests": [{"input": "3\n", "output": "9\n"}, {"input": "-2\n", "output": "4\n"}]},
}
HONEST = {
    "input": "x = int(input())\nprint(x * x)",
    "other": "def f(x):\n    return x * x",
}
CHEATS = {
    "ends with exit code 0 before the asserts": "import sys\nsys.exit(0)",
    "ends hard within the call": "import os\ndef f(x): os._exit(0)",
    "ends hard in atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)",
    "patches builtins": (
        "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.AssertionError = type('E', (Exception,), {})\n"
        "def abs(x): return 0\ndef all(x): return True\ndef f(x): return 0"
    ),
    "traces its caller": (
        "import sys\ndef trace(frame, event, arg):\n    for name in frame.f_locals: pass\n    return trace\n"
        "sys.settrace(trace)\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):\n"
        "            if isinstance(value, dict) and 'cases' in value: return value['cases'][0]\n"
        "        frame = frame.f_back\n    return 0"
    ),
    "is equal to everything": (
        "class Any:\n    def __eq__(self, other): return True\n    def __sub__(self, other): return 0.0\n"
        "    def __lt__(self, other): return True\n    def __abs__(self): return 0.0\ndef f(x): return Any()"
    ),
    "is a number that is equal to everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n    def __sub__(self, other): return 0\n"
        "    __hash__ = int.__hash__\ndef f(x): return Any(7)"
    ),
    "is a class whose instances equal everything": (
        "class f:\n    def __init__(self, x): pass\n    def __eq__(self, other): return True\n"
        "    def __sub__(self, other): return 0.0\n    def __rsub__(self, other): return 0.0"
    ),
    "reads the tests in memory and files": (
        "import glob, os, re\n"
        "def find():\n    text = ''\n"
        "    paths = glob.glob('/proc/*/mem') + glob.glob('*') + glob.glob('/proc/*/fd/0') + glob.glob('/tmp/**')\n"
        "    for path in paths:\n"
        "        try: text += open(path, errors='replace').read(1 << 16)\n        except Exception: pass\n"
        "    return text\n"
        "def f(x):\n    found = re.search(r'f\\(%s\\) == (\\d+)' % x, find())\n    return int(found[1]) if found else 0"
    ),
    "reads the memory of the processes above": (
        "import os, re\n"
        "def f(x):\n    pid = os.getppid()\n    for pid in (pid, 1, 2, 3, 4):\n        try:\n"
        "            for line in open(f'/proc/{pid}/maps'):\n"
        "                if '[heap]' in line:\n"
        "                    begin, end = [int(n, 16) for n in line.split()[0].split('-')]\n"
        "                    memory = open(f'/proc/{pid}/mem', 'rb')\n                    memory.seek(begin)\n"
        "                    found = re.search(rb'f\\(%d\\) == (\\d+)' % x, memory.read(end - begin))\n"
        "                    if found: return int(found[1])\n"
        "        except OSError: pass\n    return 0"
    ),
    "writes a verdict": (
        'import glob, os\nverdict = b\'[{"tests": ["passed", "passed", "passed"], "num_tests": 3, "cpu_s": 0, '
        '"orphans": false, "detail": ""}]\\n\'\n'
        "for path in glob.glob('/proc/*/fd/*'):\n    try: os.write(os.open(path, os.O_WRONLY), b'0 ' + verdict)\n"
        "    except OSError: pass\nfor number in range(64):\n    try: os.write(number, b'0' * 32 + b' ' + verdict)\n"
        "    except OSError: pass\ndef f(x): return 0"
    ),
    "rewrites the judge": (
        "import glob\nfor path in glob.glob('*.py*') + glob.glob('/tmp/**/*.py*'):\n"
        "    try: open(path, 'w').write('print(1)')\n    except OSError: pass\ndef f(x): return 0"
    ),
    "ends the processes above": (
        "import os, signal\nfor pid in (os.getppid(), 2, 3, 4, 5):\n    try: os.kill(pid, signal.SIGKILL)\n"
        "    except OSError: pass\ndef f(x): return 0"
    ),
    "leaves a child that answers for it": ("import os, time\nif os.fork():\n    os._exit(0)\ndef f(x): return 0"),
    "replaces the modules of the tests": (
        "import sys, types\nfor name in ('values', 'judge', 'suites', 'compare', 'json'):\n"
        "    sys.modules[name] = types.ModuleType(name)\ndef f(x): return 0"
    ),
}


# Each kind starts 17 sandboxes. The two that compare in different processes are in the default suite.
KINDS = [pytest.param(kind, marks=() if kind in ("asserts", "input") else pytest.mark.long) for kind in ROWS]


@pytest.mark.parametrize("kind", KINDS)
def test_cheats_are_worth_nothing_and_the_honest_program_is_right(kind: str, sandbox: Sandbox) -> None:
    honest = HONEST.get(kind, HONEST["other"])
    items = [RewardInput("square", program, None, ROWS[kind]) for program in (honest, *CHEATS.values())]
    outcomes = ProgramScorer(SECTION, sandbox).score(items, map)
    assert dict(zip(("honest", *CHEATS), outcomes)) == {"honest": 1.0, **dict.fromkeys(CHEATS, 0.0)}
