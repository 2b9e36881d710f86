"""A rollout function or an agent tried with scripted answers, in the process of a run, without an engine."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlctl.environments.contract import Reward
from rlctl.environments.environment_pool import EnvironmentPool
from rlctl.environments.messages import AgentAnswer, AgentEnded, AgentTurn, AgentWaits, FunctionWaits, Sampled
from rlctl.environments.outcomes import EnvironmentFailure

# Samples that get an answer. Any further one gets three empty lists, as at the end of a budget.
MOST_SAMPLES = 8


@dataclass
class TriedFunction:
    """One call of a rollout function with scripted answers."""

    # Number of tokens of each prompt that it sampled after, and of the answer; 0 if a budget was used up.
    samples: list[tuple[int, int]] = field(default_factory=list)
    # Tokens of an agent's first prompt.
    prompt: list[int] = field(default_factory=list)
    # Messages of an agent that the chat template leaves out.
    unwritten: int = 0
    # The value that it returned; None leaves the value to rewards.
    reward: Reward | None = None
    # Reason why it ended without a value.
    failure: EnvironmentFailure | None = None


def try_function(
    pool: EnvironmentPool,
    call: Hashable,
    task: Mapping[str, Any],
    seed: int,
    answers: Sequence[list[int]],
    most_samples: int = MOST_SAMPLES,
) -> TriedFunction:
    """Call the pool's rollout function once. task: fields of `PlayTask`. answers: tokens, given in turn.

    most_samples: samples that get an answer. Never raises an error of the function.
    """
    tried = TriedFunction()
    message = pool.begin(call, task, seed).result()
    while isinstance(message, FunctionWaits):
        if message.asks_again:
            message = EnvironmentFailure("contract", "sampled again after a budget was used up: return on empty lists")
            break
        if not all(message.samples):
            message = EnvironmentFailure("contract", "sampled after no tokens")
            break
        turns: list[Sampled | None] = []
        for prompt in message.samples:
            tokens = answers[len(tried.samples) % len(answers)] if len(tried.samples) < most_samples else []
            tried.samples.append((len(prompt), len(tokens)))
            turns.append(Sampled(tokens, [-1.0] * len(tokens), [0] * len(tokens)) if tokens else None)
        message = pool.resume(call, turns, waits=False).result()
    pool.close(call).result()
    if isinstance(message, EnvironmentFailure):
        tried.failure = message
    elif not tried.samples:
        tried.failure = EnvironmentFailure("contract", "returned without a sample: nothing could be trained")
    else:
        tried.reward = message.reward
    return tried


def try_agent(
    pool: EnvironmentPool, call: Hashable, task: Mapping[str, Any], seed: int, answer: list[int], most_turns: int
) -> TriedFunction:
    """Run the pool's agent once. task: fields of `AgentTask`. answer: tokens of each turn. most_turns: turns that it
    gets.

    Never raises an error of the agent.
    """
    tried = TriedFunction()
    turn = AgentTurn(answer, [-1.0] * len(answer), "stop")
    message = pool.begin_agent(call, task, seed).result()
    while isinstance(message, AgentWaits):
        answers: list[tuple[int, AgentAnswer]] = []
        for ask in message.asks:
            answers.append((ask.number, turn if len(tried.samples) < most_turns else "max_turns"))
            tried.samples.append((len(ask.tokens), len(answer)))
            tried.prompt = tried.prompt or ask.tokens
        message = pool.resume_agent(call, answers, waits=False).result()
    pool.close(call).result()
    tried.failure = _agent_failure(message, bool(tried.samples))
    if isinstance(message, AgentEnded):
        tried.unwritten = message.counts.get("unwritten", 0)
        tried.reward = message.reward if tried.samples else None
    return tried


def _agent_failure(message: AgentEnded | EnvironmentFailure, has_asked: bool) -> EnvironmentFailure | None:
    if isinstance(message, EnvironmentFailure):
        return message
    if not has_asked:
        return EnvironmentFailure("contract", "ended without a request: does it use base_url and api_key?")
    return EnvironmentFailure("raised", message.raised) if message.raised else None
