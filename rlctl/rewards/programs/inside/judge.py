"""Judge of programs: `python judge.py` in a sandbox. Reads tests and programs, and writes one verdict for each program.

    standard input: {token, suite: {kind, setup, cases, entry_point, checker}, programs, limits, stop_early}
    standard output: the token and `ready`; the token and [{tests, cpu_s, orphans, detail}, ...]

The tests are in this process alone. No program can read them: each runs in a process that was forked before they were
read. The verdict has a token of one use, which no program ever sees. The exit code says nothing.
"""

import json
import os
import socket
import sys
from typing import Any

from rlctl.rewards.programs.inside.nursery import EndedError, Nursery, Watch, protect_process
from rlctl.rewards.programs.inside.stand_ins import RemoteProgram, UnsupportedTestError
from rlctl.rewards.programs.inside.suites import Case, list_cases
from rlctl.rewards.programs.inside.values import NotPlainError

# Most limits that one program may meet. After these its further tests have failed.
MAX_ENDED = 3
PASSED = "passed"
FAILED = "failed"


class BrokenJudgeError(BaseException):
    """The judge itself failed, which says nothing about the program."""


class Run:
    """One program against one suite."""

    def __init__(self, nursery: Nursery, request: dict[str, Any], source: str) -> None:
        self._nursery = nursery
        self._request = request
        self._limits = request["limits"]
        self._source = source
        self._watch: Watch | None = None
        self._program: RemoteProgram | None = None
        self._detail = ""
        self.most_cpu_s = 0.0

    def judge(self) -> dict[str, Any]:
        """Run the tests; return an outcome for each: passed, failed, unsupported, or the limit that ended it."""
        outcomes: list[str] = []
        num_ended = 0
        cases: list[Case] | None = None
        if self._request["suite"]["kind"] != "input":
            first = self._begin_program()
            if first:
                return self._verdict([first])
        num_tests = 1
        while len(outcomes) < num_tests:
            if cases is None:
                # The old tests hold objects of the ended program.
                cases = list_cases(self._request["suite"], self._program, self)
                num_tests = len(cases)
                if not cases:
                    break
            outcome = self._run_case(cases[len(outcomes)])
            outcomes.append(outcome)
            if outcome == "unsupported" or (self._request["stop_early"] and outcome != PASSED):
                break
            if self._watch is not None and self._watch.has_ended:
                num_ended += 1
                if num_ended == MAX_ENDED:
                    break
                if self._begin_program():
                    break
                cases = None
        self._end_program()
        return self._verdict(outcomes, num_tests)

    def _verdict(self, outcomes: list[str], num_tests: int = 1) -> dict[str, Any]:
        self._end_program()
        return {
            "tests": outcomes,
            "num_tests": num_tests,
            "cpu_s": self.most_cpu_s,
            "orphans": self._nursery.end_orphans(),
            "detail": self._detail[:200],
        }

    def _run_case(self, case: Case) -> str:
        if self._watch is not None:
            self._watch.begin_test()
        try:
            is_passed = case()
        except BrokenJudgeError:
            raise
        except BaseException as error:
            return self._name_error(error)
        finally:
            self._note_cpu()
        if not is_passed and not self._detail:
            self._detail = "another value than expected"
        return PASSED if is_passed else FAILED

    def _name_error(self, error: BaseException) -> str:
        if isinstance(error, EndedError):
            outcome = str(error)
        elif isinstance(error, UnsupportedTestError):
            outcome = "unsupported"
        elif isinstance(error, MemoryError):
            outcome = "memory"
        else:
            outcome = FAILED
        if not self._detail:
            self._detail = f"{type(error).__name__}: {error}"
        return outcome

    def _begin_program(self) -> str:
        """Start the program, and read its names. Return the outcome if it does not begin, else an empty text."""
        self._watch, _ = self._fork_candidate([], prelude=self._request["suite"]["kind"] == "calls")
        try:
            self._program = RemoteProgram(self._watch, self._source)
        except (Exception, SystemExit) as error:
            return self._name_error(error)
        finally:
            self._note_cpu()
        return ""

    def run_with_input(self, text: str) -> str:
        """Run the program with a standard input; return its output.

        Raises EndedError for a limit, RuntimeError for an error of the program, and BrokenJudgeError.
        """
        try:
            # A file without a name holds an input of any size.
            stdin_file = os.open("input", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.unlink("input")
            os.write(stdin_file, text.encode("utf-8", "replace"))
            os.lseek(stdin_file, 0, os.SEEK_SET)
            output, program_end = os.pipe()
            self._watch, channel = self._fork_candidate([stdin_file, program_end])
        except OSError as error:
            raise BrokenJudgeError(str(error)) from error
        os.close(stdin_file)
        os.close(program_end)
        try:
            channel.sendall(json.dumps(self._source).encode() + b"\n")
            printed = self._watch.read_until(output, self._limits["output_bytes"])
            report = self._watch.read_report()
        except OSError as error:
            raise EndedError("lost") from error
        finally:
            os.close(output)
            self._note_cpu()
            self._watch.end()
            self._watch = None
        if isinstance(report, dict) and "raised" in report:
            names, error_text, line = report["raised"]
            if "MemoryError" in names:
                raise MemoryError
            raise RuntimeError(f"{names[0]} at line {line}: {error_text}")
        return printed.decode("utf-8", "replace")

    def _fork_candidate(self, descriptors: list[int], prelude: bool = False) -> tuple[Watch, socket.socket]:
        channel, other_end = socket.socketpair()
        setup = {
            "mode": "input" if descriptors else "names",
            "prelude": prelude,
            # A second guard: the watch ends it first.
            "cpu_s": int(self._limits["cpu_s"] * 100) + 10,
            "memory_bytes": self._limits["memory_bytes"],
            "files": self._limits["files"],
        }
        try:
            pid = self._nursery.fork(setup, [other_end.fileno(), *descriptors])
        finally:
            other_end.close()
        return Watch(pid, channel, self._limits["cpu_s"], self._limits["idle_s"]), channel

    def _note_cpu(self) -> None:
        if self._watch is not None:
            self._watch.end_test()
            self.most_cpu_s = max(self.most_cpu_s, self._watch.most_cpu_s)

    def _end_program(self) -> None:
        if self._watch is not None:
            self._watch.end()


def main() -> None:
    """Judge the programs of standard input."""
    protect_process()
    output = os.dup(1)
    nursery = Nursery()
    request = json.loads(sys.stdin.buffer.read())
    # Prints of a test go to standard error.
    os.dup2(2, 1)
    # From here on a judge that is lost was ended, most likely by a program.
    os.write(output, f"{request['token']} ready\n".encode())
    verdicts: list[dict[str, Any]] = []
    if not nursery.is_safe:
        verdicts = [{"unsafe": True}]
    else:
        for source in request["programs"]:
            try:
                verdicts.append(Run(nursery, request, source).judge())
            except (BrokenJudgeError, EndedError, NotPlainError) as error:
                verdicts.append({"lost": str(error)})
                break
    os.write(output, f"{request['token']} {json.dumps(verdicts)}\n".encode())


if __name__ == "__main__":
    main()
