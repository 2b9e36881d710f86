"""The process that runs the user's rewards, below its keeper: `python -m rlctl.rewards.child FD`."""

import json
import os
import pickle
import socket
from typing import IO

from rlctl.config.grpo_schema import RewardSection
from rlctl.rewards.base import RewardError, RewardFunction, attempt
from rlctl.rewards.load import load_function
from rlctl.rewards.replies import answer
from rlctl.workers.keeper import run_guarded


def work(connection: socket.socket) -> None:
    """Load the functions, then score until the parent hangs up."""
    requests = connection.makefile("rb")
    sections: list[RewardSection] = pickle.load(requests)
    functions: list[RewardFunction] = []
    problems: list[tuple[int, str]] = []
    for index, section in enumerate(sections):
        try:
            functions.append(load_function(section))
        except RewardError as error:
            problems.append((index, str(error)))
    connection.sendall(json.dumps({"problems": problems}).encode() + b"\n")
    if not problems:
        _serve(connection, requests, functions)


def _serve(connection: socket.socket, requests: IO[bytes], functions: list[RewardFunction]) -> None:
    own = os.getpid()
    while True:
        try:
            call, reward, items = pickle.load(requests)
            for number, item in enumerate(items):
                outcome = attempt(functions[reward], item)
                if os.getpid() != own:
                    os._exit(0)  # forked by the reward, however: its parent answers
                connection.sendall(answer(call, number, outcome))
        except (EOFError, OSError):
            return


if __name__ == "__main__":
    run_guarded(work)
