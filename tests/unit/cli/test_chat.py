"""`rlctl chat` answers its own words itself; they reach no model."""

from typing import Any

import pytest

from rlctl.cli.chat import converse


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
