"""Sessions: earlier turns that clients send back are matched by meaning, and retries get the same turn."""

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from rlctl.environments.agents import chat_completions
from rlctl.environments.agents.agent_session import LARGE
from tests.unit.environments.agents.served import ADD, END, TOOLED, Served, script, write_call
from tests.unit.environments.agents.test_chat_completions import USER, client_of, request_turn
from tests.waiting import until

Serve = Callable[..., Served]
SYSTEM = {"role": "system", "content": "Be short."}


def post(
    served: Served, body: Any, path: str = "/chat/completions", key: str | None = None, headers: Any = ()
) -> tuple[int, Any]:
    """Send a request without an SDK; return the status and the body of its answer."""
    parts = urlsplit(served.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
    all_headers = {"Authorization": f"Bearer {served.key if key is None else key}", **dict(headers)}
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", parts.path + path, raw, all_headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def make_reply(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


def make_call(arguments: Any, **fields: Any) -> dict[str, Any]:
    return {"id": "x", "type": "function", "function": {"name": "add", "arguments": arguments}, **fields}


@pytest.mark.parametrize(
    "sent_back",
    [
        make_reply(content="Hm.", tool_calls=[make_call('{"b":2,"a":1}', index=0)]),
        make_reply(content="  Hm. \n", tool_calls=[make_call('{"a": 1, "b": 2}')], annotations=[], refusal=None),
        make_reply(content=[{"type": "text", "text": "Hm."}], tool_calls=[make_call('{"a":1,"b":2}')], name="agent"),
        # smolagents has them as text.
        make_reply(content=f"Hm.Calling tools:\n{[make_call({'b': 2, 'a': 1})]}"),
    ],
)
def test_what_means_the_same_continues_the_turn(serve: Serve, sent_back: Any) -> None:
    served = serve(script(write_call(1, 2, "Hm. "), f"3{END}"))
    request_turn(served, [USER], tools=[ADD])
    request_turn(served, [USER, sent_back, {"role": "tool", "tool_call_id": "x", "content": "3"}], tools=[ADD])
    assert served.asks[1].after == 0 and not served.session.rewritten


def make_code_reply(code: str) -> Any:
    """Return a turn of a smolagents code agent, as the library sends it back: the code is there a second time."""
    code_call = {"id": "call_1", "type": "function", "function": {"name": "python_interpreter", "arguments": code}}
    return make_reply(content=f"<code>\n  a = 1\nprint(a)\n</code>Calling tools:\n{[code_call]}")


@pytest.mark.parametrize(("code", "after"), [("a = 1\nprint(a)", 0), ("a = 2\nprint(a)", None)])
def test_code_that_is_written_twice_means_the_same(serve: Serve, code: str, after: int | None) -> None:
    served = serve(script(f"<code>\n  a = 1\nprint(a)\n</code>{END}", f"3{END}"))
    request_turn(served, [USER], stop=["</code>"])
    request_turn(served, [USER, make_code_reply(code), USER], stop=["</code>"])
    assert served.asks[1].after == after


def test_a_stop_behind_a_turn_that_ended_without_it_means_nothing(serve: Serve) -> None:
    served = serve(script(f"a = 1{END}", f"3{END}"))
    request_turn(served, [USER], stop=["</code>"])
    request_turn(served, [USER, make_reply(content="a = 1</code>"), USER], stop=["</code>"])
    assert served.asks[1].after == 0


@pytest.mark.parametrize(
    "calls", ["[...]", "[{(1,): 2}]", "[{'function': {'name': 1, 'arguments': {(1,): 2}}}]", "[" * 300]
)
def test_text_that_looks_like_calls_stays_text(serve: Serve, calls: str) -> None:
    served = serve(script(f"Hm. Calling tools:\n{calls}{END}", f"3{END}"))
    request_turn(served, [USER])
    request_turn(served, [USER, make_reply(content=f"Hm. Calling tools:\n{calls}"), USER])
    assert served.asks[1].after == 0


@pytest.mark.parametrize(
    ("messages", "tools", "reason"),
    [
        (
            [USER, make_reply(content="Calling tools:\n[...]"), {"role": "user", "content": "Observation: 3"}],
            [ADD],
            "message 1 (assistant) is not the turn that was sampled there",
        ),
        (
            [{"role": "system", "content": "Be short."}, USER],
            [ADD],
            "message 0 (system) is in the place of one of role user",
        ),
        ([USER], [], "the tools or the arguments of the chat template are others"),
    ],
)
def test_what_means_something_else_begins_a_row_and_is_named(
    serve: Serve, messages: Any, tools: Any, reason: str
) -> None:
    served = serve(script(write_call(1, 2), f"3{END}"))
    request_turn(served, [USER], tools=[ADD])
    request_turn(served, messages, tools=tools or openai.NOT_GIVEN)
    assert served.asks[1].after is None and list(served.session.rewritten) == [reason]


def test_arguments_of_the_template_are_a_requests_own(serve: Serve) -> None:
    opening = "{% if not (enable_thinking | default(true)) %}<think></think>{% endif %}"
    served = serve(script(f"4{END}", f"5{END}", f"6{END}"), template=TOOLED + opening)
    no_thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    request_turn(served, [USER], extra_body=no_thinking)
    request_turn(served, [USER, make_reply(content="4"), USER], extra_body=no_thinking)
    # With other arguments the opening is another, so that the tokens so far do not fit.
    request_turn(served, [USER, make_reply(content="4"), USER], extra_body={"chat_template_kwargs": {"unknown": 1}})
    assert [text.endswith("<think></think>") for text in served.texts()] == [True, True, False]
    assert [ask.after for ask in served.asks] == [None, 0, None]
    assert served.session.counts["ignored/chat_template_kwargs"] == 1


def test_arguments_of_a_request_go_before_those_of_the_row(serve: Serve) -> None:
    style = "{{ style | default('none') }}"
    served = serve(script(f"4{END}", f"5{END}"), template=TOOLED + style)
    served.run_on_loop(lambda: served.session.use_row({"chat_template_kwargs": {"style": "of the row", "unknown": 1}}))
    request_turn(served, [USER])
    request_turn(served, [USER], extra_body={"chat_template_kwargs": {"style": "asked"}})
    assert [text.rpartition("\n")[2] for text in served.texts()] == ["of the row", "asked"]


def test_later_system_messages_are_the_users_where_the_template_takes_one(serve: Serve) -> None:
    """Claude Code sends one behind the first message, and others between turns."""
    take_one = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('one') }}{% endif %}"
    )
    served = serve(script(f"4{END}", f"5{END}"), template=f"{take_one}{{% endfor %}}{TOOLED}")
    messages = [SYSTEM, USER, SYSTEM]
    request_turn(served, messages)
    request_turn(served, [*messages, make_reply(content="4"), SYSTEM])
    assert served.asks[1].after == 0
    later = f"<|im_start|>user\nBe short.{END}\n"
    assert served.texts()[1].count(later) == 2 and "4" in served.texts()[1]


def test_messages_that_the_template_leaves_out_are_counted(serve: Serve) -> None:
    template = TOOLED.replace("for m in messages", "for m in messages if m.role != 'system'")
    served = serve(script(f"4{END}", f"5{END}", f"6{END}"), template=template)
    developer = {"role": "developer", "content": "Be short."}
    messages: list[Any] = [developer, USER]
    for count in (1, 2, 2):
        request_turn(served, messages)
        assert served.session.counts["unwritten"] == count
        next_messages = [developer, USER] if count == 1 else [USER]
        messages = [*messages, make_reply(content=str(len(served.asks) + 3)), *next_messages]
    assert [ask.after for ask in served.asks] == [None, 0, 1] and "Be short" not in served.texts()[-1]


def test_an_equal_request_is_another_turn_unless_it_is_a_retry(serve: Serve) -> None:
    served = serve(script(f"one{END}", f"two{END}"))
    body = {"model": "m", "messages": [USER]}
    first = post(served, body)
    retried = post(served, body, headers={"x-stainless-retry-count": "1"})
    other = post(served, body)
    assert first == retried and other[1]["choices"][0]["message"]["content"] == "two"
    served.settle()
    assert served.session.counts["coalesced"] == 1 and sorted(served.kept_lengths) == [0, 1]


def test_equal_requests_side_by_side_are_turns_of_their_own(serve: Serve) -> None:
    import asyncio

    served = serve(script(f"one{END}", f"two{END}", f"three{END}"))

    async def request_three() -> set[str]:
        async with openai.AsyncOpenAI(base_url=served.url, api_key=served.key) as client:
            requests = [client.chat.completions.create(model="m", messages=[USER]) for _ in range(3)]  # type: ignore[list-item]
            answers = await asyncio.gather(*requests)
            return {str(answer.choices[0].message.content) for answer in answers}

    assert asyncio.run(request_three()) == {"one", "two", "three"}


@contextmanager
def send_without_reading(served: Served, raw: bytes) -> Iterator[socket.socket]:
    """Send a request, and leave its connection open without reading."""
    parts = urlsplit(served.url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.key}\r\n"
        served.has_requests.clear()
        connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        assert served.has_requests.wait(10)
        yield connection


@pytest.mark.parametrize("is_counted", [True, False], ids=["openai's retry", "a client's own retry"])
def test_a_cut_connection_leaves_one_turn(serve: Serve, is_counted: bool) -> None:
    served = serve(script(None, f"another{END}"))
    raw = json.dumps({"model": "m", "messages": [USER]}).encode()
    with send_without_reading(served, raw):
        pass
    served.answer(0, f"first{END}")
    until(lambda: any(flight.has_lost for (flight,) in served.session._flights.values()))
    served.settle()
    assert served.kept_lengths == {}, "nobody got it"
    headers = {"x-stainless-retry-count": "1"} if is_counted else {}
    assert post(served, raw, headers=headers)[1]["choices"][0]["message"]["content"] == "first"
    served.settle()
    assert len(served.asks) == 1 and list(served.kept_lengths) == [0]


def test_a_retry_joins_a_large_request_that_is_being_read(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve(script(f"one{END}", f"two{END}"))
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x " * LARGE}]}).encode()
    is_reading = threading.Event()
    may_go_on = threading.Event()
    read_request = chat_completions.read_request

    def read_slowly(body: dict[str, Any]) -> Any:
        is_reading.set()
        assert may_go_on.wait(10)
        return read_request(body)

    monkeypatch.setattr(chat_completions, "read_request", read_slowly)
    answers = list[Any]()
    first = threading.Thread(target=lambda: answers.append(post(served, raw)))
    retry = threading.Thread(target=lambda: answers.append(post(served, raw, headers={"x-stainless-retry-count": "1"})))
    first.start()
    assert is_reading.wait(10)
    retry.start()
    until(lambda: served.session.counts["coalesced"] or served.session._thread_lock._waiters)
    may_go_on.set()
    for client in (first, retry):
        client.join(10)
    served.settle()
    assert len(served.asks) == 1 and answers[0] == answers[1]
    assert post(served, b"[" + raw)[0] == 400
    until(lambda: sum(map(len, served.session._flights.values())) == 1)


@pytest.mark.parametrize("lost_number", [0, 1])
@pytest.mark.parametrize("is_counted", [True, False], ids=["openai's retry", "a client's own retry"])
def test_the_retry_of_one_of_two_equal_requests_gets_its_own_turn(
    serve: Serve, lost_number: int, is_counted: bool
) -> None:
    served = serve(script(None, None, f"third{END}"))
    raw = json.dumps({"model": "m", "messages": [USER]}).encode()
    headers = {"x-stainless-retry-count": "1"} if is_counted else {}
    with send_without_reading(served, raw) as first, send_without_reading(served, raw) as second:
        connections = [first, second]
        connections[lost_number].close()
        until(lambda: any(flight.note_lost() for flight in next(iter(served.session._flights.values()))))
        for number in (0, 1):
            served.answer(number, f"{number}{END}")
        retried = post(served, raw, headers=headers)
        assert retried[1]["choices"][0]["message"]["content"] == str(lost_number)
        other_number = 1 - lost_number
        assert f'"content": "{other_number}"'.encode() in connections[other_number].recv(1 << 16)
    served.settle()
    assert sorted(served.kept_lengths) == [0, 1] and len(served.asks) == 2


def test_a_lost_turn_that_nobody_asks_for_again_is_no_part_of_the_rollout(serve: Serve) -> None:
    served = serve(script(None, f"yes{END}"))
    impatient_client = client_of(served).with_options(timeout=0.2, max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        impatient_client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
    served.answer(0, f"late{END}")
    request_turn(served, [{"role": "user", "content": "another"}])
    served.settle()
    assert list(served.kept_lengths) == [1]


def test_a_sealed_session_takes_nothing_more(serve: Serve) -> None:
    served = serve(script(None))
    served.run_on_loop(served.session.seal)
    with pytest.raises(openai.NotFoundError, match="has ended"):
        request_turn(served, [USER])
    assert served.asks == []


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/chat/completions", "wrong", 401),
        ("/chat/completions", "", 401),
        ("/completions", None, 404),
        ("/../../etc/passwd", None, 404),
    ],
)
def test_strangers_get_nothing(serve: Serve, path: str, key: str | None, status: int, capfd: Any) -> None:
    served = serve(script())
    for _ in range(2):
        assert post(served, {"messages": [USER]}, path, key)[0] == status
    assert served.asks == []
    assert capfd.readouterr().err.count("without its key") == (status == 401)


def test_another_sessions_key_opens_nothing(serve: Serve) -> None:
    served = serve(script())
    other = serve(script())
    assert post(served, {"messages": [USER]}, key=other.key)[0] == 401


def test_an_error_of_the_endpoints_own_is_told_once_and_not_tried_again(serve: Serve) -> None:
    served = serve(lambda number: None)

    def answer_without_tokens() -> None:
        assert served.has_requests.wait(10)
        served.run_on_loop(lambda: served.session.take_answer(0, ([1], [0.0])))  # type: ignore[arg-type]

    answering = threading.Thread(target=answer_without_tokens)
    answering.start()
    for _ in range(2):
        with pytest.raises(openai.BadRequestError, match="endpoint failed with AttributeError") as caught:
            request_turn(served, [USER])
        assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"
    answering.join()
    assert len(served.asks) == 1, "nothing is sampled for a session without a value"
    assert served.session.defect and "read_turn(" in served.session.defect.trace


def test_all_requests_that_begin_a_row_are_counted(serve: Serve) -> None:
    served = serve(lambda number: f"{number}{END}")
    for number in range(12):
        request_turn(served, [USER, *[make_reply(content="x"), USER] * number])
    assert served.session.counts["rewritten"] == 11 == sum(served.session.rewritten.values())


def test_a_stop_that_no_tokenizer_takes_is_refused(serve: Serve) -> None:
    served = serve(script())
    status, answer = post(served, {"messages": [USER], "stop": "\ud800"})
    assert status == 400 and "stop: the text has the lone surrogate" in answer["error"]["message"]
    assert served.session.defect is None


@pytest.mark.parametrize("bind", ["0.0.0.0", "::"])
def test_an_endpoint_for_other_machines_has_an_address_and_needs_the_key(serve: Serve, bind: str) -> None:
    if ":" in bind and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    served = serve(script(f"4{END}"), bind=bind)
    assert urlsplit(served.url).hostname not in ("0.0.0.0", "::")
    body = {"messages": [USER]}
    assert [post(served, body, key=key)[0] for key in ("", "wrong", served.key)] == [401, 401, 200]


def test_a_value_is_posted_once_the_agent_knows_it(serve: Serve) -> None:
    served = serve(script())
    assert post(served, {"reward": 0.5}, "/reward") == (200, {"taken": True}) and served.session.reward == 0.5
    assert post(served, {"speed": 1, "right": 0}, "/reward")[0] == 200
    assert served.session.reward == {"speed": 1, "right": 0}
    status, answer = post(served, {"reward": "good"}, "/reward")
    assert status == 400 and "finite number" in answer["error"]["message"]


@pytest.mark.parametrize("body", [b"no json", b"[1]", b'{"messages": 3}', b'{"messages": [' + b"[" * 9000])
def test_a_body_that_is_none_is_a_400(serve: Serve, body: bytes) -> None:
    served = serve(script())
    assert post(served, body)[0] == 400
