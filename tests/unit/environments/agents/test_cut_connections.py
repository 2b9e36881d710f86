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

SESSIONS, TURNS, CUT = 32, 4, 0.3


class CuttingProxy:
    """Passes connections on to a port, and cuts three in ten after some bytes of either side."""

    def __init__(self, port: int) -> None:
        self._to, self._draw = port, random.Random(7)
        self.cuts = {"up": 0, "down": 0}

    async def __aenter__(self) -> "CuttingProxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_cut, side, most = self._draw.random() < CUT, self._draw.choice(["up", "down"]), self._draw.randint(0, 900)
        there, here = await asyncio.open_connection("127.0.0.1", self._to)
        ends = (writer.transport, here.transport)

        async def pass_on(name: str, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            left = most if is_cut and side == name else 1 << 30
            while data := await source.read(1 << 16):
                target.write(data[:left])
                left -= len(data)
                if left < 0:
                    await target.drain()
                    self.cuts[name] += 1
                    for each in ends:
                        each.abort()
            target.close()

        await asyncio.gather(pass_on("up", reader, here), pass_on("down", there, writer), return_exceptions=True)
        for each in ends:
            each.abort()


async def play(served: Served, port: int, stream: bool) -> list[str]:
    """An agent: all turns, one after another, each with all messages before."""
    client = openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}{urlsplit(served.url).path}",
        api_key=served.key,
        max_retries=30,
        timeout=60,
        # A connection a request.
        default_headers={"Connection": "close"},
    )
    said, messages = [], [{"role": "user", "content": "go"}]
    async with client:
        for turn in range(TURNS):
            made: Any = client.chat.completions.create
            if stream:
                text = ""
                # A stream that breaks is the agent's to ask for again, as SDKs do not.
                while not text:
                    try:
                        async for part in await made(model="m", messages=messages, stream=True):
                            text += part.choices[0].delta.content or ""
                    except openai.APIConnectionError:
                        text = ""
                    except Exception as error:  # httpx2 or httpx, by the version of the SDK
                        assert "Error" in type(error).__name__
                        text = ""
            else:
                text = (await made(model="m", messages=messages)).choices[0].message.content
            said.append(text)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"on {turn}"}]
    return said


@pytest.mark.parametrize("stream", [False, True], ids=["answers", "streams"])
def test_each_turn_is_sampled_and_kept_once(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    endpoint, draw = Endpoint("127.0.0.1"), random.Random(3)
    all_ = [
        serve(lambda number: f"turn {number}{END}", delay=lambda: draw.uniform(0, 0.05), shared=endpoint)
        for _ in range(SESSIONS)
    ]

    async def play_all() -> tuple[list[list[str]], dict[str, int]]:
        async with CuttingProxy(endpoint.port) as proxy:
            return await asyncio.gather(*(play(each, proxy.port, stream) for each in all_)), proxy.cuts

    said, cuts = asyncio.run(play_all())
    assert min(cuts.values()) > 5
    retried = 0
    for served, texts in zip(all_, said):
        served.settle()
        retried += int(served.session.counts["coalesced"])
        numbers = [int(text.removeprefix("turn ")) for text in texts]
        path: list[int] = []
        for number in numbers:
            assert served.prompts[number][: len(path)] == path, "the sampled tokens go on"
            path = [*served.prompts[number], *served.sampled[number]]
        if not stream:
            assert numbers == list(range(TURNS)) == sorted(served.sampled), "no turn was sampled in vain"
        # The agent's own turns are kept, whole, and each once (`Served` refuses a second time).
        assert {number: served.kept[number] for number in numbers} == {
            number: len(served.sampled[number]) for number in numbers
        }
    assert retried > 0
