"""The README on environments: its example keeps the contract, and its figures equal those in the code."""

import re
from pathlib import Path
from typing import Any

import rlctl.environments.contract as contract_module
from rlctl.config.plugins import ENVIRONMENTS
from rlctl.environments.contract import read_contract
from rlctl.environments.episode import MAX_TEXT
from rlctl.environments.tool_formats import PARSERS

PAGE = (Path(contract_module.__file__).parent / "README.md").read_text()


def test_the_example_keeps_the_contract() -> None:
    block, reward, _ = re.findall(r"(?ms)^```python\n(.*?)^```", PAGE)
    names: dict[str, Any] = {}
    exec(block + reward, names)
    contract = read_contract(names["Game"], {})
    assert (contract.problems, contract.notes, len(contract.tools)) == ([], [], 1)
    game = names["Game"]()
    game.reset(target=3)
    game.increment(2)
    assert names["score"]([game]) == [0.2]


def test_formats_environments_and_limits_are_those_of_the_code() -> None:
    assert f"{MAX_TEXT:,} characters" in PAGE
    for name in [*PARSERS, *ENVIRONMENTS]:
        assert f"| `{name}` |" in PAGE
