"""Requests that are wrong, too large or cut off: each is refused, and told once. All sockets are real."""

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from rlctl.data.chat import Chat
from rlctl.environments.agents import endpoint
from rlctl.environments.agents.agent_command import start_command
from rlctl.environments.agents.agent_episode import AgentLaunch, AgentTask
from rlctl.environments.agents.agent_session import AgentSession
from rlctl.environments.tool_formats import PARSERS
from rlctl.evaluation.environment_check import scripted_calls
from tests.unit.environments.agents.served import END, TOOLED, Served, script
from tests.unit.environments.agents.test_agent_session import post
from tests.unit.environments.agents.test_chat_completions import USER
from tests.waiting import until

Serve = Callable[..., Served]


@contextmanager
def connected(served: Served) -> Iterator[socket.socket]:
    parts = urlsplit(served.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=300) as one:
        yield one


def head(served: Served, length: int | None = None) -> bytes:
    """The beginning of a request, up to its body."""
    lines = [
        f"POST {urlsplit(served.url).path}/chat/completions HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {served.key}",
        *([f"Content-Length: {length}"] if length is not None else ["Transfer-Encoding: chunked"]),
    ]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


def answered(served: Served) -> bool:
    """True if a client that behaves gets its turn."""
    return post(served, {"messages": [USER]})[0] == 200


def test_a_body_of_a_gibibyte_is_refused_before_it_comes(serve: Serve, capfd: Any) -> None:
    served = serve(script(f"4{END}"))
    for _ in range(2):
        with connected(served) as one:
            one.sendall(head(served, 1 << 30) + b"{")
            assert b"413" in one.recv(1 << 16)
    assert answered(served)
    assert capfd.readouterr().err.count("a body of more than 67,108,864 bytes") == 1


def test_a_body_without_a_length_is_read_up_to_the_bound(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_BODY", 1 << 20)
    served = serve(script(f"4{END}"))
    with connected(served) as one:
        one.sendall(head(served))
        for _ in range(17):
            one.sendall(b"10000\r\n" + b"x" * (1 << 16) + b"\r\n")
        assert b"413" in one.recv(1 << 16)
    assert answered(served)


def test_what_is_no_http_is_told_once(serve: Serve, capfd: Any) -> None:
    served = serve(script(f"4{END}"))
    for _ in range(3):
        with connected(served) as one:
            one.sendall(b"\x16\x03\x01 hello\r\n\r\n")
            assert b"400" in one.recv(1 << 16)
    assert answered(served)
    told = capfd.readouterr().err
    assert "Traceback" not in told and told.count("\n") <= 1


def test_a_client_that_leaves_holds_nothing(serve: Serve) -> None:
    served = serve(script(None))
    raw = json.dumps({"messages": [USER]}).encode()
    with connected(served) as one:
        one.sendall(head(served, len(raw)) + raw)
        assert served.news.wait(20)
    ((flight,),) = served.session._flights.values()
    until(lambda: flight.has_lost)
    assert not flight.work.done(), "the turn goes on: it may be asked for again"


NOBODY = 65534
# Another user of this machine, who has a session's address and its agent's process id, and looks for the key.
OTHER_USER = """
import encodings.idna, json, os, sys, urllib.error, urllib.request

os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))


def asked(**headers):
    request = urllib.request.Request(sys.argv[2] + "/chat/completions", b'{"messages": []}', headers)
    try:
        return urllib.request.urlopen(request, timeout=300).status
    except urllib.error.HTTPError as error:
        return error.code


def read(name):
    try:
        return open(f"/proc/{sys.argv[3]}/{name}").read()
    except PermissionError:
        return None


statuses = [asked(), asked(Authorization="Bearer guess"), asked(**{"x-api-key": "guess"})]
print(json.dumps([statuses, read("environ"), read("mem"), read("cmdline")]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_of_the_machine_gets_no_turn_and_no_key(serve: Serve, capfd: Any) -> None:
    served = serve(script(f"4{END}"))
    task, ended = AgentTask("r0", "", [], None, {}), threading.Event()
    own = (random.Random(0), lambda _: ended.set(), served.endpoint.loop)
    stop = start_command(["sleep", "60"], AgentLaunch(task, served.url, served.key, *own))

    def sleepers() -> list[psutil.Process]:
        return [process for process in psutil.Process().children(recursive=True) if process.name() == "sleep"]

    until(sleepers)
    (agent,) = sleepers()
    until(lambda: served.key in agent.environ().values())
    command = [sys.executable, "-c", OTHER_USER, str(NOBODY), served.url, str(agent.pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    served.call(stop)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[401] * 3, None, None, "sleep\x0060\x00"]
    assert served.asks == [] and answered(served) and ended.wait(20)
    assert capfd.readouterr().err.count("a session without its key") == 1


VALUES: list[Any] = [None, True, 3, -1, 1.5, "", "text", [], {}, [None], [[]], [{}], {"type": "x"}, ["text"]]
KEYS = [
    *("messages", "tools", "tool_choice", "stop", "n", "modalities", "response_format", "stream_options", "stream"),
    *("max_tokens", "input", "instructions", "text", "previous_response_id", "system", "stop_sequences", "model"),
    *("role", "content", "tool_calls", "function", "name", "arguments", "parameters", "properties", "id", "type"),
    *("logprobs", "input_schema", "tool_use_id", "call_id", "output", "thinking", "format"),
]


@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses", "/messages/count_tokens", "/reward"])
def test_no_body_is_an_error_of_the_server(serve: Serve, path: str, capfd: Any) -> None:
    served = serve(lambda number: f"4{END}")
    draw = random.Random(path)

    def value(depth: int) -> Any:
        kind = draw.random()
        if depth == 0 or kind < 0.4:
            return draw.choice(VALUES)
        if kind < 0.6:
            return [value(depth - 1) for _ in range(draw.randint(1, 3))]
        return {draw.choice(KEYS): value(depth - 1) for _ in range(draw.randint(1, 4))}

    def message() -> dict[str, Any]:
        role = draw.choice(["user", "assistant", "tool", "system", "x"])
        return {"role": role, "content": value(2), **({draw.choice(KEYS): value(3)} if draw.random() < 0.5 else {})}

    parts = urlsplit(served.url)
    one = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=300)
    statuses = set()
    for _ in range(300):
        body = {draw.choice(KEYS): value(3) for _ in range(draw.randint(0, 4))}
        body["messages" if path != "/responses" else "input"] = [message(), {"role": "user", "content": "hi"}]
        if draw.random() < 0.3:
            body[draw.choice(KEYS)] = value(2)
        body.pop("stream", None)
        served.session.counts["refused"] = 0
        one.request("POST", parts.path + path, json.dumps(body), {"Authorization": f"Bearer {served.key}"})
        answer = one.getresponse()
        answer.read()
        statuses.add(answer.status)
    assert statuses <= {200, 400, 404} and served.session.defect is None
    assert "Traceback" not in capfd.readouterr().err


ODD_SCHEMAS: list[Any] = [
    *(True, False, None, 1, "x", [], {}, {"type": 5}, {"type": ["integer", None]}, {"enum": True}, {"enum": []}),
    *({"anyOf": {}}, {"anyOf": [True]}, {"properties": 3}, {"items": False}, {"$ref": "#/$defs/x"}, {"type": "date"}),
    *({"items": True}, {"prefixItems": 1}, {"type": []}, {"type": "object", "properties": {"b": True}}),
]


@pytest.mark.parametrize("tool_format", sorted(PARSERS))
def test_a_property_may_be_any_json(serve: Serve, tool_format: str) -> None:
    """Servers of tools in Rust write `"a": true`, which is a schema."""
    arguments = '{"name": "add", "arguments": {"a": "text"}}'
    turns = {
        "hermes": f"<tool_call>{arguments}</tool_call>",
        "llama3": arguments,
        "mistral": '[TOOL_CALLS]add[ARGS]{"a": "text"}',
        "qwen3_coder": "<tool_call><function=add><parameter=a>text</parameter></function></tool_call>",
    }
    served = serve(lambda number: f"{turns[tool_format]}{END}", tool_format=tool_format)
    for schema in ODD_SCHEMAS:
        tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": schema}}}}
        status, told = post(served, {"messages": [USER], "tools": [tool]})
        (call,) = told["choices"][0]["message"]["tool_calls"]
        assert status == 200 and json.loads(call["function"]["arguments"]) == {"a": "text"}, schema
        (scripted,) = scripted_calls([tool], {}, index=1)
        assert json.dumps(scripted.arguments)
    assert served.session.defect is None


def test_a_message_that_no_reply_has_room_for_is_refused(serve: Serve) -> None:
    served = serve(script(f"4{END}"))
    status, told = post(served, {"messages": [{"role": "user", "content": "x" * (3 << 20)}]})
    assert status == 400 and "at most 2,097,152 are read" in told["error"]["message"]
    assert answered(served)


def test_a_large_request_holds_up_no_other(tokenizer: Any) -> None:
    begun = threading.Event()
    released = threading.Event()

    class HeldChat(Chat):
        def prompt(self, messages: Any, tools: Any = (), *more: Any) -> Any:
            if len(messages[0]["content"]) > 1 << 14:
                begun.set()
                assert released.wait(20)
            return super().prompt(messages, tools, *more)

    served = Served(HeldChat(tokenizer, TOOLED, None), lambda number: f"4{END}")
    other = Served(served.chat, served.says, shared=served.endpoint)
    large = {"messages": [{"role": "user", "content": "x" * (1 << 15)}]}
    statuses = list[int]()
    client = threading.Thread(target=lambda: statuses.append(post(served, large)[0]))
    client.start()
    assert begun.wait(20)
    assert answered(served) and post(other, {"messages": [USER]})[0] == 200 and not statuses
    assert post(served, {"messages": [USER]})[0] == 200, "a small one of the same session goes on too"
    released.set()
    client.join(20)
    assert statuses == [200]


def test_many_requests_at_once_reach_the_driver_in_parts(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlctl.environments.agents.agent_session.MAX_ASK_BYTES", 100)
    served = serve(script())
    # Nobody looks while they come.
    own = served.session = AgentSession(served.chat, None, lambda: None)
    served.call(lambda: served.endpoint.open(own))
    asked = [{"messages": [{"role": "user", "content": f"{number} is a number"}]} for number in range(4)]
    threads = [threading.Thread(target=post, args=(served, each)) for each in asked]
    for each in threads:
        each.start()
    until(lambda: len(own._flights) == 4)
    for number in range(4):
        (ask,) = served.call(own.take_requests).asks
        assert ask.number == number
    assert not served.call(lambda: own.has_asked)
    served.call(own.seal)
    for each in threads:
        each.join(20)


def test_files_are_enough_for_many_agents(serve: Serve) -> None:
    import resource

    serve(script())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard and os.sysconf("SC_OPEN_MAX") == soft
