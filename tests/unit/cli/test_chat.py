"""`rlctl chat` answers its own words itself; they reach no model. Its options reach the environment of the tools."""

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
    typed = iter(["/help", "  ", "/reset", "/quit", "never read"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    nobody: Any = None
    converse(nobody)
    said = capsys.readouterr().err.splitlines()
    assert said[0].split() == ["/new", "begins", "another", "conversation"]
    assert said[-1] == "no command /reset; /help shows them"
    assert next(typed) == "never read"


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
    nobody: Any = None
    with EnvironmentPool({"tools": EnvironmentSpec(f"{tmp_path}/my_env.py:Game", 5.0)}, 1024, 1) as pool:
        tools = TalkTools(pool, pool.contracts()["tools"], "hermes")
        engines: Any = SimpleNamespace(events=pool.events)
        limits = TalkLimits(8, 64, 0.0, 0)
        with pytest.raises(TalkError, match=r"reset failed: .*target.*; --row gives it columns"):
            ChatSession(nobody, engines, limits, tools, {}).begin()
        one = ChatSession(nobody, engines, limits, tools, {"target": 3})
        for _ in range(2):
            one.begin()
            assert one.opening == [{"role": "user", "content": "Bring it to 3."}]


def test_tools_and_row_reach_the_session(rlctl: Rlctl, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "my_env.py").write_text(GAME)
    seen: list[tuple[str | None, dict[str, Any]]] = []

    @contextmanager
    def begin(*arguments: Any) -> Iterator[None]:
        seen.append((arguments[3] and arguments[3].name, arguments[4]))
        yield

    def ended(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("rlctl.evaluation.chat_session.chat_session", begin)
    monkeypatch.setattr("builtins.input", ended)
    assert rlctl("chat", "model", "--tools", "my_env.py:Game", "--row", json.dumps({"target": 3})).code == 0
    assert rlctl("chat", "model", "--tools", "guess").code == 0
    assert rlctl("chat", "model").code == 0
    assert seen == [("my_env.py:Game", {"target": 3}), ("guess", {}), (None, {})]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--tools", "gues"],
            "--tools: must be calculator, guess, maze, sqlite or module:Class, not gues; did you mean guess?",
        ),
        (["--tools", "guess", "--row", "[3]"], "--row: must be a JSON object of columns, not [3]"),
        (["--row", "{}"], "--row: needs --tools, whose environment it begins"),
    ],
)
def test_what_is_mistyped_is_bad_input(rlctl: Rlctl, words: list[str], said: str) -> None:
    done = rlctl("chat", "model", *words)
    assert done.code == 2 and said in done.err and "Traceback" not in done.err
