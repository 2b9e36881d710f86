"""Sessions by the dozen, some of whose connections are cut at any byte: no token is lost, and none trains twice."""

import asyncio
import random
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from rlctl.environments.agents.endpoint import Endpoint
from tests.unit.environments.agents.served import END, Served

NUM_SESSIONS = 32
NUM_TURNS = 4
SHARE_CUT = 0.3


class CuttingProxy:
    """Proxy that forwards connections to a port, and cuts three in ten after some bytes from either side."""

    def __init__(self, port: int) -> None:
        self._target_port = port
        self._draw = random.Random(7)
        self.cuts = {"up": 0, "down": 0}

    async def __aenter__(self) -> "CuttingProxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cut_side = self._draw.choice(["up", "down"]) if self._draw.random() < SHARE_CUT else ""
        cut_after = self._draw.randint(0, 900)
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target_port)

        def abort_both() -> None:
            writer.transport.abort()
            server_writer.transport.abort()

        async def pass_on(side: str, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            num_left = cut_after if side == cut_side else 1 << 30
            while received := await source.read(1 << 16):
                target.write(received[:num_left])
                num_left -= len(received)
                if num_left < 0:
                    await target.drain()
                    self.cuts[side] += 1
                    abort_both()
            target.close()

        passing_up = pass_on("up", reader, server_writer)
        passing_down = pass_on("down", server_reader, writer)
        await asyncio.gather(passing_up, passing_down, return_exceptions=True)
        abort_both()


async def play_session(served: Served, port: int, stream: bool) -> list[str]:
    """Play an agent: request all turns, one after another, each with all messages before it; return their texts."""
    client = openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}{urlsplit(served.url).path}",
        api_key=served.key,
        max_retries=30,
        timeout=60,
        # A connection a request.
        default_headers={"Connection": "close"},
    )
    texts = []
    messages = [{"role": "user", "content": "go"}]
    create: Any = client.chat.completions.create
    async with client:
        for turn in range(NUM_TURNS):
            if stream:
                text = ""
                # The agent itself must request a broken stream again, because SDKs do not retry streams.
                while not text:
                    try:
                        async for part in await create(model="m", messages=messages, stream=True):
                            text += part.choices[0].delta.content or ""
                    except openai.APIConnectionError:
                        text = ""
                    except Exception as error:  # httpx2 or httpx, by the version of the SDK
                        assert "Error" in type(error).__name__
                        text = ""
            else:
                answer = await create(model="m", messages=messages)
                text = answer.choices[0].message.content
            texts.append(text)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"on {turn}"}]
    return texts


@pytest.mark.parametrize("stream", [False, True], ids=["answers", "streams"])
def test_each_turn_is_sampled_and_kept_once(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    endpoint = Endpoint("127.0.0.1")
    draw = random.Random(3)
    sessions = [
        serve(lambda number: f"turn {number}{END}", delay=lambda: draw.uniform(0, 0.05), shared=endpoint)
        for _ in range(NUM_SESSIONS)
    ]

    async def play_all() -> tuple[list[list[str]], dict[str, int]]:
        async with CuttingProxy(endpoint.port) as proxy:
            texts_of_sessions = await asyncio.gather(*(play_session(served, proxy.port, stream) for served in sessions))
            return texts_of_sessions, proxy.cuts

    texts_of_sessions, cuts = asyncio.run(play_all())
    assert min(cuts.values()) > 5
    num_retried = 0
    for served, texts in zip(sessions, texts_of_sessions):
        served.settle()
        num_retried += int(served.session.counts["coalesced"])
        numbers = [int(text.removeprefix("turn ")) for text in texts]
        path: list[int] = []
        for number in numbers:
            assert served.prompts[number][: len(path)] == path, "the sampled tokens go on"
            path = [*served.prompts[number], *served.sampled[number]]
        if not stream:
            assert numbers == list(range(NUM_TURNS)) == sorted(served.sampled), "no turn was sampled in vain"
        # The agent's own turns are kept, whole, and each once (`Served` refuses a second time).
        for number in numbers:
            assert served.kept_lengths[number] == len(served.sampled[number])
    assert num_retried > 0
