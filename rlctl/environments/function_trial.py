"""Trial of a rollout function or an agent: it runs in an environment process and gets scripted answers, not sampled."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlctl.environments.contract import Reward
from rlctl.environments.environment_pool import EnvironmentPool
from rlctl.environments.messages import AgentAnswer, AgentEnded, AgentTurn, AgentWaits, FunctionWaits, Sampled
from rlctl.environments.outcomes import EnvironmentFailure

# Number of samples that get an answer. A further sample gets three empty lists, as if a budget were used up.
MOST_SAMPLES = 8


@dataclass
class TriedFunction:
    """Record of one call of a rollout function, or one run of an agent, with scripted answers."""

    # (number of prompt tokens, number of answer tokens) of each sample; the answer has 0 if a budget was used up.
    samples: list[tuple[int, int]] = field(default_factory=list)
    # Tokens of an agent's first prompt.
    prompt: list[int] = field(default_factory=list)
    # Number of an agent's messages that the chat template leaves out.
    unwritten: int = 0
    # Reward that it returned; None leaves the reward to the run's reward functions.
    reward: Reward | None = None
    # Reason why it failed; None if it did not.
    failure: EnvironmentFailure | None = None


def try_function(
    pool: EnvironmentPool,
    episode: Hashable,
    task: Mapping[str, Any],
    seed: int,
    answers: Sequence[list[int]],
    most_samples: int = MOST_SAMPLES,
) -> TriedFunction:
    """Call the pool's rollout function once. An error of the function is the result's `failure`, and is not raised.

    episode: its name in the pool. task: fields of `PlayTask`. answers: tokens of each answer; after the last
    one, the first is used again. most_samples: number of samples that get an answer.
    """
    tried = TriedFunction()
    message = pool.begin(episode, task, seed).result()
    while isinstance(message, FunctionWaits):
        if message.asks_again:
            message = EnvironmentFailure("contract", "sampled again after a budget was used up: return on empty lists")
            break
        if not all(message.samples):
            message = EnvironmentFailure("contract", "sampled after no tokens")
            break
        turns: list[Sampled | None] = []
        for prompt in message.samples:
            sample_index = len(tried.samples)
            tokens = answers[sample_index % len(answers)] if sample_index < most_samples else []
            tried.samples.append((len(prompt), len(tokens)))
            log_probs = [-1.0] * len(tokens)
            versions = [0] * len(tokens)
            turns.append(Sampled(tokens, log_probs, versions) if tokens else None)
        message = pool.resume(episode, turns, waits=False).result()
    pool.close(episode).result()
    if isinstance(message, EnvironmentFailure):
        tried.failure = message
    elif not tried.samples:
        tried.failure = EnvironmentFailure("contract", "returned without a sample: nothing could be trained")
    else:
        tried.reward = message.reward
    return tried


def try_agent(
    pool: EnvironmentPool, episode: Hashable, task: Mapping[str, Any], seed: int, answer: list[int], most_turns: int
) -> TriedFunction:
    """Run the pool's agent once. An error of the agent is the result's `failure`, and is not raised.

    episode: its name in the pool. task: fields of `AgentTask`. answer: tokens of every turn. most_turns: number of
    turns that the agent gets.
    """
    tried = TriedFunction()
    turn = AgentTurn(answer, log_probs=[-1.0] * len(answer), finish="stop")
    message = pool.begin_agent(episode, task, seed).result()
    while isinstance(message, AgentWaits):
        answers: list[tuple[int, AgentAnswer]] = []
        for ask in message.asks:
            answers.append((ask.number, turn if len(tried.samples) < most_turns else "max_turns"))
            tried.samples.append((len(ask.tokens), len(answer)))
            tried.prompt = tried.prompt or ask.tokens
        message = pool.resume_agent(episode, answers, waits=False).result()
    pool.close(episode).result()
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
