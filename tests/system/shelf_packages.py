"""Packages of other projects, each in its virtual environment, and their servers."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import rlctl.environments.shelves as shelves

PAGE = Path(str(shelves.__file__)).parent / "README.md"
# A taskset of verifiers, on the package's own classes, with its harness.
TASKSET = """
import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Game", "HigherLower"]


class Range(vf.TaskData):
    low: int
    high: int
    secret: int


class Guess(vf.Task[Range]):
    @vf.reward
    async def won(self, trace: vf.Trace) -> float:
        return float(trace.assistant_messages[-1].content.strip() == str(self.data.secret))


class Game(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(5):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                text = reply.choices[0].message.content or ""
                if text.strip() == str(data.secret):
                    break
                guess = int("0" + "".join(filter(str.isdigit, text)))
                hint = "higher" if guess < data.secret else "lower"
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class HigherLower(vf.Taskset[Guess]):
    def load(self):
        text = "I am thinking of a number from {} to {}. You have 5 guesses. Answer with one number."
        for low in range(1, 80):
            data = Range(prompt=text.format(low, low + 14), low=low, high=low + 14, secret=low + 7 * low % 15)
            yield Guess(data, self.config.task)
"""
# Seconds that a server may take to start, on a busy machine.
START_S = 120.0


def install(folder: Path, *packages: str) -> Path:
    """Make a virtual environment with packages, and return its Python. Skip the test if the index cannot be reached."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    command = [str(folder / "bin/python"), "-m", "pip", "install", "-q", *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last_line = done.stderr.strip().splitlines()[-1]
        pytest.skip(f"{', '.join(packages)} cannot be installed here: {last_line}")
    print(f"{', '.join(packages)}: {megabytes(folder):,} MB")
    return folder / "bin/python"


def megabytes(folder: Path) -> int:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(path.stat().st_size for path in files) // 1_000_000


def block_of_page(name: str) -> str:
    """Return the block of the shelves' page that begins with `# NAME`."""
    (text,) = re.findall(rf"(?ms)^```\w+\n# {re.escape(name)}\n(.*?)^```", PAGE.read_text())
    return str(text)


@contextmanager
def running(command: list[str], folder: Path, has_started: Callable[[], bool]) -> Iterator[None]:
    """Run a server, which imports nothing of this checkout, until the block ends."""
    log = folder / "server.log"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("w") as output:
        server = subprocess.Popen(command, cwd=folder, env=variables, stdout=output, stderr=output)
    try:
        ends_at = time.monotonic() + START_S
        while not has_started():
            assert server.poll() is None and time.monotonic() < ends_at, log.read_text()
            time.sleep(0.2)
        yield
    finally:
        server.terminate()
        server.wait(timeout=30)
