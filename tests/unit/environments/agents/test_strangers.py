"""Strangers, and clients that misbehave: each is refused in a bounded time, and told once. All sockets are real."""

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from rlctl.data.chat import Chat
from rlctl.environments.agents import chat_completions, connections, endpoint
from rlctl.environments.agents.commands import start_command
from rlctl.environments.agents.episode import AgentLaunch
from rlctl.environments.agents.news import AgentTask
from rlctl.environments.agents.session import AgentSession
from rlctl.environments.tool_formats import PARSERS
from rlctl.evaluation.environment_check import scripted_calls
from tests.unit.environments.agents.served import END, TOOLED, Served, script
from tests.unit.environments.agents.test_chat_completions import USER
from tests.unit.environments.agents.test_session import post
from tests.waiting import until

Serve = Callable[..., Served]


@contextmanager
def connected(served: Served) -> Iterator[socket.socket]:
    parts = urlsplit(served.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=300) as one:
        yield one


def head(served: Served, length: int | None = None, key: str | None = None) -> bytes:
    """The beginning of a request, up to its body."""
    lines = [
        f"POST {urlsplit(served.url).path}/chat/completions HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {served.key if key is None else key}",
        *([f"Content-Length: {length}"] if length is not None else ["Transfer-Encoding: chunked"]),
    ]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


def is_closed(one: socket.socket) -> bool:
    try:
        return one.recv(1 << 16) == b""
    except ConnectionError:
        return True


def answered(served: Served) -> bool:
    """True if a client that behaves gets its turn."""
    return post(served, {"messages": [USER]})[0] == 200


def test_headers_that_do_not_come_end_their_connection(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 0.2)
    monkeypatch.setattr(connections, "_MOMENT_S", 0.05)
    served = serve(script(f"4{END}"))
    with connected(served) as silent, connected(served) as slow:
        slow.sendall(b"POST /sessions HTTP/1.1\r\n")
        ended = threading.Event()

        def drip() -> None:
            try:
                while not ended.is_set():
                    slow.sendall(b"x: y\r\n")
                    time.sleep(0.01)
            except ConnectionError:
                ended.set()

        threading.Thread(target=drip, daemon=True).start()
        assert is_closed(silent) and ended.wait(20)
    # A client of a busy machine may take longer than those.
    monkeypatch.undo()
    assert answered(served)
    assert capfd.readouterr().err.count("without a session's key for 0.2 s") == 1


def test_a_session_may_be_slow_between_its_requests(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 0.4)
    monkeypatch.setattr(connections, "_MOMENT_S", 0.0)
    served = serve(script(f"4{END}", f"5{END}"))
    parts = urlsplit(served.url)
    one = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=300)
    for pause in (0.6, 0.0):
        raw = json.dumps({"messages": [USER]})
        one.request("POST", parts.path + "/chat/completions", raw, {"Authorization": f"Bearer {served.key}"})
        assert one.getresponse().read()
        socket_of = one.sock
        time.sleep(pause)
        assert one.sock is socket_of, "the connection was kept"


def test_a_slow_body_is_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(endpoint, "BODY_S", 0.1)
    served = serve(script(f"4{END}"))
    for _ in range(2):
        with connected(served) as one:
            one.sendall(head(served, 1000) + b'{"messages"')
            assert b"408" in one.recv(1 << 16)
    monkeypatch.undo()
    assert answered(served)
    assert capfd.readouterr().err.count("a body that took longer than 0.1 s") == 1


def test_a_body_of_a_gibibyte_is_refused_before_it_comes(serve: Serve, capfd: Any) -> None:
    served = serve(script(f"4{END}"))
    for _ in range(2):
        with connected(served) as one:
            one.sendall(head(served, 1 << 30) + b"{")
            assert b"413" in one.recv(1 << 16)
            assert is_closed(one), "nobody reads the rest"
    assert answered(served)
    assert capfd.readouterr().err.count("a body of more than 67,108,864 bytes") == 1


def test_a_body_without_a_length_is_read_up_to_the_bound(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_BODY", 1 << 20)
    monkeypatch.setattr(connections, "_LINGER_S", 0.05)
    served = serve(script(f"4{END}"))
    with connected(served) as one, pytest.raises(ConnectionError):
        one.sendall(head(served))
        for _ in range(1 << 20):
            one.sendall(b"10000\r\n" + b"x" * (1 << 16) + b"\r\n")
    assert answered(served)


def test_a_stranger_sends_a_gibibyte_in_vain(serve: Serve) -> None:
    served = serve(script(f"4{END}"))
    with connected(served) as one:
        one.sendall(head(served, 1 << 30, key="wrong") + b"{")
        assert b"401" in one.recv(1 << 16)
        assert is_closed(one)
    assert answered(served)


def test_too_many_connections_end_the_oldest_without_a_key(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(connections.Connections.__init__, "__defaults__", (8,))
    served = serve(script(f"4{END}", f"5{END}"))
    with ExitStack() as stack:
        mine = stack.enter_context(connected(served))
        raw = json.dumps({"messages": [USER]}).encode()
        mine.sendall(head(served, len(raw)) + raw)
        assert b"200 OK" in mine.recv(1 << 16)
        strangers = [stack.enter_context(connected(served)) for _ in range(20)]
        for one in strangers[:12]:
            assert is_closed(one)
        assert answered(served), "a new client gets in"
        mine.sendall(head(served, len(raw)) + raw)
        # The script has no third turn: the connection is served all the same.
        assert mine.recv(1 << 16)
    assert capfd.readouterr().err.count("more than 8 connections") == 1


def test_a_key_of_any_bytes_is_a_wrong_one(serve: Serve) -> None:
    served = serve(script(f"4{END}"))
    with connected(served) as one:
        one.sendall(head(served, 0).replace(served.key.encode(), b"\xff\xfe"))
        assert b"401" in one.recv(1 << 16)


def test_what_is_no_http_is_told_once(serve: Serve, capfd: Any) -> None:
    served = serve(script(f"4{END}"))
    for _ in range(3):
        with connected(served) as one:
            one.sendall(b"\x16\x03\x01 hello\r\n\r\n")
            assert b"400" in one.recv(1 << 16)
    assert answered(served)
    told = capfd.readouterr().err
    assert "Traceback" not in told and told.count("\n") <= 1


def test_causes_beyond_those_told_are_counted_by_powers_of_ten(capfd: Any) -> None:
    told = connections.Connections()
    for number in range(20 + 123):
        told.tell("1.2.3.4", f"/path-{number}")
        told.tell("1.2.3.4", "/path-0")
    lines = capfd.readouterr().err.splitlines()
    assert lines[:20] == [f"agents' endpoint: 1.2.3.4 asked for /path-{n}, and was refused" for n in range(20)]
    more = "agents' endpoint: refused {} more for other causes than the 20 above, the last 1.2.3.4 for /path-{}"
    assert lines[20:] == [more.format(n, 19 + n) for n in (1, 10, 100)]


def test_a_client_that_reads_nothing_loses_its_connection(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "ANSWER_S", 0.2)
    monkeypatch.setattr(chat_completions, "stream", lambda said: [b"more than two sockets hold" * (1 << 20)])
    served = serve(script(f"3{END}", f"4{END}"))
    raw = json.dumps({"messages": [USER], "stream": True}).encode()
    with connected(served) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.sendall(head(served, len(raw)) + raw)
        flights = served.session._flights
        until(lambda: any(flight.lost for (flight,) in flights.values()))
    monkeypatch.undo()
    assert answered(served)


def test_a_client_that_leaves_holds_nothing(serve: Serve) -> None:
    served = serve(script(None))
    raw = json.dumps({"messages": [USER]}).encode()
    with connected(served) as one:
        one.sendall(head(served, len(raw)) + raw)
        assert served.news.wait(20)
    ((flight,),) = served.session._flights.values()
    until(lambda: flight.lost)
    assert not flight.work.done(), "the turn goes on: it may be asked for again"
    assert served.call(lambda: served.endpoint._connections._number) == 0


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


@pytest.mark.parametrize("digits", ["9" * 5000, "9" * 400, "\u0664", "-1", "1e3", ""])
def test_a_number_of_a_client_may_be_any_text(serve: Serve, digits: str) -> None:
    served = serve(lambda number: f"4{END}")
    retried = post(served, {"messages": [USER]}, headers={"x-stainless-retry-count": digits.encode()})
    before = f"resp_{served.session.id}-{digits}"
    status, told = post(served, {"input": "hi", "previous_response_id": before}, "/responses")
    assert retried[0] == 200 and status == 404 and "is of no turn of this session" in told["error"]["message"]
    assert served.session.defect is None


def test_names_that_a_client_chooses_are_bounded(serve: Serve) -> None:
    served = serve(lambda number: f"4{END}")
    for number in range(100):
        post(served, {"messages": [USER], f"key_{number}": 1})
    counts = served.session.counts
    ignored = [count for name, count in counts.items() if name.startswith("ignored/")]
    assert len(ignored) <= 50 and sum(ignored) == 100


def test_a_message_that_no_reply_has_room_for_is_refused(serve: Serve) -> None:
    served = serve(script(f"4{END}"))
    status, told = post(served, {"messages": [{"role": "user", "content": "x" * (3 << 20)}]})
    assert status == 400 and "at most 2,097,152 are read" in told["error"]["message"]
    assert answered(served)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/chat/completions", {"messages": [USER] * 20_000}, "messages: there are 20,000, and at most 16,384 are read"),
        ("/responses", {"input": [USER] * 20_000}, "input: there are 20,000, and at most 16,384 are read"),
        ("/messages", {"messages": [USER], "tools": [{}] * 2000}, "tools: there are 2,000, and at most 1,024 are read"),
        ("/messages", {"messages": [USER], "system": [{}] * 2000}, "system: there are 2,000, and at most 1,024"),
        (
            "/chat/completions",
            {"messages": [USER], "stop": ["a"] * 100},
            "stop: there are 100, and at most 64 are read",
        ),
        (
            "/chat/completions",
            dict.fromkeys(map(str, range(300))),
            "the request has 300 keys, and at most 256 are read",
        ),
    ],
)
def test_a_request_of_too_many_parts_is_refused(serve: Serve, path: str, body: dict[str, Any], said: str) -> None:
    served = serve(script(f"4{END}"))
    status, told = post(served, body, path)
    assert status == 400 and said in told["error"]["message"]
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
    monkeypatch.setattr("rlctl.environments.agents.session.MAX_NEWS", 100)
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
        (ask,) = served.call(own.take_news)["asks"]
        assert ask["number"] == number
    assert not served.call(lambda: own.has_asked)
    served.call(own.seal)
    for each in threads:
        each.join(20)


def test_files_are_enough_for_many_agents(serve: Serve) -> None:
    import resource

    serve(script())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard and os.sysconf("SC_OPEN_MAX") == soft
