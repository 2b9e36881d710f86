"""A rollout function or an agent tried with scripted answers, in the process of a run, without an engine."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlctl.environments.agents.news import AgentNews
from rlctl.environments.contract import Reward
from rlctl.environments.outcomes import EnvironmentFailure
from rlctl.environments.pool import EnvironmentPool
from rlctl.environments.rollout_function import Answer, FunctionRequest

# Samples that get an answer. Any further one gets three empty lists, as at the end of a budget.
MOST_SAMPLES = 8


@dataclass
class TriedFunction:
    """One call of a rollout function with scripted answers."""

    # Tokens of each prompt that it sampled after, and of the answer; 0 where the budget was used up.
    samples: list[tuple[int, int]] = field(default_factory=list)
    # Tokens of an agent's first prompt.
    prompt: list[int] = field(default_factory=list)
    # Messages of an agent that the chat template leaves out.
    unwritten: int = 0
    # The value that it returned; None leaves the value to rewards.
    reward: Reward | None = None
    # Reason why it ended without one.
    failure: EnvironmentFailure | None = None


def try_function(
    pool: EnvironmentPool,
    call: Hashable,
    task: Mapping[str, Any],
    seed: int,
    answers: Sequence[list[int]],
    most: int = MOST_SAMPLES,
) -> TriedFunction:
    """Call the pool's rollout function once. task: fields of `PlayTask`. answers: tokens, given in turn.

    most: samples that get an answer. Never raises an error of the function.
    """
    tried = TriedFunction()
    told = pool.begin(call, task, seed).result()
    while not isinstance(told, EnvironmentFailure) and not told.ended:
        if told.again:
            told = EnvironmentFailure("contract", "sampled again after a budget was used up: return on empty lists")
            break
        if not all(told.samples):
            told = EnvironmentFailure("contract", "sampled after no tokens")
            break
        given: list[Answer | None] = []
        for prompt in told.samples:
            tokens = answers[len(tried.samples) % len(answers)] if len(tried.samples) < most else []
            tried.samples.append((len(prompt), len(tokens)))
            given.append((tokens, [-1.0] * len(tokens), [0] * len(tokens)) if tokens else None)
        told = pool.resume(call, given, waits=False).result()
    pool.close(call).result()
    return _outcome(tried, told, "returned without a sample: nothing could be trained")


def try_agent(
    pool: EnvironmentPool, call: Hashable, task: Mapping[str, Any], seed: int, answer: list[int], most: int
) -> TriedFunction:
    """Run the pool's agent once. task: fields of `AgentTask`. answer: tokens of each turn. most: turns that it gets.

    Never raises an error of the agent.
    """
    tried = TriedFunction()
    told = pool.begin_agent(call, task, seed).result()
    while not isinstance(told, EnvironmentFailure) and not told.ended:
        given: list[tuple[int, Any]] = []
        for ask in told.asks:
            sampled = (answer, [-1.0] * len(answer), "stop")
            given.append((ask.number, sampled if len(tried.samples) < most else "max_turns"))
            tried.samples.append((len(ask.tokens), len(answer)))
            tried.prompt = tried.prompt or ask.tokens
        told = pool.resume_agent(call, given, waits=False).result()
    pool.close(call).result()
    if not isinstance(told, EnvironmentFailure):
        tried.unwritten = (told.counts or {}).get("unwritten", 0)
    tried = _outcome(tried, told, "ended without a request: does it use base_url and api_key?")
    if not isinstance(told, EnvironmentFailure) and tried.failure is None and told.raised:
        tried.failure = EnvironmentFailure("raised", told.raised)
    return tried


def _outcome(tried: TriedFunction, told: FunctionRequest | AgentNews | EnvironmentFailure, idle: str) -> TriedFunction:
    """Add the outcome of a call. idle: cause of a failure where it sampled nothing."""
    if isinstance(told, EnvironmentFailure):
        tried.failure = told
    elif not tried.samples:
        tried.failure = EnvironmentFailure("contract", idle)
    else:
        tried.reward = told.reward
    return tried
