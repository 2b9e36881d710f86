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
    first, second, first_again = done.stdout.splitlines()
    assert first.startswith("model > ") and second.startswith("model > ")
    assert first == first_again
    assert done.stderr.splitlines() == [
        "qwen3-tiny, temperature 0; /new begins another conversation, Ctrl-D ends, /help shows more"
    ]


@pytest.mark.long  # its parts: tests/unit/environments/agents, tests/unit/cli/test_chat.py
def test_an_endpoint_serves_a_persons_client_until_ctrl_c() -> None:
    import re
    import signal

    import openai

    command = [sys.executable, "-m", "rlctl.cli.main", "chat", str(RECIPES / "tiny/qwen3-tiny"), "--endpoint"]
    endpoint = subprocess.Popen([*command, "--max-tokens", "4"], stdout=subprocess.PIPE, text=True)
    try:
        assert endpoint.stdout
        exports = re.match(r"export OPENAI_BASE_URL=(\S+) OPENAI_API_KEY=(\S+)\n", endpoint.stdout.readline())
        assert exports
        client = openai.OpenAI(base_url=exports[1], api_key=exports[2])
        answer = client.chat.completions.create(model="any", messages=[{"role": "user", "content": "12+30="}])
        assert answer.choices[0].message.content and answer.usage and answer.usage.completion_tokens <= 4
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
    finally:
        endpoint.send_signal(signal.SIGINT)
        assert endpoint.wait(60) == 0
