"""Agents tried without a model: their tools are called, and requests that do not continue a turn are told with why."""

import sys
from pathlib import Path

import pytest

from rlctl.environments.outcomes import LATE, UNREACHED, AgentSpec, EnvironmentSpec
from rlctl.evaluation.environment_check import check_environment

# An agent's requests without an SDK, whose import takes 1.2 s of CPU: test_sdks.py has SDKs.
CREATOR = """
def creator(base_url, api_key):
    def create(**request):
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        http_request = Request(f"{base_url}/chat/completions", json.dumps(request).encode(), headers)
        with urlopen(http_request) as answer:
            return json.load(answer, object_hook=lambda fields: SimpleNamespace(**fields))

    return create


"""
AGENT = """
import json, os
from types import SimpleNamespace
from urllib.request import Request, urlopen

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}


CREATOR
def run(task, base_url, api_key):
    create = creator(base_url, api_key)
    messages = [{"role": "user", "content": task.prompt}]
    message = create(model="m", messages=messages, tools=[TOOL], temperature=0.5).choices[0].message
    assert message.tool_calls[0].function.name == "add"
    messages += [{"role": "assistant", "content": "added"}, {"role": "user", "content": "Observation: 3"}]
    return float(create(model="m", messages=messages, tools=[TOOL]).choices[0].message.content == task.answer)


def broken(task, base_url, api_key):
    return task.rows


def lost(task, base_url, api_key):
    creator("http://127.0.0.1:9/v1", api_key)(model="m", messages=[{"role": "user", "content": "hi"}])


def keyless(task, base_url, api_key):
    creator(base_url, "mine")(model="m", messages=[{"role": "user", "content": "hi"}])


def slow(task, base_url, api_key):
    import time

    time.sleep(60)


def two(task, url):
    return 1.0


async def asynchronous_two(task, base_url):
    return 1.0


def three(task, model, key, limit):
    return 1.0

if __name__ == "__main__":
    task = SimpleNamespace(**json.loads(os.environ["RLCTL_TASK"]))
    print(json.dumps({"reward": run(task, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])}))
""".replace("CREATOR\n", CREATOR)
ROWS = [{"prompt": "1+2", "answer": "3"}]


@pytest.mark.parametrize("as_command", [False, True], ids=["function", "command"])
def test_an_agent_is_played_past_a_proxy_and_its_requests_are_judged(
    tmp_path: Path, as_command: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "example.org")
    file = tmp_path / "mine.py"
    file.write_text(AGENT)
    agent = AgentSpec((sys.executable, str(file))) if as_command else None
    report = check_environment(EnvironmentSpec(f"{file}:run", 20.0, is_function=None, agent=agent), ROWS, 1024, 0)
    assert report.problems == [] and report.contract and report.contract.is_agent
    for episode in report.episodes:
        assert episode.reward == 1.0 and [turn.said[:11] for turn in episode.turns] == ["<tool_call>", "added", "3"]
    assert "requests: temperature is not used: the run decides how the policy samples" in report.notes
    assert any("1 began another row: message 1 (assistant) is not the turn" in note for note in report.notes)


def test_a_broken_agent_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(AGENT)
    report = check_environment(EnvironmentSpec(f"{tmp_path}/mine.py:broken", 20.0, is_function=None), ROWS, 1024, 0)
    (problem,) = report.problems
    line = AGENT[: AGENT.index("task.rows")].count("\n") + 1
    assert "broken raised AttributeError at" in problem and f"mine.py:{line}:" in problem


@pytest.mark.parametrize(
    ("name", "seconds", "raised", "end"),
    [
        ("lost", 20.0, "raised URLError at", ""),
        ("keyless", 20.0, "raised HTTPError at", ""),
        ("slow", 1.0, "begin took longer than 1 s", LATE.removeprefix(UNREACHED)),
    ],
)
def test_an_agent_that_reaches_no_session_is_asked_for_its_address_and_key(
    tmp_path: Path, name: str, seconds: float, raised: str, end: str
) -> None:
    (tmp_path / "mine.py").write_text(AGENT)
    report = check_environment(EnvironmentSpec(f"{tmp_path}/mine.py:{name}", seconds, is_function=None), ROWS, 1024, 0)
    (problem,) = report.problems
    assert raised in problem
    hint = "no request reached its session: does it use the address and the key that it is given?"
    assert problem.partition(hint)[1:] == (hint, end)


@pytest.mark.parametrize("name", ["two", "asynchronous_two", "three"])
def test_a_wrong_signature_of_an_agent_is_told_the_right_one(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.py").write_text(AGENT)
    report = check_environment(EnvironmentSpec(f"{tmp_path}/mine.py:{name}", 20.0, is_function=None), ROWS, 1024, 0)
    (problem,) = report.problems
    assert problem.startswith(f"is called as {name}(task, base_url, api_key): ")


def test_a_models_episodes_get_no_note_of_the_scripts_rewards(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(AGENT)
    spec = EnvironmentSpec(f"{tmp_path}/mine.py:run", 20.0, is_function=None)
    notes = check_environment(spec, ROWS, 1024, 0).notes
    notes_before_model = check_environment(spec, ROWS, 1024, 0, model_follows=True).notes
    (note,) = [note for note in notes if note not in notes_before_model]
    assert note.startswith("every episode has the same reward, 1: equal rewards teach nothing; --model plays")


TWO_TOOLS = """
import json
from types import SimpleNamespace
from urllib.request import Request, urlopen

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"properties": {}}}} for name in ("end", "look")]


CREATOR
def run(task, base_url, api_key):
    create = creator(base_url, api_key)
    messages = [{"role": "user", "content": "go"}]
    while True:
        message = create(model="m", messages=messages, tools=TOOLS).choices[0].message
        call = message.tool_calls[0]
        if call.function.name == "end":
            return 1
        turn = {"role": "assistant", "tool_calls": [vars(call) | {"function": vars(call.function)}]}
        messages += [turn, {"role": "tool", "tool_call_id": call.id, "content": "seen"}]
""".replace("CREATOR\n", CREATOR)


def test_a_tool_that_ends_the_episode_hides_no_other_tool(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TWO_TOOLS)
    report = check_environment(EnvironmentSpec(f"{file}:run", 20.0, is_function=None), ROWS, 1024, 0)
    assert report.problems == []
    tools = [[turn.said.split('"')[3] for turn in episode.turns] for episode in report.episodes]
    assert tools == [["end"], ["look", "end"], ["end"]]
