"""Episodes of a pool: their threads, their values and errors, their output, and environments that cannot be used."""

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlctl.environments.environment_pool import EnvironmentPool, UnusableEnvironmentError
from rlctl.environments.outcomes import EnvironmentFailure, EnvironmentSpec, ToolResult
from rlctl.environments.tool_formats import MalformedCall, ToolCall
from rlctl.telemetry.events import EventLog
from rlctl.telemetry.jsonl import read_records
from rlctl.workers.user_logs import MAX_LOG_BYTES
from tests.unit.environments.pools import SELECTED, begin_episodes, call_select, failure_of, open_pool, run_code

pytestmark = pytest.mark.usefixtures("own_file")


def test_an_episode_has_one_thread_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    with open_pool() as pool:
        begin_episodes(pool, "a", closed=str(tmp_path / "closed"))
        assert [call_select(pool, "a"), call_select(pool, "a")] == [SELECTED, SELECTED]
        assert pool.step("a", "hello").result() == "HELLO" and pool.step("a", "end").result() is None
        assert pool.reward("a").result() == 1.0
        assert pool.close("a").result() is None and (tmp_path / "closed").exists()
        assert failure_of(pool.reward("a").result()).kind == "contract"
        assert pool.close("a").result() is None


def test_a_slow_tool_holds_up_nobody_else() -> None:
    with open_pool() as pool:
        begin_episodes(pool, *range(8))
        # Each call waits for all others: one after another they would never end.
        slow_calls = [pool.call(number, [ToolCall("meet", {"number": number, "total": 9})]) for number in range(7)]
        coroutines = [ToolCall("meet_later", {"number": number, "total": 9}) for number in (7, 8)]
        slow_calls.append(pool.call(7, coroutines))
        begin_episodes(pool, "quick")
        assert call_select(pool, "quick") == SELECTED
        assert not any(call.done() for call in slow_calls)
        Path("go").touch()
        assert all(isinstance(call.result(), list) for call in slow_calls)


def test_a_coroutine_draws_from_its_own_episodes_generator() -> None:
    with open_pool() as pool:
        begin_episodes(pool, "a", "b")
        call_of_a = pool.call("a", [ToolCall("wait", {"seconds": 0.05})])
        call_of_b = pool.call("b", [ToolCall("wait", {"seconds": 0.05})])
        assert call_of_a.result() == call_of_b.result() and call_select(pool, "a") == SELECTED


def test_what_a_reset_raises_has_its_place_and_its_traceback(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl")
    with open_pool(logs=tmp_path, emit=events.emit) as pool:
        failure = failure_of(pool.reset("a", {"raises": True}, seed=1).result())
        begin_episodes(pool, "b")
    assert str(failure) == "reset raised KeyError at own.py:21: 'no such board'"
    assert failure.kind == "raised" and "KeyError" in (tmp_path / "environment-errors.log").read_text()
    (event,) = read_records(tmp_path / "events.jsonl")
    assert event["what"].startswith(
        "environment own: reset raised KeyError at own.py:21: 'no such board'; its episodes are played again, "
        "environment.max_retries times at most, or else left out and counted, environment/failed; traceback: "
    )


def test_the_first_error_of_each_cause_in_a_tool_is_told_with_its_line_and_its_traceback(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl")
    misspelt_code = ToolCall("run", {"code": "self.databse"})
    misspelt_argument = ToolCall("run", {"cod": "1"})
    wrong_type = ToolCall("wait", {"seconds": "long"})
    unknown_tool = ToolCall("none", {})
    with open_pool(logs=tmp_path, emit=events.emit) as pool:
        begin_episodes(pool, "a", "b")
        calls = [misspelt_code, misspelt_argument, wrong_type, unknown_tool, misspelt_code]
        results = pool.call("a", calls).result()
        assert not isinstance(results, EnvironmentFailure)
        assert pool.call("b", [misspelt_code]).result() == results[:1]
        assert pool.tool_errors.most_common() == "run: raised AttributeError at own.py:93 (3 times)"
    error_of_code = "raised AttributeError at own.py:93"
    error_of_type = "raised TypeError at own.py:58"
    assert [result.failed for result in results] == [True] * 5
    assert [result.raised for result in results] == [error_of_code, "", error_of_type, "", error_of_code]
    first_event, second_event = read_records(tmp_path / "events.jsonl")
    first_text = first_event["what"]
    assert first_text.startswith(f"tool run: {error_of_code}: 'Own' object has no attribute 'databse'")
    assert "; the model reads the error, and the episode goes on, environment/tool_raised; traceback: " in first_text
    assert second_event["what"].startswith(f"tool wait: {error_of_type}: ")
    assert "AttributeError" in (tmp_path / "tool-errors.log").read_text()


@pytest.mark.parametrize("row", [{"value": 3}, {"value": [{"type": "image"}]}])
def test_a_value_of_the_wrong_type_breaks_the_contract(row: dict[str, Any]) -> None:
    with open_pool() as pool:
        assert failure_of(pool.reset("a", row, seed=1).result()).kind == "contract"
        begin_episodes(pool, "b", reward="high")
        assert "get_reward must return a finite number" in str(failure_of(pool.reward("b").result()))
        begin_episodes(pool, "c")
        assert failure_of(pool.step("c", "wrong").result()).kind == "contract"


def test_output_without_end_is_bounded_and_waits_for_nobody(tmp_path: Path) -> None:
    with open_pool(logs=tmp_path) as pool:
        begin_episodes(pool, "a", "b")
        run_code(pool, "a", "[print('x' * 100_000) for _ in iter(int, 1)]")
        log = tmp_path / "environments.log"
        while not log.exists() or log.stat().st_size <= MAX_LOG_BYTES:
            time.sleep(0.01)
        assert call_select(pool, "b") == SELECTED
    assert log.stat().st_size <= MAX_LOG_BYTES + 1000


def test_long_results_and_odd_characters_reach_the_driver_as_text() -> None:
    with open_pool() as pool:
        begin_episodes(pool, "a")
        (long_result,) = run_code(pool, "a", "'é' * 1_000_000").result()
        assert len(long_result.content) < 300_000 and long_result.content.endswith("characters]")
        (odd_result,) = run_code(pool, "a", """json.loads('"\\\\ud83d"')""").result()
        assert odd_result.content.encode() == b"?"
        (error,) = run_code(pool, "a", "1 / 0").result()
        assert error == ToolResult("run", "Error: division by zero", True, "raised ZeroDivisionError at own.py:93")


def test_calls_are_answered_in_order_the_malformed_ones_too() -> None:
    with open_pool() as pool:
        begin_episodes(pool, "a")
        calls = [
            MalformedCall("not JSON"),
            ToolCall("wait", {"seconds": 0}),
            ToolCall("select", {}),
            ToolCall("reset", {}),
        ]
        tools = "the tools are meet, meet_later, run, select, sleep, wait"
        first, second, third, fourth = pool.call("a", calls).result()  # type: ignore[misc]
        assert first.message() == {"role": "tool", "content": "Error: no tool was called: not JSON"}
        assert second.content.startswith("waited") and third == SELECTED[0]
        assert fourth.message() == {
            "role": "tool",
            "name": "reset",
            "content": f"Error: there is no tool 'reset'; {tools}",
        }


def test_everything_ends_with_the_pool() -> None:
    with open_pool(processes=2) as pool:
        begin_episodes(pool, "a", "b")
        sleeping = pool.call("a", [ToolCall("sleep", {"seconds": 1000})])
        pids = pool.pids()
        assert len(pids) == 2
    assert failure_of(sleeping.result()).kind == "died"
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="shut down"):
        pool.reset("c", {}, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own.py:Nothing", "own.py has no Nothing"),
        ("nowhere.py:Own", "cannot import: FileNotFoundError"),
        ("broken.py:Own", "cannot import: ZeroDivisionError: division by zero at broken.py:2"),
        ("ends.py:Own", "an environment ended its process while loading: exit code 4"),
        ("bare.py:Bare", "has no method reset"),
    ],
)
def test_an_environment_that_cannot_be_used_says_why(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "broken.py").write_text("\n1 / 0\n")
    (tmp_path / "ends.py").write_text("import os\nos._exit(4)\n")
    (tmp_path / "bare.py").write_text("class Bare:\n    pass\n")
    with EnvironmentPool({"own": EnvironmentSpec(name, 5.0)}, 1024, 1) as pool:
        with pytest.raises(UnusableEnvironmentError) as error:
            pool.contracts()
        assert message in str(error.value)
        assert failure_of(pool.reset("a", {}, 1).result()).kind in ("contract", "died")


def test_a_row_must_name_one_of_several() -> None:
    specs = {"one": EnvironmentSpec("own.py:Own", 5.0), "two": EnvironmentSpec("own.py:Own", 5.0)}
    with EnvironmentPool(specs, 1024, 1) as pool:
        failure = failure_of(pool.reset("a", {"environment": "three"}, 1).result())
        assert str(failure) == "no such environment: a row must name one of one, two: 'three'"
        assert pool.reset("b", {"environment": "two"}, 1).result() == "ready"
