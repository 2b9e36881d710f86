"""The section of a judge, with the limits of its keys. No aiohttp: a check reads it. `configs/reward.yaml` has the
defaults.
"""

# ruff: noqa: RUF009  (spec() makes a field, not a default)

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

from rlctl.config.fields import seconds, spec
from rlctl.config.grpo_schema import AnyRewardSection, RewardEntry, ServedJudgeSection
from rlctl.rewards.judge.prompt import placeholder_problem

# Names of environment variables. A key itself has other letters, as a rule.
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_SECRET_PARAMETER = re.compile(r"key|token|secret|password", re.IGNORECASE)


@dataclass
class JudgeSection(ServedJudgeSection):
    name: Literal["judge"] = spec(
        "A model that is asked for a verdict on each answer, on each pair of a task's answers, or on all of them."
    )
    base_url: str | None = spec("The server's address, such as https://api.openai.com/v1.")
    model: str | None = spec("The model's name at the server.")
    client: Literal["openai", "anthropic"] = spec(
        "The form of requests: POST base_url/chat/completions (openai), or POST base_url/v1/messages (anthropic)."
    )
    api_key_env: str | None = spec(
        "The name of the environment variable that has the key. The key itself is in no file. null sends no key."
    )
    prompt: str = spec(
        "A text file: the question to the judge, with {placeholders} that are filled in once.", path="template"
    )
    verdicts: dict[str, float] = spec("The words that the judge may answer -> the value of each. {} is for scale.")
    scale: list[float] | None = spec(
        "[lowest, highest] number that the judge may answer: they are the values 0 and 1. null is for verdicts."
    )
    criteria: dict[str, float] = spec(
        "Criteria that the judge answers one by one -> the weight of each in the mean. {} asks for one verdict."
    )
    compare: Literal["pairs", "group"] | None = spec(
        "Answers of a task are compared: in pairs, whose verdicts are A, B or tie (pairs), or all in one question, "
        "which has a verdict for each (group). null judges each answer alone."
    )
    max_tokens: int = spec("The longest reply, in tokens.", ge=1)
    temperature: float = spec("The sampling temperature of the judge.", ge=0)
    body: dict[str, Any] = spec("Further fields of each request. A field that is null is not sent.")
    call_timeout_s: float = seconds("A request that takes longer than this is made again.", gt=0)
    retries: int = spec(
        "The further requests after 408, 429, 500 or above, a lost connection or call_timeout_s. The time between two "
        "doubles from 0.5 s to 30 s, or is the server's Retry-After.",
        ge=0,
    )
    cache: bool = spec("Keep the judge's replies in the run's directory. An equal question is not asked again.")
    budget_calls: int | None = spec("The most requests of the run. The run then stops. null is no limit.", ge=1)
    budget_tokens: int | None = spec(
        "The run stops once its requests and replies have this many tokens. null is no limit.", ge=1
    )
    price_input: float | None = spec("The price of a million tokens of requests. null is not known.", ge=0)
    price_output: float | None = spec("The price of a million tokens of replies. null is not known.", ge=0)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, problem) for each wrong value. A problem never quotes a value that may be a secret."""
        yield from _check_server(self)
        yield from _check_verdicts(self)
        if Path(self.prompt).is_file():
            text = Path(self.prompt).read_text(encoding="utf-8", errors="replace")
            if problem := placeholder_problem(text, self.compare):
                yield "prompt", problem

    @property
    def form(self) -> Literal["coroutine", "group"]:
        """Form of the reward: it is called for one rollout, or for all rollouts of a task."""
        return "group" if self.compare else "coroutine"

    @property
    def names(self) -> list[str]:
        """Names of the verdicts in a reply about one answer, or about one pair."""
        return list(self.criteria) or ["verdict"]


AnyReward = JudgeSection | AnyRewardSection


def has_judge(rewards: Iterable[RewardEntry]) -> bool:
    """Return True if one of the rewards is a judge."""
    return any(isinstance(reward, JudgeSection) for reward in rewards)


def _check_server(judge: JudgeSection) -> Iterator[tuple[str, str]]:
    if judge.path is not None:
        for key in ("base_url", "model", "api_key_env"):
            if getattr(judge, key) is not None:
                yield key, "must be null with path: engines of the run serve the judge"
        if judge.body:
            yield "body", "must be {} with path: engines of the run take no further fields"
        return
    if judge.base_url is None:
        yield "base_url", "must be set, for example https://api.openai.com/v1; or path, a model for the run's engines"
    else:
        address = urlsplit(judge.base_url)
        if address.scheme not in ("http", "https") or not address.hostname:
            yield "base_url", "must begin with http:// or https:// and a host"
        if address.username or address.password:
            yield "base_url", "has a user or password: name the variable of a key in api_key_env"
        if any(_SECRET_PARAMETER.search(name) for name, _ in parse_qsl(address.query)):
            yield "base_url", "has a secret as a parameter: name the variable of a key in api_key_env"
    if judge.model is None:
        yield "model", "must be set: the model's name at the server"
    if judge.api_key_env is not None and not _VARIABLE.fullmatch(judge.api_key_env):
        message = "must be the name of an environment variable, such as OPENAI_API_KEY; a key itself is refused"
        yield "api_key_env", message
    for name, value in judge.body.items():
        # null leaves the field out, for a server that refuses it.
        is_own = name in ("max_tokens", "temperature") and value is not None
        if is_own or name in ("messages", "model", "stream"):
            yield f"body.{name}", "is set by rlctl, from a key of its own"
        elif _SECRET_PARAMETER.search(name) and not name.endswith("tokens"):
            yield f"body.{name}", "looks like a secret: name the variable of a key in api_key_env"


def _check_verdicts(judge: JudgeSection) -> Iterator[tuple[str, str]]:
    if judge.compare == "pairs":
        if judge.verdicts or judge.scale is not None:
            yield "verdicts" if judge.verdicts else "scale", "a pair's verdicts are A, B and tie: leave it out"
    elif bool(judge.verdicts) == (judge.scale is not None):
        yield "verdicts", "set either verdicts, such as {good: 1, bad: 0}, or scale, such as [1, 10]"
    elif judge.scale is not None and (len(judge.scale) != 2 or judge.scale[0] >= judge.scale[1]):
        yield "scale", "must be [lowest, highest], two numbers in this order"
    if judge.criteria and judge.compare == "group":
        yield "criteria", "compare: group has one verdict for each answer, and no criteria"
    if any(weight <= 0 for weight in judge.criteria.values()):
        yield "criteria", "every weight must be above 0"
