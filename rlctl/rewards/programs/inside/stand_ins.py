"""Stand-ins of a program's functions, classes and objects, for tests that run in another process than the program.

A test calls them as if they were the program's own. A value comes back as data, so an `__eq__` that is always true, a
patched builtin or a trace function never meets an expected value. An object of the program's own is equal to no value,
and computes with none.
"""

import builtins
import importlib
import sys
from typing import Any

from rlctl.rewards.programs.inside.nursery import EndedError, Watch
from rlctl.rewards.programs.inside.values import decode_value, encode_value

# Modules of the standard library are the judge's own, whatever the program calls by their names.
_STANDARD = sys.stdlib_module_names


class UnsupportedTestError(Exception):
    """A test that cannot be run from outside of the program's process."""


class RemoteProgram:
    """A running program, seen from the tests."""

    def __init__(self, watch: Watch, source: str) -> None:
        self._watch = watch
        self._exceptions: dict[str, type[BaseException]] = {}
        reply = watch.ask(source)
        names = self._read_value(reply)
        self.names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        self.module = StandIn(self, 0)

    def request(self, do: str, target: int, name: str = "", arguments: Any = (), keywords: Any = None) -> Any:
        """Ask the program, and return the value. An error of the program is raised here under its class's name."""
        request = {
            "do": do,
            "target": target,
            "name": name,
            "arguments": [encode_value(argument, self._keep_outside) for argument in arguments],
            "keywords": {key: encode_value(answer, self._keep_outside) for key, answer in (keywords or {}).items()},
        }
        reply = self._watch.ask(request)
        answer = self._read_value(reply)
        changed = reply.get("changed")
        for index, coded in changed.items() if isinstance(changed, dict) else ():
            if str(index).isdigit() and int(index) < len(arguments):
                _change_argument(arguments[int(index)], decode_value(coded, self._stand_in))
        return answer

    def get(self, name: str) -> Any:
        """Return what the program calls `name`. Raises AttributeError."""
        return self.request("get", 0, name)

    def _read_value(self, reply: Any) -> Any:
        if not isinstance(reply, dict):
            raise ValueError("an answer that is no value")
        if "raised" in reply:
            raise self._read_error(reply["raised"])
        return decode_value(reply.get("value"), self._stand_in)

    def _read_error(self, raised: Any) -> BaseException:
        try:
            names, text, _ = raised
            return self._exception_of(names)(str(text))
        except (TypeError, ValueError, IndexError):
            return ValueError("an answer that is no error")

    def _exception_of(self, names: list[str]) -> type[BaseException]:
        """Return the builtin exception of this name, or a new class below the nearest builtin one."""
        for name in names:
            class_ = getattr(builtins, str(name), None)
            if isinstance(class_, type) and issubclass(class_, BaseException):
                break
        else:
            class_ = Exception
        if names[0] == class_.__name__:
            return class_
        return self._exceptions.setdefault(str(names[0]), type(str(names[0]), (class_,), {}))

    def _keep_outside(self, answer: Any) -> list[Any]:
        if isinstance(answer, StandIn) and object.__getattribute__(answer, "_program") is self:
            return ["object", object.__getattribute__(answer, "_number")]
        raise UnsupportedTestError(f"passes a {type(answer).__name__} to the program, which runs in another process")

    def _stand_in(self, coded: list[Any]) -> Any:
        if coded[0] != "object" or len(coded) != 4 or not isinstance(coded[1], int):
            raise ValueError("an answer that is no value")
        _, number, kind, name = coded
        if kind == "module" and number != 0:
            return importlib.import_module(name) if name in _STANDARD else StandIn(self, number)
        if kind == "exception" and isinstance(name, list):
            return self._exception_of(name)
        return StandIn(self, number)


class StandIn:
    """Stand-in of one object of the program."""

    def __init__(self, program: RemoteProgram, number: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return _request(self, "call", "", arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        return _request(self, "get", name)

    def __setattr__(self, name: str, answer: Any) -> None:
        _request(self, "set", name, (answer,))

    def __instancecheck__(self, answer: Any) -> bool:
        return isinstance(answer, StandIn) and _operate(self, "instance", answer) is True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StandIn) and _operate(self, "eq", other) is True

    def __hash__(self) -> int:
        return int(_operate(self, "hash"))


def _request(stand_in: StandIn, do: str, name: str, arguments: Any = (), keywords: Any = None) -> Any:
    program: RemoteProgram = object.__getattribute__(stand_in, "_program")
    return program.request(do, object.__getattribute__(stand_in, "_number"), name, arguments, keywords)


def _operate(stand_in: StandIn, name: str, *arguments: Any) -> Any:
    return _request(stand_in, "operate", name, arguments)


def _add_operations() -> None:
    """Give stand-ins the operations of containers, iterators and contexts, and those between two stand-ins."""
    names = {"iter": "iter", "next": "next", "getitem": "item", "setitem": "set_item", "delitem": "delete_item"}
    names |= {"enter": "enter", "exit": "exit", "abs": "abs", "neg": "neg"}
    for method, operation in names.items():

        def operate(stand_in: StandIn, *arguments: Any, _operation: str = operation) -> Any:
            kept = () if _operation == "exit" else arguments
            return _operate(stand_in, _operation, *kept)

        setattr(StandIn, f"__{method}__", operate)
    for name, class_ in {"len": int, "str": str, "repr": str, "bool": bool, "contains": bool}.items():

        def convert(stand_in: StandIn, *arguments: Any, _name: str = name, _class: Any = class_) -> Any:
            answer = _operate(stand_in, _name, *arguments)
            if type(answer) is not _class:
                raise TypeError(f"{_name} of the program's object is a {type(answer).__name__}")
            return answer

        setattr(StandIn, f"__{name}__", convert)
    for name in ("lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "or", "and"):

        def combine(stand_in: StandIn, other: Any, _name: str = name) -> Any:
            return _operate(stand_in, _name, other) if isinstance(other, StandIn) else NotImplemented

        setattr(StandIn, f"__{name}__", combine)


_add_operations()


def _change_argument(argument: Any, changed: Any) -> None:
    """Give a test's list, dict or set the contents that the program gave it."""
    if type(argument) is not type(changed):
        return
    if isinstance(argument, list | bytearray):
        argument[:] = changed
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(changed)


__all__ = ["EndedError", "RemoteProgram", "StandIn", "UnsupportedTestError"]
