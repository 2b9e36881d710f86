"""A run plays episodes whose tools run in its sandbox, and does not start with a weaker sandbox than it asks for."""

from pathlib import Path

import pytest

from tests.faults.runs import Run
from tests.unit.sandbox.kinds import local_sandbox

ENVIRONMENT = '''
from rlctl.environments.calculator import Calculator
from rlctl.environments.sandbox_tools import SandboxTools


class SandboxCalculator(SandboxTools, Calculator):
    """The calculator that ships, but Python in the sandbox computes."""

    def reset(self, expression: str, **row) -> str:
        SandboxTools.reset(self)
        return Calculator.reset(self, expression)

    def calculate(self, expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: Numbers, brackets and the operators + - * / // %.

        Returns:
            The result.
        """
        return self._run_python(f"import os; os.environ['PWD']\\n{expression}").strip()
'''


@pytest.mark.long  # a minute; tests of tools and of episodes are apart
@pytest.mark.parametrize("kind", ["bwrap", "process"])
def test_a_run_trains_on_turns_whose_tool_runs_in_its_sandbox(tmp_path: Path, kind: str) -> None:
    local_sandbox("bwrap")
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    options = (f"environment.name={tmp_path}/env.py:SandboxCalculator", "grpo.num_steps=1", f"sandbox={kind}")
    run = Run(tmp_path, "sandboxed", "calculator-tiny", *options, "validation.max_prompts=20")
    assert run.end() == 0, run.text()
    (step,) = run.steps()
    assert step["environment/turns"] > 2 and step["environment/tool_calls"] > 1
    assert step["environment/failed"] == 0 and step["environment/tool_raised"] == 0


def test_a_run_does_not_start_with_a_weaker_sandbox(tmp_path: Path) -> None:
    answers = ("data.train.answer_key=expression", "data.validation.answer_key=expression", "rewards=[{name: exact}]")
    sandbox = ("environment.name=python", "sandbox=command", "sandbox.command='sh -c \"exit 125\"'")
    run = Run(tmp_path, "weak", "calculator-tiny", *answers, *sandbox)
    assert run.end() == 2, run.text()
    assert "sandbox.name: command: the program was not run: exit status 125" in run.text()
