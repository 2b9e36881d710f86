"""Tools that a shelf's server has, added to the contract of the shelf's class before a run."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlctl.environments.contract import EnvironmentContract
from rlctl.environments.outcomes import InfrastructureError
from rlctl.utils.user_code import shorten_text


def add_served_tools(contract: EnvironmentContract, shelf: type, arguments: Mapping[str, Any]) -> EnvironmentContract:
    """Return the contract with the schemas of the server's tools, or with the problem of the server.

    The class method `_served_tools` of a shelf takes the arguments of the constructor. Other classes have none.
    """
    read_tools = getattr(shelf, "_served_tools", None)
    if contract.problems or read_tools is None:
        return contract
    try:
        return replace(contract, tools=[*contract.tools, *read_tools(**arguments)])
    except InfrastructureError as error:
        return replace(contract, problems=[shorten_text(str(error))])
