"""The requests of a judge: replies that an equal question finds again, and what was spent of the budget.

A file in the run's directory has one line for each request. Every line is one write, and an unfinished last line is
ignored. So a kill at any moment loses no earlier line, and a resumed run finds the same replies and the same sums.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.rewards.base import StopRunError


@dataclass(frozen=True)
class JudgeReply:
    """Text of a judge, and the tokens of the request and of the reply."""

    text: str
    input_tokens: int
    output_tokens: int


def make_key(client: str, body: Mapping[str, Any]) -> str:
    """Return the hash of a request: of its model, its messages and all parameters."""
    content = json.dumps([client, body], sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


class JudgeLedger:
    """Requests of one judge. path: the file; None: nothing outlives the process.

    budget_calls, budget_tokens: limits on the whole run; None is no limit.
    """

    def __init__(self, path: Path | None, budget_calls: int | None, budget_tokens: int | None) -> None:
        self._budget_calls = budget_calls
        self._budget_tokens = budget_tokens
        self.calls = 0
        self.tokens = 0
        # Number of requests that have been begun and not recorded.
        self._num_open = 0
        # Key of a request -> reply, without a file.
        self._replies: dict[str, JudgeReply] = {}
        # Key of a request -> (offset, length) of its line in the file.
        self._lines: dict[str, tuple[int, int]] = {}
        self._file: int | None = None
        self._size = 0
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            self._read_file(path)

    def find(self, key: str) -> JudgeReply | None:
        """Return the reply to an equal request; None if there was none."""
        if self._file is None or key not in self._lines:
            return self._replies.get(key)
        offset, length = self._lines[key]
        record = json.loads(os.pread(self._file, length, offset))
        return JudgeReply(record["text"], record["input_tokens"], record["output_tokens"])

    def begin(self) -> None:
        """Note that a request is made. Raises StopRunError if the budget is spent."""
        calls = self.calls + self._num_open
        if self._budget_calls is not None and calls >= self._budget_calls:
            made = f"budget_calls={self._budget_calls} requests were made"
            raise StopRunError(f"the judge's budget is spent: {made}; raise it and resume")
        if self._budget_tokens is not None and self.tokens >= self._budget_tokens:
            used = f"{self.tokens} tokens of budget_tokens={self._budget_tokens} were used"
            raise StopRunError(f"the judge's budget is spent: {used}; raise it and resume")
        self._num_open += 1

    def note_failure(self, key: str, problem: str) -> None:
        """Record a request of `begin` that got no reply."""
        self._num_open -= 1
        self.calls += 1
        self._write_record({"key": key, "problem": problem})

    def note_reply(self, key: str, reply: JudgeReply) -> None:
        """Record the reply to a request of `begin`."""
        self._num_open -= 1
        self.calls += 1
        self.tokens += reply.input_tokens + reply.output_tokens
        tokens = {"input_tokens": reply.input_tokens, "output_tokens": reply.output_tokens}
        line = self._write_record({"key": key, "text": reply.text, **tokens})
        if line is None:
            self._replies[key] = reply
        else:
            self._lines[key] = line

    def _write_record(self, record: dict[str, Any]) -> tuple[int, int] | None:
        """Append a line; return (offset, length). None: there is no file, or the disk is full."""
        if self._file is None:
            return None
        line = json.dumps(record).encode() + b"\n"
        try:
            written = os.write(self._file, line)
        except OSError:
            return None
        offset = self._size
        self._size += written
        if written < len(line):
            # The unfinished line ends here, so that the next one can be read.
            self._size += os.write(self._file, b"\n")
            return None
        return offset, len(line)

    def _read_file(self, path: Path) -> None:
        """Read the requests of earlier processes and attempts."""
        assert self._file is not None
        has_end = True
        with path.open("rb") as file:
            for line in file:
                has_end = line.endswith(b"\n")
                try:
                    record = json.loads(line)
                    key = record["key"]
                    tokens = record.get("input_tokens", 0) + record.get("output_tokens", 0)
                except (ValueError, KeyError, TypeError):
                    record = {}
                if record and has_end:
                    self.calls += 1
                    self.tokens += tokens
                    if "text" in record:
                        self._lines[key] = (self._size, len(line))
                self._size += len(line)
        if not has_end:
            self._size += os.write(self._file, b"\n")
