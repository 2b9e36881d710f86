"""`rlctl chat` handles its commands itself, without the model. Its options are passed on to the tools' environment."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.cli.chat import client_lines, converse
from rlctl.environments.environment_pool import EnvironmentPool
from rlctl.environments.outcomes import EnvironmentSpec
from rlctl.evaluation.chat_session import ChatSession
from rlctl.rollout.players.chat import TalkError, TalkLimits, TalkTools
from tests.unit.cli.conftest import Rlctl


def test_help_and_mistyped_words_are_answered_and_an_end_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed_lines = iter(["/help", "  ", "/reset", "/quit", "never read"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed_lines))
    no_session: Any = None
    converse(no_session)
    answers = capsys.readouterr().err.splitlines()
    assert answers[0].split() == ["/new", "begins", "another", "conversation"]
    assert answers[-1] == "no command /reset; /help shows them"
    assert next(typed_lines) == "never read"


GAME = """
class Game:
    def reset(self, target: int, **row) -> str:
        return f"Bring it to {target}."

    def add(self, n: int) -> int:
        '''Add.

        Args:
            n: The number.
        '''
        return n
"""


def test_a_client_in_another_shell_is_led_past_its_proxy() -> None:
    plain = client_lines("http://127.0.0.1:80/sessions/a/v1", "key", {"no_proxy": "a.org"})
    assert plain == [
        "export OPENAI_BASE_URL=http://127.0.0.1:80/sessions/a/v1 OPENAI_API_KEY=key",
        "export ANTHROPIC_BASE_URL=http://127.0.0.1:80/sessions/a ANTHROPIC_API_KEY=key",
    ]
    variables = {"http_proxy": "http://proxy:1", "no_proxy": "*.org"}
    hosts = "'*.org,127.0.0.1,localhost,::1'"
    proxied = client_lines("http://127.0.0.1:80/sessions/a/v1", "key", variables)
    assert proxied == [f"{line} no_proxy={hosts} NO_PROXY={hosts}" for line in plain]


def test_the_environment_of_the_tools_begins_each_conversation_with_the_row(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(GAME)
    no_chat: Any = None
    spec = EnvironmentSpec(f"{tmp_path}/my_env.py:Game", timeout_s=5.0)
    with EnvironmentPool({"tools": spec}, memory_mib=1024, processes=1) as pool:
        tools = TalkTools(pool, pool.contracts()["tools"], "hermes")
        engines: Any = SimpleNamespace(events=pool.events)
        limits = TalkLimits(max_new_tokens=8, max_length=64, temperature=0.0, seed=0)
        without_row = ChatSession(chat=no_chat, engines=engines, limits=limits, tools=tools, row={})
        with pytest.raises(TalkError, match=r"reset failed: .*target.*; --row gives it columns"):
            without_row.begin()
        session = ChatSession(chat=no_chat, engines=engines, limits=limits, tools=tools, row={"target": 3})
        for _ in range(2):
            session.begin()
            assert session.opening == [{"role": "user", "content": "Bring it to 3."}]


def test_tools_and_row_reach_the_session(rlctl: Rlctl, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "my_env.py").write_text(GAME)
    begun_sessions: list[tuple[str | None, dict[str, Any]]] = []

    @contextmanager
    def begin_session(
        target: Any, config: Any, sampling: Any, environment: EnvironmentSpec | None, row: dict[str, Any], *_: Any
    ) -> Iterator[None]:
        begun_sessions.append((environment.name if environment else None, row))
        yield

    def end_input(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("rlctl.evaluation.chat_session.chat_session", begin_session)
    monkeypatch.setattr("builtins.input", end_input)
    assert rlctl("chat", "model", "--tools", "my_env.py:Game", "--row", json.dumps({"target": 3})).code == 0
    assert rlctl("chat", "model", "--tools", "guess").code == 0
    assert rlctl("chat", "model").code == 0
    assert begun_sessions == [("my_env.py:Game", {"target": 3}), ("guess", {}), (None, {})]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--tools", "gues"],
            "--tools: must be calculator, guess, maze, sqlite, harbor, openenv, python, shell, python_shell or "
            "module:Class, not gues; did you mean guess?",
        ),
        (["--tools", "guess", "--row", "[3]"], "--row: must be a JSON object of columns, not [3]"),
        (["--row", "{}"], "--row: needs --tools, whose environment it begins"),
    ],
)
def test_what_is_mistyped_is_bad_input(rlctl: Rlctl, words: list[str], message: str) -> None:
    done = rlctl("chat", "model", *words)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err
