"""Child process that runs reward functions: `python -m rlctl.rewards.child FD`, below a supervisor."""

import json
import os
import pickle
import socket
from dataclasses import asdict

from rlctl.config.grpo_schema import AnyRewardSection
from rlctl.rewards.base import Reward, RewardError, RewardFailure, attempt
from rlctl.rewards.load_rewards import load_reward
from rlctl.workers.supervisor import run_guarded


def work(connection: socket.socket) -> None:
    """Load the reward functions, then score items until the parent closes the connection.

    reward_process.py describes the protocol.
    """
    requests = connection.makefile("rb")
    sections: list[AnyRewardSection] = pickle.load(requests)
    rewards: list[Reward] = []
    problems: list[tuple[int, str]] = []
    for index, section in enumerate(sections):
        try:
            rewards.append(load_reward(section))
        except RewardError as error:
            problems.append((index, str(error)))
    forms = [reward.form for reward in rewards]
    connection.sendall(json.dumps({"problems": problems, "forms": forms}).encode() + b"\n")
    pid = os.getpid()
    while not problems:
        try:
            call, reward_index, items = pickle.load(requests)
            for number, item in enumerate(items):
                outcome = attempt(rewards[reward_index], item)
                if os.getpid() != pid:
                    os._exit(0)  # the reward forked this process, and only the parent may answer
                reply: dict[str, object] = {"call": call, "item": number}
                if isinstance(outcome, RewardFailure):
                    reply["failure"] = asdict(outcome)
                else:
                    reply["value"] = outcome
                connection.sendall(json.dumps(reply).encode() + b"\n")
        except (EOFError, OSError):
            return


if __name__ == "__main__":
    run_guarded(work)
