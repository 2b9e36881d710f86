"""Process that runs one program. It gets arguments and inputs, and never sees an expected value or a test.

The nursery forks it before the judge reads the tests, so that they are not in its memory. All that it says is taken as
data: a program that forges its answers can only answer wrongly.
    judge -> candidate: the program, then {do: call | get | set | operate, ...}, a JSON line each
    candidate -> judge: {value, changed} or {raised: [names of its classes, text]}, a JSON line each
"""

import io
import json
import os
import resource
import signal
import socket
import sys
import threading
import types
from typing import Any

from rlctl.rewards.programs.inside.values import decode_value, encode_value

# Names of LeetCode's programs, which import nothing.
PRELUDE = """\
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""
# Imported before the fork: a program's own user may be unable to read Python's folder, for example below /root.
exec(PRELUDE, {})


def run_candidate(setup: dict[str, Any], channel: socket.socket) -> None:
    """Run the program that the judge sends, then end this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _limit(setup)
    lines = channel.makefile("r", encoding="utf-8", newline="\n")
    program = json.loads(lines.readline())
    if setup["mode"] == "input":
        report = _run_as_script(program)
        _send_reply(channel, report)
    else:
        _serve_names(program, setup["prelude"], lines, channel)


def _limit(setup: dict[str, Any]) -> None:
    """Set the limits of this process. The sandbox holds those of the whole tree."""
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: setup["cpu_s"], resource.RLIMIT_AS: setup["memory_bytes"]}
    if not setup["files"]:
        limits[resource.RLIMIT_FSIZE] = 0
    for name, target in limits.items():
        hard = resource.getrlimit(name)[1]
        lowest = target if hard == resource.RLIM_INFINITY else min(target, hard)
        resource.setrlimit(name, (lowest, lowest))
    if not setup["files"]:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


def _run_as_script(program: str) -> dict[str, Any]:
    """Run a program that reads standard input; return the report of its end."""
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0)), encoding="utf-8", errors="replace")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w")), encoding="utf-8", errors="replace")
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    report: dict[str, Any] = {"value": None}
    try:
        exec(compile(program, "program.py", "exec"), main.__dict__)
    except SystemExit as error:
        if error.code not in (None, 0):
            report = _report_error(error)
    except BaseException as error:
        report = _report_error(error)
    try:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        sys.stdout.flush()
    except BaseException as error:
        report = _report_error(error)
    return report


def _serve_names(program: str, has_prelude: bool, lines: io.TextIOBase, channel: socket.socket) -> None:
    """Run a program that defines names, and answer the judge's requests about them."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    objects: list[Any] = [module]
    numbers = {id(module): 0}

    def keep(target: Any) -> list[Any]:
        if id(target) not in numbers:
            numbers[id(target)] = len(objects)
            objects.append(target)
        return ["object", numbers[id(target)], *_describe_object(target)]

    def take(coded: list[Any]) -> Any:
        return objects[coded[1]]

    try:
        if has_prelude:
            exec(PRELUDE, module.__dict__)
            prelude_names = set(vars(module))
        else:
            prelude_names = set()
        exec(compile(program, "program.py", "exec"), module.__dict__)
        names = [name for name in vars(module) if name not in prelude_names and not name.startswith("__")]
        _send_reply(channel, {"value": ["list", names]})
    except BaseException as error:
        _send_reply(channel, _report_error(error))
        return
    for line in lines:
        request = json.loads(line)
        try:
            arguments = [decode_value(argument, take) for argument in request["arguments"]]
            before = [json.dumps(argument) for argument in request["arguments"]]
            keywords = {name: decode_value(argument, take) for name, argument in request["keywords"].items()}
            result = _answer_request(request, objects, arguments, keywords)
            reply = {"value": encode_value(result, keep), "changed": {}}
            for index, argument in enumerate(arguments):
                coded = encode_value(argument, keep)
                if isinstance(argument, list | dict | set | bytearray) and json.dumps(coded) != before[index]:
                    reply["changed"][str(index)] = coded
        except BaseException as error:
            reply = _report_error(error)
        _send_reply(channel, reply)


def _answer_request(request: dict[str, Any], objects: list[Any], arguments: list[Any], keywords: dict[str, Any]) -> Any:
    target = objects[request["target"]]
    if request["do"] == "get":
        return getattr(target, request["name"])
    if request["do"] == "set":
        return setattr(target, request["name"], *arguments)
    if request["do"] == "operate":
        return _OPERATIONS[request["name"]](target, *arguments)
    return target(*arguments, **keywords)


def _is_kind_of(class_: Any, target: Any) -> bool:
    return isinstance(target, class_)


_OPERATIONS: dict[str, Any] = {
    "len": len,
    "iter": iter,
    "next": next,
    "str": str,
    "repr": repr,
    "bool": bool,
    "hash": hash,
    "abs": abs,
    "neg": lambda target: -target,
    "int": int,
    "float": float,
    "item": lambda target, key: target[key],
    "set_item": lambda target, key, member: target.__setitem__(key, member),
    "delete_item": lambda target, key: target.__delitem__(key),
    "contains": lambda target, member: member in target,
    "enter": lambda target: target.__enter__(),
    "exit": lambda target: target.__exit__(None, None, None),
    "instance": _is_kind_of,
    "eq": lambda target, other: target == other,
    "lt": lambda target, other: target < other,
    "le": lambda target, other: target <= other,
    "gt": lambda target, other: target > other,
    "ge": lambda target, other: target >= other,
    "add": lambda target, other: target + other,
    "sub": lambda target, other: target - other,
    "mul": lambda target, other: target * other,
    "truediv": lambda target, other: target / other,
    "or": lambda target, other: target | other,
    "and": lambda target, other: target & other,
}


def _describe_object(target: Any) -> list[Any]:
    """Return the kind of an object and its name, for the judge's stand-in."""
    if isinstance(target, types.ModuleType):
        return ["module", target.__name__]
    if isinstance(target, type) and issubclass(target, BaseException):
        return ["exception", [class_.__name__ for class_ in target.__mro__]]
    if isinstance(target, type):
        return ["class", target.__name__]
    return ["value", type(target).__name__]


def _report_error(error: BaseException) -> dict[str, Any]:
    line = 0
    trace_step = error.__traceback__
    while trace_step is not None:
        if trace_step.tb_frame.f_code.co_filename == "program.py":
            line = trace_step.tb_lineno
        trace_step = trace_step.tb_next
    try:
        text = str(error)[:500]
    except BaseException:
        text = ""
    names = [class_.__name__ for class_ in type(error).__mro__]
    return {"raised": [names, text, line]}


def _send_reply(channel: socket.socket, reply: dict[str, Any]) -> None:
    try:
        line = json.dumps(reply)
    except BaseException as error:
        line = json.dumps(_report_error(error))
    channel.sendall(line.encode("utf-8", "replace") + b"\n")


def end_process() -> None:
    """End this process without the handlers that it inherited."""
    os._exit(0)
