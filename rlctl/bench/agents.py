"""`rlctl bench agents`: the cost of the HTTP endpoint that agents talk to, without an engine.

The environment pool (one process), the endpoint, chat histories, templates and the player are those of a run. The
engine is replaced by one that answers at once. The agents only write the endpoint's address and key to a file; the
bench itself sends the requests. Each session asks for several turns, one after another, over one connection.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil

from rlctl.bench.frame import Bench, Cells, Line, Results, ResultTable, Say
from rlctl.bench.workload import random_words, word_tokenizer
from rlctl.data.chat import ChatSpec
from rlctl.data.tasks import Task
from rlctl.environments.environment_pool import EnvironmentPool
from rlctl.environments.outcomes import AgentSpec, EnvironmentSpec
from rlctl.generation.requests import Completion, RolloutId, TurnRequest
from rlctl.rollout.players.agent import AgentPlayer
from rlctl.rollout.players.episode_state import EpisodeLimits
from rlctl.rollout.runner import RolloutRunner
from rlctl.rollout.types import RolloutStart
from rlctl.utils.event_loop import EventLoop

# An agent that only writes the address and the key of its endpoint to a file.
_AGENT = "rlctl.environments.agents.runners:announce"
_NO_DEADLINE_S = 1e8
_DEADLINE_S = 600.0
_MEMORY_MIB = 1 << 16
# Words of the tokenizer's vocabulary.
_VOCABULARY = 32_000
# Tokens that each turn samples, and turns of a session.
_TURN = 128
TURNS = 8
# Bytes of one tool's schema. Half of a request's body is tool schemas, as in requests of coding agents.
_TOOL = 1500
# A chat template like Qwen's, with tools and tool calls.
_TEMPLATE = (
    "{% if tools %}<im_start> system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %} <end> {% endif %}"
    "{% for m in messages %}<im_start> {{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %} {{ c.function.arguments | tojson }}{% endfor %} <end> {% endfor %}"
    "{% if add_generation_prompt %}<im_start> assistant {% endif %}"
)


@dataclass(frozen=True)
class ServerRow:
    """Measurements of requests of one size, from one number of concurrent sessions."""

    body: int  # bytes of a session's first request
    sessions: int  # concurrent ones
    requests: int  # of all sessions
    server: float  # CPU seconds of the agents' process for a request
    driver: float  # CPU seconds of the driver's event loop for a request
    wait: float  # seconds from a request to its response, median
    longest: float  # the same, of the slowest request
    memory: int  # bytes by which the agents' process grew

    def cells(self) -> Cells:
        """Return the cells of its table row."""
        return [
            ("body", f"{self.body / 1024:,.0f} KiB"),
            ("sessions", f"{self.sessions:,}"),
            ("server", f"{1e3 * self.server:.2f} ms"),
            ("driver", f"{1e3 * self.driver:.2f} ms"),
            ("median", f"{1e3 * self.wait:,.1f} ms"),
            ("longest", f"{1e3 * self.longest:,.1f} ms"),
            ("MiB", f"{self.memory / 2**20:,.0f}"),
        ]


@dataclass
class AnsweringEngines:
    """Stand-in for engines: it answers each request at once, with the same tokens."""

    events: EventLoop
    tokens: np.ndarray[Any, np.dtype[np.int32]] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = np.arange(5, 5 + _TURN, dtype=np.int32)

    async def sample_turn(self, request: TurnRequest, *, ahead: bool = False, turns_follow: bool = False) -> Completion:
        """Return the same turn for each request."""
        return Completion(self.tokens, np.full(_TURN, -1.5, np.float32), np.zeros(_TURN, np.int32), "length")

    def finish(self, rollouts: Iterable[RolloutId]) -> None:
        """Do nothing."""


def server_rows(sizes: Sequence[int], sessions: int, folder: Path, say: Say) -> list[ServerRow]:
    """Measure one session alone, and `sessions` concurrent ones, for each size (bytes) of a first request."""
    word_tokenizer(_VOCABULARY).save_pretrained(folder / "words")
    spec = ChatSpec(str(folder / "words"), _TEMPLATE, system_prompt=None, folder=None, special_tokens="text")
    session_counts = [1, sessions] if sessions > 1 else [1]
    return [_server_row(spec, size, number, folder, say) for size, number in product(sizes, session_counts)]


def _server_row(spec: ChatSpec, size: int, sessions: int, folder: Path, say: Say) -> ServerRow:
    """Measure `sessions` concurrent sessions whose first requests have about `size` bytes."""
    say(f"{sessions:,} sessions, bodies of {size / 1024:,.0f} KiB")
    row_folder = folder / f"{size}-{sessions}"
    row_folder.mkdir()
    chat = spec.load()
    agent = EnvironmentSpec(_AGENT, timeout_s=_NO_DEADLINE_S, agent=AgentSpec())
    with EnvironmentPool({"agent": agent}, memory_mib=_MEMORY_MIB, processes=1) as pool:
        pool.give_chat(spec, None)
        pool.contracts()
        # No limit that a session reaches.
        limits = EpisodeLimits(
            max_turns=4 * TURNS, max_length=1 << 30, timeout_s=float("inf"), max_retries=0, history="keep"
        )
        runner = RolloutRunner(AgentPlayer(pool, chat, limits), AnsweringEngines(pool.events))
        ended = list[Any]()
        files = [row_folder / f"{index}.json" for index in range(sessions)]
        starts = [_rollout_start(index, file) for index, file in enumerate(files)]
        runner.events.ask(lambda: runner.begin(starts, ended.append))
        addresses = _wait_for_addresses(files, ended)
        process = _agents_process(pool)
        opening = _opening(size)
        # The first request loads the tokenizer and compiles the template, so it is made before anything is counted.
        asyncio.run(_play_sessions(addresses[:1], opening, 1))
        server_before = _cpu_seconds(process)
        driver_before = runner.events.ask(time.thread_time)
        memory_before = process.memory_info().rss
        waits = asyncio.run(_play_sessions(addresses, opening, TURNS))
        server_seconds = _cpu_seconds(process) - server_before
        driver_seconds = runner.events.ask(time.thread_time) - driver_before
        memory = process.memory_info().rss - memory_before
        runner.check()
        runner.close()
    num_requests = len(waits)
    return ServerRow(
        body=len(json.dumps(opening)),
        sessions=sessions,
        requests=num_requests,
        server=server_seconds / num_requests,
        driver=driver_seconds / num_requests,
        wait=median(waits),
        longest=max(waits),
        memory=memory,
    )


def _rollout_start(index: int, file: Path) -> RolloutStart:
    """Return the start of session `index`, whose agent writes its address and key to `file`."""
    task = Task(f"r{index}", tokens=[], text="", answer=None, row={"file": str(file)})
    return RolloutStart(
        id=RolloutId("train", task.id, group=0, index=index),
        task=task,
        max_new_tokens=_TURN,
        temperature=1.0,
        seed=index,
        group_seed=0,
    )


def _wait_for_addresses(files: list[Path], ended: list[Any]) -> list[tuple[str, str]]:
    """Wait until every agent has written its file; return (address, key) of each. Raises RuntimeError if one fails.

    ended: the rollouts that have ended so far. An agent goes on until the bench is done.
    """
    addresses = list[tuple[str, str]]()
    end = time.monotonic() + _DEADLINE_S
    for file in files:
        announcement: dict[str, str] = {}
        while not announcement:
            if ended or time.monotonic() > end:
                raise RuntimeError("an agent of the bench has ended, or none has begun")
            try:
                announcement = json.loads(file.read_text())
            except (OSError, ValueError):
                time.sleep(0.01)
        addresses.append((announcement["base_url"], announcement["api_key"]))
    return addresses


def _agents_process(pool: EnvironmentPool) -> psutil.Process:
    """Return the process that runs the agents. It is a grandchild of the pool's process: two supervisors are above."""
    return psutil.Process(pool.pids()[0]).children()[0].children()[0]


def _cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process, in user and in system mode."""
    return float(sum(process.cpu_times()[:2]))


def _opening(size: int) -> dict[str, Any]:
    """Return the body of a session's first request: about `size` bytes, half of which are tool schemas."""
    rng = random.Random(0)
    tools = list[dict[str, Any]]()
    # A word has about 4 characters with its blank. 200 bytes of a tool are the JSON around its words.
    while len(json.dumps(tools)) < size // 2:
        words = random_words(rng, (_TOOL - 200) // 4)
        properties = {"path": {"type": "string", "description": words[:200]}, "line": {"type": "integer"}}
        parameters = {"type": "object", "properties": properties, "required": ["path"]}
        function = {"name": f"tool_{len(tools)}", "description": words, "parameters": parameters}
        tools.append({"type": "function", "function": function})
    text = random_words(rng, max(1, (size - len(json.dumps(tools)) - 200) // 4))
    messages = [{"role": "system", "content": text}, {"role": "user", "content": random_words(rng, 16)}]
    return {"model": "policy", "messages": messages, "tools": tools, "temperature": 1.0}


async def _play_sessions(addresses: list[tuple[str, str]], opening: dict[str, Any], turns: int) -> list[float]:
    """Play all sessions concurrently; return the seconds of each request."""
    waits = list[float]()
    sessions = [
        _play_session(index=index, base_url=base_url, key=key, opening=opening, turns=turns, waits=waits)
        for index, (base_url, key) in enumerate(addresses)
    ]
    async with asyncio.timeout(_DEADLINE_S):
        await asyncio.gather(*sessions)
    return waits


async def _play_session(
    index: int, base_url: str, key: str, opening: dict[str, Any], turns: int, waits: list[float]
) -> None:
    """Request `turns` turns, and add the seconds of each request to `waits`.

    A request has all earlier messages of the session, as agents send them. Raises RuntimeError for a response with
    another status than 200.
    """
    parts = urlsplit(base_url)
    body = dict(opening)
    user = f"session {index} of many"
    # A message with the session's number, so that no two sessions have the same history.
    body["messages"] = [*opening["messages"], {"role": "user", "content": user}]
    head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: "
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    for turn in range(turns):
        raw = json.dumps(body).encode()
        began = time.perf_counter()
        writer.write(f"{head}{len(raw)}\r\n\r\n".encode() + raw)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        length = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length:"))
        answer = await reader.readexactly(length)
        waits.append(time.perf_counter() - began)
        if " 200 " not in lines[0]:
            raise RuntimeError(f"the endpoint answered {answer.decode()[:200]}")
        message = json.loads(answer)["choices"][0]["message"]
        answered = {"role": "assistant", "content": message["content"]}
        body["messages"] = [*body["messages"], answered, {"role": "user", "content": f"turn {turn} of {user}"}]
    writer.close()


_AGENTS_LEGEND = (
    f"body: the first request of a session, half of it tools, followed by {TURNS - 1} longer ones; server, driver: CPU "
    "time of a request in the agents' process and on the driver's event loop; median, longest: time of a request whose "
    "turn takes none; MiB: by which the process grew"
)


@dataclass(frozen=True)
class AgentsBench(Bench):
    """Requests of several sizes, from one session alone and from many at the same time."""

    bodies: Sequence[int]  # bytes
    sessions: int

    def measure(self, folder: Path, say: Say) -> "AgentsResults":
        return AgentsResults(server_rows(self.bodies, self.sessions, folder, say))


@dataclass(frozen=True)
class AgentsResults(Results):
    """Rows of all sizes."""

    rows: list[ServerRow]

    def report(self, wide: bool) -> list[Line | ResultTable]:
        return [ResultTable([row.cells() for row in self.rows]), Line(_AGENTS_LEGEND, "dim")]
