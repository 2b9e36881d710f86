"""`rlctl chat` with a real engine: lines in, answers out, and the same answer after a restart."""

import subprocess
import sys

import pytest

from rlctl.config.builtin import RECIPES

SUMS = "12+30=\n7+8=\n/new\n12+30=\n"


@pytest.mark.long  # the lines: tests/unit/cli/test_chat.py
def test_lines_of_a_pipe_are_answered_and_new_forgets_what_was_said() -> None:
    command = [sys.executable, "-m", "rlctl.cli.main", "chat", str(RECIPES / "tiny/qwen3-tiny")]
    options = ["--temperature", "0", "--max-tokens", "4"]
    done = subprocess.run([*command, *options], input=SUMS, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    first, second, again = done.stdout.splitlines()
    assert first.startswith("model > ") and second.startswith("model > ")
    assert first == again
    assert done.stderr.splitlines() == [
        "qwen3-tiny, temperature 0; /new begins another conversation, Ctrl-D ends, /help shows more"
    ]


@pytest.mark.long  # its parts: tests/unit/environments/agents, tests/unit/cli/test_chat.py
def test_an_endpoint_serves_a_persons_client_until_ctrl_c() -> None:
    import re
    import signal

    import openai

    command = [sys.executable, "-m", "rlctl.cli.main", "chat", str(RECIPES / "tiny/qwen3-tiny"), "--endpoint"]
    served = subprocess.Popen([*command, "--max-tokens", "4"], stdout=subprocess.PIPE, text=True)
    try:
        assert served.stdout
        found = re.match(r"export OPENAI_BASE_URL=(\S+) OPENAI_API_KEY=(\S+)\n", served.stdout.readline())
        assert found
        client = openai.OpenAI(base_url=found[1], api_key=found[2])
        said = client.chat.completions.create(model="any", messages=[{"role": "user", "content": "12+30="}])
        assert said.choices[0].message.content and said.usage and said.usage.completion_tokens <= 4
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
    finally:
        served.send_signal(signal.SIGINT)
        assert served.wait(60) == 0
