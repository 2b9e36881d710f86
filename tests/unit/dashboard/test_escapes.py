"""Text from models, users and files cannot send escape sequences to the terminal, wherever rlctl shows it."""

import io
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlctl.cli.main import answer, app
from rlctl.dashboard.console import SafeConsole
from rlctl.dashboard.view import LineView
from rlctl.run.run_dir import RunDir
from rlctl.utils.safe_text import neutral

# Sets the title, clears the screen, goes up a line (C1), fills the clipboard, turns the rest of the line around.
HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b1A\x1b]52;c;cm0=\x07\u202e\r"
COMMANDS = "\x1b\x07\x9b\u202e\r"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Return a run whose name, model, messages, prompts and logs are hostile."""
    run = RunDir(tmp_path / f"run{HOSTILE.replace('/', '')}")
    logs = run.path / "logs" / "attempt_1"
    logs.mkdir(parents=True)
    (run.path / "logs" / "latest").symlink_to("attempt_1")
    (logs / f"engine{HOSTILE}.log").write_text(f"reward said {HOSTILE}\n")
    events = [
        {"kind": "run_started", "algorithm": HOSTILE, "model": HOSTILE, "num_steps": 2, "name": HOSTILE},
        {"kind": "startup", "what": HOSTILE},
        {"kind": "startup", "what": HOSTILE, "seconds": 1.0},
        {"kind": HOSTILE, HOSTILE: HOSTILE},
        {"kind": "warning", "what": f"prompt {HOSTILE}"},
        {"kind": "checkpoint", "step": 1, "path": HOSTILE},
        {"kind": "phase", "step": 1, "name": HOSTILE},
        {"kind": "run_ended", "status": "failed", "reason": HOSTILE, "next": [f"rlctl {HOSTILE}"]},
    ]
    metrics = [{"kind": "step", "step": 1, "time/step": 1.0, f"reward/{HOSTILE}": 1.0}]
    run.events.write_text("".join(json.dumps({"time": 1.0, **event}) + "\n" for event in events))
    run.metrics.write_text("".join(json.dumps({"time": 1.0, **record}) + "\n" for record in metrics))
    run.config.write_text("{}")
    return run


@pytest.mark.parametrize("command", ["list", "show", "dash", "stop"])
def test_no_view_of_a_run_passes_on_what_a_terminal_obeys(run: RunDir, command: str) -> None:
    root = str(run.path.parent)
    words = ["runs", command, "--dir", root]
    if command != "list":
        words.append(run.path.name)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    text = result.output + result.stderr
    assert "run" in text
    assert [sign for sign in COMMANDS if sign in text] == []


def test_neither_do_logs(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    CliRunner().invoke(app, ["runs", "logs", run.path.name, "--dir", str(run.path.parent)])
    text = capfd.readouterr().out
    assert "reward said" in text
    assert [sign for sign in COMMANDS if sign in text] == []


def test_neither_do_plain_lines(run: RunDir) -> None:
    out = io.StringIO()
    with LineView(run, every=1, since=0.0, out=out):
        pass
    assert "prompt" in out.getvalue()
    assert [sign for sign in COMMANDS if sign in out.getvalue()] == []


def test_neither_do_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["runs", "show", HOSTILE], ["config", "check", HOSTILE], ["config", "check", f"a{HOSTILE}=1"]):
        monkeypatch.setattr(sys, "argv", ["rlctl", *command])
        with pytest.raises(SystemExit, match="2"):
            answer()
        text = "".join(capsys.readouterr())
        assert "error: " in text
        assert [sign for sign in COMMANDS if sign in text] == []


def test_a_terminal_gets_riches_own_escapes_alone() -> None:
    out = io.StringIO()
    SafeConsole(file=out, force_terminal=True, color_system="standard", highlight=False).print(
        f"[bold]{HOSTILE}[/bold] end"
    )
    assert out.getvalue() == "\x1b[1m" + neutral(HOSTILE).replace("␇", "").replace("␍", "") + "\x1b[0m end\n"


def test_other_text_stays_as_it_is() -> None:
    assert neutral("a\tb\nc é 数 🙂 \u200d") == "a\tb\nc é 数 🙂 \u200d"
    assert neutral("\x1b[0m \x7f \x9b \ud83d") == "␛[0m ␡ \ufffd \ufffd"
