"""Requests that are wrong, too large or cut off are refused, with one warning each. All sockets are real."""

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
def connect(served: Served) -> Iterator[socket.socket]:
    parts = urlsplit(served.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=300) as connection:
        yield connection


def write_head(served: Served, length: int | None = None) -> bytes:
    """Return the head of an HTTP request, without its body."""
    body_header = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    lines = [
        f"POST {urlsplit(served.url).path}/chat/completions HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {served.key}",
        body_header,
        "",
    ]
    return "".join(f"{line}\r\n" for line in lines).encode()


def serves_client(served: Served) -> bool:
    """Return True if a correct client still gets its turn."""
    return post(served, {"messages": [USER]})[0] == 200


def test_a_body_of_a_gibibyte_is_refused_before_it_comes(serve: Serve, capfd: Any) -> None:
    served = serve(script(f"4{END}"))
    for _ in range(2):
        with connect(served) as connection:
            connection.sendall(write_head(served, 1 << 30) + b"{")
            assert b"413" in connection.recv(1 << 16)
    assert serves_client(served)
    assert capfd.readouterr().err.count("a body of more than 67,108,864 bytes") == 1


def test_a_body_without_a_length_is_read_up_to_the_bound(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_BODY", 1 << 20)
    served = serve(script(f"4{END}"))
    with connect(served) as connection:
        connection.sendall(write_head(served))
        for _ in range(17):
            connection.sendall(b"10000\r\n" + b"x" * (1 << 16) + b"\r\n")
        assert b"413" in connection.recv(1 << 16)
    assert serves_client(served)


def test_what_is_no_http_is_told_once(serve: Serve, capfd: Any) -> None:
    served = serve(script(f"4{END}"))
    for _ in range(3):
        with connect(served) as connection:
            connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
            assert b"400" in connection.recv(1 << 16)
    assert serves_client(served)
    output = capfd.readouterr().err
    assert "Traceback" not in output and output.count("\n") <= 1


def test_a_client_that_leaves_holds_nothing(serve: Serve) -> None:
    served = serve(script(None))
    raw = json.dumps({"messages": [USER]}).encode()
    with connect(served) as connection:
        connection.sendall(write_head(served, len(raw)) + raw)
        assert served.has_requests.wait(20)
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


def request_turn(**headers):
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


statuses = [request_turn(), request_turn(Authorization="Bearer guess"), request_turn(**{"x-api-key": "guess"})]
print(json.dumps([statuses, read("environ"), read("mem"), read("cmdline")]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_of_the_machine_gets_no_turn_and_no_key(serve: Serve, capfd: Any) -> None:
    served = serve(script(f"4{END}"))
    has_ended = threading.Event()
    launch = AgentLaunch(
        task=AgentTask(id="r0", prompt="", messages=[], answer=None, row={}),
        base_url=served.url,
        api_key=served.key,
        generator=random.Random(0),
        on_end=lambda _: has_ended.set(),
        loop=served.endpoint.loop,
    )
    stop = start_command(["sleep", "60"], launch)

    def find_sleepers() -> list[psutil.Process]:
        return [process for process in psutil.Process().children(recursive=True) if process.name() == "sleep"]

    until(find_sleepers)
    (agent,) = find_sleepers()
    until(lambda: served.key in agent.environ().values())
    command = [sys.executable, "-c", OTHER_USER, str(NOBODY), served.url, str(agent.pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    served.run_on_loop(stop)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[401] * 3, None, None, "sleep\x0060\x00"]
    assert served.asks == [] and serves_client(served) and has_ended.wait(20)
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

    def draw_value(depth: int) -> Any:
        kind = draw.random()
        if depth == 0 or kind < 0.4:
            return draw.choice(VALUES)
        if kind < 0.6:
            return [draw_value(depth - 1) for _ in range(draw.randint(1, 3))]
        return {draw.choice(KEYS): draw_value(depth - 1) for _ in range(draw.randint(1, 4))}

    def draw_message() -> dict[str, Any]:
        role = draw.choice(["user", "assistant", "tool", "system", "x"])
        message = {"role": role, "content": draw_value(2)}
        if draw.random() < 0.5:
            message[draw.choice(KEYS)] = draw_value(3)
        return message

    parts = urlsplit(served.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=300)
    statuses = set()
    for _ in range(300):
        body = {draw.choice(KEYS): draw_value(3) for _ in range(draw.randint(0, 4))}
        body["messages" if path != "/responses" else "input"] = [draw_message(), {"role": "user", "content": "hi"}]
        if draw.random() < 0.3:
            body[draw.choice(KEYS)] = draw_value(2)
        body.pop("stream", None)
        served.session.counts["refused"] = 0
        connection.request("POST", parts.path + path, json.dumps(body), {"Authorization": f"Bearer {served.key}"})
        answer = connection.getresponse()
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
    """In JSON Schema `"a": true` allows any value. MCP servers written in Rust use this form."""
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
        status, answer = post(served, {"messages": [USER], "tools": [tool]})
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert status == 200 and json.loads(call["function"]["arguments"]) == {"a": "text"}, schema
        (scripted_call,) = scripted_calls([tool], {}, index=1)
        assert json.dumps(scripted_call.arguments)
    assert served.session.defect is None


def test_a_message_that_no_reply_has_room_for_is_refused(serve: Serve) -> None:
    served = serve(script(f"4{END}"))
    status, answer = post(served, {"messages": [{"role": "user", "content": "x" * (3 << 20)}]})
    assert status == 400 and "at most 2,097,152 are read" in answer["error"]["message"]
    assert serves_client(served)


def test_a_large_request_holds_up_no_other(tokenizer: Any) -> None:
    has_begun = threading.Event()
    may_go_on = threading.Event()

    class SlowChat(Chat):
        def prompt(self, messages: Any, tools: Any = (), *arguments: Any) -> Any:
            if len(messages[0]["content"]) > 1 << 14:
                has_begun.set()
                assert may_go_on.wait(20)
            return super().prompt(messages, tools, *arguments)

    served = Served(SlowChat(tokenizer, TOOLED, None), lambda number: f"4{END}")
    other = Served(served.chat, served.text_of_turn, shared=served.endpoint)
    large = {"messages": [{"role": "user", "content": "x" * (1 << 15)}]}
    statuses = list[int]()
    client = threading.Thread(target=lambda: statuses.append(post(served, large)[0]))
    client.start()
    assert has_begun.wait(20)
    assert serves_client(served) and post(other, {"messages": [USER]})[0] == 200 and not statuses
    assert post(served, {"messages": [USER]})[0] == 200, "a small one of the same session goes on too"
    may_go_on.set()
    client.join(20)
    assert statuses == [200]


def test_many_requests_at_once_reach_the_driver_in_parts(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlctl.environments.agents.agent_session.MAX_ASK_BYTES", 100)
    served = serve(script())
    # The driver takes no requests while they come.
    session = AgentSession(served.chat, None, lambda: None)
    served.session = session
    served.run_on_loop(lambda: served.endpoint.open(session))
    bodies = [{"messages": [{"role": "user", "content": f"{number} is a number"}]} for number in range(4)]
    clients = [threading.Thread(target=post, args=(served, body)) for body in bodies]
    for client in clients:
        client.start()
    until(lambda: len(session._flights) == 4)
    for number in range(4):
        (ask,) = served.run_on_loop(session.take_requests).asks
        assert ask.number == number
    assert not served.run_on_loop(lambda: session.has_asked)
    served.run_on_loop(session.seal)
    for client in clients:
        client.join(20)


def test_files_are_enough_for_many_agents(serve: Serve) -> None:
    import resource

    serve(script())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard and os.sysconf("SC_OPEN_MAX") == soft
