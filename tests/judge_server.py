"""A judge's server on loopback, in the forms of OpenAI and of Anthropic, that may fail, wait, lie or answer twice.

`python -m tests.judge_server PORT_FILE` runs it alone; the question then says how it behaves, see `Behaviour`.
"""

import asyncio
import json
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Answer:
    """One answer of the server."""

    text: str = "verdict: good"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    # Seconds before the answer is sent.
    seconds: float = 0.0
    # Number of times that the answer is sent on the connection; 0 closes it without an answer.
    copies: int = 1
    # In place of the body with `text`.
    body: str | None = None


# Takes the question and the number of requests before; returns the answer.
Behave = Callable[[str, int], Answer]


class JudgeServer:
    """Server of a judge, on a thread. Use it in a `with`."""

    def __init__(self, behave: Behave) -> None:
        self._behave = behave
        # Questions in the order of requests, their bodies, and their headers.
        self.questions: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.paths: list[str] = []
        self.running = 0
        self.most_running = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "JudgeServer":
        self._thread.start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 22)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(30)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        requests = asyncio.all_tasks() - {asyncio.current_task()}
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(re.findall(r"(?i)content-length: (\d+)", head)[0])
                body = json.loads(await reader.readexactly(length))
                self.running += 1
                self.most_running = max(self.most_running, self.running)
                await self._answer(head, body, writer)
                self.running -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        question = body["messages"][-1]["content"]
        answer = self._behave(question, len(self.questions))
        self.questions.append(question)
        self.bodies.append(body)
        self.headers.append(head)
        path = head.split()[1]
        self.paths.append(path)
        await asyncio.sleep(answer.seconds)
        if not answer.copies:
            raise ConnectionError
        text = openai_body(answer.text) if path.endswith("/chat/completions") else anthropic_body(answer.text)
        if answer.body is not None:
            text = answer.body
        elif answer.status != 200:
            text = json.dumps({"error": {"message": answer.text}})
        headers = {"Content-Type": "application/json", "Content-Length": len(text.encode()), **answer.headers}
        lines = [f"HTTP/1.1 {answer.status} Answer", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write(("\r\n".join([*lines, "", ""]) + text).encode() * answer.copies)
        await writer.drain()


def openai_body(text: str) -> str:
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
    return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage})


def anthropic_body(text: str) -> str:
    content = [{"type": "text", "text": text}]
    return json.dumps({"type": "message", "content": content, "usage": {"input_tokens": 10, "output_tokens": 2}})


def good_if_equal(question: str, number: int) -> Answer:
    """Judge `... = ANSWER? COMPLETION` at the end of the question."""
    expected, _, given = question.rpartition("\n")[2].partition("?")
    is_good = expected.split("=")[-1].strip() == given.strip()
    return Answer(f"I compared them.\nverdict: {'good' if is_good else 'bad'}")


def main() -> None:
    with JudgeServer(good_if_equal) as server:
        Path(sys.argv[1]).write_text(server.url)
        threading.Event().wait()


if __name__ == "__main__":
    main()
