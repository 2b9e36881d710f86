"""HTTP client of a judge: the request forms of OpenAI and Anthropic, retries, and the counts of a step.

No two requests share a connection. So a server that answers twice, or after the client gave up, reaches no other
request. Redirects are not followed, because they would carry the key elsewhere.
"""

import asyncio
import email.utils
import json
import os
import random
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from rlctl.rewards.base import AskModel, RewardError
from rlctl.rewards.judge.ledger import JudgeLedger, JudgeReply, make_key
from rlctl.rewards.judge.metric_rows import (
    CALL_SECONDS,
    CALLS,
    COST,
    FAILED,
    FOUND,
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    RETRIES,
)
from rlctl.rewards.judge.sections import JudgeSection
from rlctl.utils.user_code import shorten_text

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
# Most bytes of a reply that are read.
_MAX_BODY = 4 << 20
_MILLION = 1e6


class JudgeClient:
    """Asks the server of a judge. At most `concurrency` requests run at a time.

    Raises RewardError if the variable of the key is not set.
    """

    def __init__(self, section: JudgeSection, ledger: JudgeLedger) -> None:
        self._section = section
        self._ledger = ledger
        self._secret = ""
        if section.api_key_env is not None:
            self._secret = os.environ.get(section.api_key_env, "")
            if not self._secret:
                raise RewardError(f"no key: api_key_env={section.api_key_env} is no variable that is set here")
        self._room = asyncio.Semaphore(section.concurrency)
        self._ask_model: AskModel | None = None
        self._session: aiohttp.ClientSession | None = None
        # Key of a request that is being made -> set when it has ended.
        self._in_flight: dict[str, asyncio.Event] = {}
        self._counts: dict[str, float] = {}

    async def ask(self, question: str) -> str:
        """Return the judge's reply to a question, from an earlier equal request if there was one.

        Raises RewardError if no request was answered, and StopRunError if the budget is spent.
        """
        body = self._make_body(question)
        key = make_key("engines" if self._section.path else self._section.client, body)
        if not self._section.cache:
            return await self._make_request(key, body)
        while key in self._in_flight:
            await self._in_flight[key].wait()
        earlier = self._ledger.find(key)
        if earlier is not None:
            self.count(FOUND.name)
            return earlier.text
        self._in_flight[key] = asyncio.Event()
        try:
            return await self._make_request(key, body)
        finally:
            self._in_flight.pop(key).set()

    def connect(self, ask_model: AskModel) -> None:
        """Take the function that asks engines of the run, for a judge with a `path`."""
        self._ask_model = ask_model

    def take_counts(self) -> dict[str, float]:
        """Return the counts since the last call, by the names of metrics."""
        counts = self._counts
        self._counts = {}
        return counts

    def count(self, name: str, value: float = 1.0) -> None:
        """Add to a count by the name of its metric."""
        self._counts[name] = self._counts.get(name, 0.0) + value

    def _make_body(self, question: str) -> dict[str, Any]:
        section = self._section
        body = {
            "model": section.path or section.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": section.max_tokens,
            "temperature": section.temperature,
        }
        body |= section.body
        return {name: value for name, value in body.items() if value is not None}

    async def _make_request(self, key: str, body: dict[str, Any]) -> str:
        """Make a request until it is answered, at most `retries` times more; return the reply's text."""
        problem = ""
        for attempt in range(self._section.retries + 1):
            async with self._room:
                self._ledger.begin()
                began = time.monotonic()
                reply: JudgeReply | None = None
                delay_s: float | None = None
                problem = "was not answered"
                try:
                    reply, problem, delay_s = await self._post_body(body)
                finally:
                    # A cancelled request counts too.
                    self._note_make_request(key, reply, problem, time.monotonic() - began)
            if reply is not None:
                return reply.text
            if delay_s is None:
                break
            if attempt < self._section.retries:
                self.count(RETRIES.name)
                await asyncio.sleep(max(delay_s, _backoff_s(attempt)))
        self.count(FAILED.name)
        raise RewardError(problem)

    def _note_make_request(self, key: str, reply: JudgeReply | None, problem: str, duration_s: float) -> None:
        self.count(CALLS.name)
        self.count(CALL_SECONDS.name, duration_s)
        if reply is None:
            self._ledger.note_failure(key, problem)
            return
        self._ledger.note_reply(key, reply)
        self.count(INPUT_TOKENS.name, reply.input_tokens)
        self.count(OUTPUT_TOKENS.name, reply.output_tokens)
        prices = (self._section.price_input or 0.0, self._section.price_output or 0.0)
        self.count(COST.name, (reply.input_tokens * prices[0] + reply.output_tokens * prices[1]) / _MILLION)

    async def _post_body(self, body: dict[str, Any]) -> tuple[JudgeReply | None, str, float | None]:
        """Make one request. Return (reply, problem, least seconds to the next try); None for no next try."""
        if self._section.path is not None:
            return await self._ask_engines(body)
        try:
            async with (
                asyncio.timeout(self._section.call_timeout_s),
                self._open_session().post(
                    self._address, json=body, headers=self._headers, allow_redirects=False
                ) as response,
            ):
                received = await response.content.read(_MAX_BODY)
                while not response.content.at_eof() and len(received) < _MAX_BODY:
                    received += await response.content.read(_MAX_BODY)
        except TimeoutError:
            return None, self._late_problem, 0.0
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return None, f"judge cannot be reached: {self._redact(f'{type(error).__name__} {error}')}", 0.0
        text = self._redact(received.decode("utf-8", "replace"))
        if response.status == 200:
            reply = _read_reply(text, self._section.client)
            return reply, f"judge answered 200 without a reply: {shorten_text(text)}", None
        problem = f"judge answered {response.status}: {shorten_text(text)}"
        is_retried = response.status in (408, 429) or response.status >= 500
        return None, problem, _retry_after_s(response.headers.get("Retry-After", "")) if is_retried else None

    async def _ask_engines(self, body: dict[str, Any]) -> tuple[JudgeReply | None, str, float | None]:
        """Ask engines of the run, as `_post_body` asks a server."""
        assert self._ask_model is not None
        question = body["messages"][0]["content"]
        try:
            async with asyncio.timeout(self._section.call_timeout_s):
                answer = await self._ask_model(question, self._section.max_tokens, self._section.temperature)
        except TimeoutError:
            return None, self._late_problem, 0.0
        if "problem" in answer:
            return None, str(answer["problem"]), None
        return JudgeReply(answer["text"], answer["input_tokens"], answer["output_tokens"]), "", None

    @property
    def _late_problem(self) -> str:
        return f"judge took longer than {self._section.call_timeout_s:g} s: each of its tries"

    def _redact(self, text: str) -> str:
        """Return a text without the key, which a server may repeat."""
        return text.replace(self._secret, "***") if self._secret else text

    @property
    def _address(self) -> str:
        path = "/chat/completions" if self._section.client == "openai" else "/v1/messages"
        parts = urlsplit(str(self._section.base_url))
        return parts._replace(path=parts.path.rstrip("/") + path).geturl()

    @property
    def _headers(self) -> dict[str, str]:
        if self._section.client == "anthropic":
            key = {"x-api-key": self._secret} if self._secret else {}
            return {"anthropic-version": "2023-06-01", **key}
        return {"Authorization": f"Bearer {self._secret}"} if self._secret else {}

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            host = urlsplit(str(self._section.base_url)).hostname
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True, limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                # A proxy of the environment is for other machines.
                trust_env=host not in _LOOPBACK,
            )
        return self._session


def _read_reply(text: str, client: str) -> JudgeReply | None:
    """Return the reply in the body of an answer; None if it has none."""
    try:
        answer = json.loads(text)
        usage = answer.get("usage") or {}
        if client == "openai":
            content = answer["choices"][0]["message"]["content"]
            tokens = (usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))
        else:
            content = "".join(block["text"] for block in answer["content"] if block.get("type") == "text")
            tokens = (usage.get("input_tokens", 0), usage.get("output_tokens", 0))
        return JudgeReply(str(content or ""), int(tokens[0] or 0), int(tokens[1] or 0))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None


def _backoff_s(attempt: int) -> float:
    """Return the seconds before the next try; random, so that requests do not come back together."""
    return min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0**attempt) * random.uniform(0.5, 1.0)


def _retry_after_s(header: str) -> float:
    """Return the seconds of a Retry-After header: a number or a date; 0 if it is neither."""
    with suppress(ValueError):
        return max(0.0, float(header))
    try:
        date_s: float = email.utils.parsedate_to_datetime(header).timestamp()
    except (ValueError, TypeError):
        return 0.0
    return max(0.0, date_s - time.time())
