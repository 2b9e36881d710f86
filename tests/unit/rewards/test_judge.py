"""The reward `judge` against a real server: its forms, failures, retries, cache, budget, and a server that lies."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.plugins import correctness
from rlctl.rewards.base import RewardError, RewardInput
from rlctl.rewards.judge.ledger import JudgeLedger, JudgeReply, make_key
from rlctl.rewards.judge.metric_rows import judge_metrics
from rlctl.rewards.judge.prompt import make_question, placeholder_problem
from rlctl.rewards.judge.sections import JudgeSection
from rlctl.rewards.judge.verdict import PAIR_VERDICTS, read_verdicts
from rlctl.rewards.scorer import Score, Scorer
from tests.judge_server import Answer, JudgeServer

KEY = "sk-Very-Secret-0123456789"
MakeSection = Callable[..., JudgeSection]


@pytest.fixture
def make_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeSection:
    """Return a function that makes a judge's section for a server, with a prompt of its own."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    values: dict[str, Any] = {
        "name": "judge", "weight": 1.0, "correct_at": None, "pattern": None, "timeout_s": 60.0, "concurrency": 64,
        "path": None, "num_engines": 1, "tensor_parallel_size": 1, "max_length": None,
        "base_url": None, "model": "grader", "client": "openai", "api_key_env": "JUDGE_KEY", "prompt": "",
        "verdicts": {"good": 1.0, "bad": 0.0}, "scale": None, "criteria": {}, "compare": None, "max_tokens": 64,
        "temperature": 0.0, "body": {}, "call_timeout_s": 20.0, "retries": 4, "cache": True, "budget_calls": None,
        "budget_tokens": None, "price_input": None, "price_output": None,
    }  # fmt: skip

    def make(server: JudgeServer | None, prompt: str = "Is this right?\n{completion}", **changes: Any) -> JudgeSection:
        file = tmp_path / "prompt.txt"
        file.write_text(prompt)
        url = f"{server.url}/v1" if server else "http://127.0.0.1:9/v1"
        return JudgeSection(**{**values, "prompt": str(file), "base_url": url, **changes})

    return make


def make_items(*completions: str) -> list[RewardInput]:
    return [RewardInput("2+2=", completion, "4", {"level": 3}) for completion in completions]


def values_of(scores: Sequence[Score]) -> list[float | None]:
    return [score.value for score in scores]


def is_good(question: str, number: int) -> Answer:
    return Answer(f"thought\nverdict: {'good' if 'right' in question.rpartition(chr(10))[2] else 'bad'}")


@pytest.mark.parametrize("client, path", [("openai", "/v1/chat/completions"), ("anthropic", "/v1/v1/messages")])
def test_two_clients_send_their_form_and_the_reason_is_kept(client: str, path: str, make_section: MakeSection) -> None:
    with JudgeServer(is_good) as server:
        section = make_section(server, client=client, price_input=2.0, price_output=8.0, body={"top_p": 0.5})
        with Scorer([section]) as scorer:
            scores = scorer.score(make_items("right", "wrong", "right"))
            counts = scorer.take_counts()
    assert values_of(scores) == [1.0, 0.0, 1.0]
    assert scores[0].reasons == {"judge": "thought\nverdict: good"} and scores[0].right
    # The third question equals the first.
    assert judge_metrics(counts) == {
        "judge/calls": 2.0, "judge/cached": 1.0, "judge/failed": 0.0, "judge/retries": 0.0, "judge/input_tokens": 20.0,
        "judge/output_tokens": 4.0, "judge/cost": pytest.approx((20 * 2 + 4 * 8) / 1e6),
        "judge/seconds": pytest.approx(0.5, abs=0.5),
    }  # fmt: skip
    assert set(server.paths) == {path}
    body = next(body for body in server.bodies if body["messages"][0]["content"].endswith("right"))
    assert body == {
        "model": "grader", "messages": [{"role": "user", "content": "Is this right?\nright"}], "max_tokens": 64,
        "temperature": 0.0, "top_p": 0.5,
    }  # fmt: skip
    sent_key = f"authorization: bearer {KEY}" if client == "openai" else f"x-api-key: {KEY}"
    assert all(sent_key.lower() in head.lower() for head in server.headers)


def test_a_fifth_of_the_calls_that_fail_costs_no_rollout(make_section: MakeSection) -> None:
    problems = [Answer(status=500), Answer(status=429, headers={"Retry-After": "0"}), Answer(copies=0), Answer(body="")]

    def behave(question: str, number: int) -> Answer:
        return problems[number // 5 % 4] if number % 5 == 0 else is_good(question, number)

    completions = [f"{number} {'right' if number % 3 else 'wrong'}" for number in range(60)]
    with JudgeServer(behave) as server, Scorer([make_section(server, retries=6)]) as scorer:
        scores = scorer.score(make_items(*completions))
        counts = judge_metrics(scorer.take_counts())
    unanswered = [score.failed for score in scores if score.value is None]
    # A body without a reply is no infrastructure's fault, and is not asked for again.
    assert all("judge answered 200 without a reply" in str(failed) for failed in unanswered) and len(unanswered) < 8
    for score, completion in zip(scores, completions):
        assert score.value in (None, float("right" in completion))
    assert counts["judge/retries"] >= 9 and counts["judge/calls"] == 60 + counts["judge/retries"]


@pytest.mark.parametrize(
    "answer, failure",
    [
        (Answer("I cannot say."), "judge: no verdict in the judge's reply: verdict is 'I cannot say', not one of good"),
        (Answer(status=401, text=f"bad key {KEY}"), 'judge: judge answered 401: {"error": {"message": "bad key ***"}}'),
        (Answer(status=302, headers={"Location": "http://127.0.0.1:1/"}), "judge: judge answered 302"),
        (Answer(seconds=30), "judge: judge took longer than 0.3 s: each of its tries"),
        (Answer(copies=0), "judge: judge cannot be reached: ServerDisconnectedError"),
    ],
)
def test_a_failure_is_no_zero_and_names_its_cause(answer: Answer, failure: str, make_section: MakeSection) -> None:
    with JudgeServer(lambda question, number: answer) as server:
        section = make_section(server, retries=1, call_timeout_s=0.3)
        with Scorer([section]) as scorer:
            (score,) = scorer.score(make_items("right"))
            counts = judge_metrics(scorer.take_counts())
    assert score.value is None and str(score.failed).startswith(failure)
    # Usage counts though the reply cannot be read.
    assert counts["judge/output_tokens"] == (2.0 if answer.text == "I cannot say." else 0.0)
    assert counts["judge/failed"] == 1.0


def test_answers_that_come_late_or_twice_or_swapped_reach_no_other_rollout(make_section: MakeSection) -> None:
    late: list[str] = []

    def behave(question: str, number: int) -> Answer:
        """Send each reply twice, the first ones too late, and every seventh in place of another's."""
        ticket, name = re.findall(r"ticket (\w+) of (\w+)", question)[0]
        verdict = "good" if int(name[1:]) % 2 else "bad"
        text = f"{ticket}\nverdict: {verdict}"
        if number % 7 == 3 and late:
            text = late[-1]
        late.append(text)
        return Answer(text, copies=2, seconds=0.6 if number % 5 == 0 else 0.0)

    prompt = "Repeat {ticket}.\nticket {ticket} of {completion}"
    with JudgeServer(behave) as server:
        section = make_section(server, prompt, call_timeout_s=0.4, retries=8, concurrency=8)
        with Scorer([section]) as scorer:
            scores = scorer.score(make_items(*[f"n{number}" for number in range(60)]))
    judged = [(number, score.value) for number, score in enumerate(scores) if score.value is not None]
    assert len(judged) > 40
    assert all(value == number % 2 for number, value in judged)
    swapped = [score.failed for score in scores if score.value is None]
    assert swapped and all("it lacks the ticket of its prompt" in str(failed) for failed in swapped)


def test_pairs_and_groups_are_compared(make_section: MakeSection) -> None:
    def behave(question: str, number: int) -> Answer:
        if question.startswith("Rank"):
            texts = re.findall(r"\[\d+\]\n(\w+)", question)
            return Answer("\n".join(f"{place}: {len(text)}" for place, text in enumerate(texts, 1)))
        first, second = re.findall(r"<(\w*)>", question)
        verdict = "tie" if len(first) == len(second) else "A" if len(first) > len(second) else "B"
        return Answer(f"verdict: {verdict}")

    items = make_items("a", "abc", "ab", "abc", "abcd")
    with JudgeServer(behave) as server:
        pairs = make_section(server, "<{first}> or <{second}>?", compare="pairs", verdicts={})
        with Scorer([pairs]) as scorer:
            compared = scorer.score(items, group_sizes=[4, 1])
            counts = judge_metrics(scorer.take_counts())
            assert counts["judge/calls"] + counts["judge/cached"] == 6
        ranked = make_section(server, "Rank.\n{completions}", compare="group", verdicts={}, scale=[0, 4])
        with Scorer([ranked]) as scorer:
            assert values_of(scorer.score(items, group_sizes=[4, 1])) == [0.25, 0.75, 0.5, 0.75, 1.0]
    assert values_of(compared) == [0.0, pytest.approx(2.5 / 3), pytest.approx(1 / 3), pytest.approx(2.5 / 3), None]
    assert compared[4].failed == "judge: no reward judges it: each returned None"


def test_criteria_are_weighed(make_section: MakeSection) -> None:
    with JudgeServer(lambda question, number: Answer('{"facts": 8, "style": 2}')) as server:
        section = make_section(server, "{criteria}\n{completion}", criteria={"facts": 3, "style": 1}, verdicts={},
                               scale=[0, 10])  # fmt: skip
        with Scorer([section]) as scorer:
            assert values_of(scorer.score(make_items("x"))) == [pytest.approx((3 * 0.8 + 0.2) / 4)]
    assert server.questions == ["- facts\n- style\nx"]


def test_the_records_answer_a_later_process_and_continue_its_budget(make_section: MakeSection, tmp_path: Path) -> None:
    items = make_items("right 1", "wrong 2", "right 3", "wrong 4")
    with JudgeServer(is_good) as server:
        section = make_section(server, budget_calls=3)
        with Scorer([section], records=tmp_path) as scorer:
            first = scorer.score(items[:2])
        # A kill within a write leaves a part of a line.
        with (tmp_path / "judge.jsonl").open("a") as file:
            file.write('{"key": "half')
        with Scorer([section], records=tmp_path) as scorer:
            again = scorer.score(items[:2])
            counts = judge_metrics(scorer.take_counts())
            more = scorer.score(items[2:])
    assert again == first
    assert (counts["judge/calls"], counts["judge/cached"]) == (0.0, 2.0)
    assert len(server.questions) == 3
    assert sorted(score.value is None for score in more) == [False, True]
    stopped = next(score for score in more if score.value is None)
    assert stopped.stop == "judge: the judge's budget is spent: budget_calls=3 requests were made; raise it and resume"
    assert KEY not in (tmp_path / "judge.jsonl").read_text()
    assert len((tmp_path / "judge.jsonl").read_text().splitlines()) == 4


def test_a_budget_of_tokens_stops_too_and_other_parameters_are_other_requests(tmp_path: Path) -> None:
    body = {"model": "m", "temperature": 0.0, "messages": []}
    assert make_key("openai", body) == make_key("openai", dict(reversed(body.items())))
    assert make_key("openai", body) != make_key("openai", {**body, "temperature": 1.0})
    ledger = JudgeLedger(tmp_path / "a.jsonl", None, 20)
    ledger.begin()
    ledger.note_reply("one", JudgeReply("yes", 15, 5))
    with pytest.raises(RewardError, match="20 tokens of budget_tokens=20 were used"):
        ledger.begin()
    assert JudgeLedger(tmp_path / "a.jsonl", None, None).find("one") == JudgeReply("yes", 15, 5)


def test_a_judge_without_its_key_or_prompt_cannot_be_used(make_section: MakeSection) -> None:
    for section, problem in (
        (make_section(None, api_key_env="NO_SUCH_KEY"), "api_key_env=NO_SUCH_KEY is no variable that is set here"),
        (
            replace(make_section(None), prompt="nowhere"),
            "cannot read the prompt",
        ),
    ):
        with Scorer([section]) as scorer, pytest.raises(RewardError, match=problem):
            scorer.try_on_sample(make_items("x")[0])


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"api_key_env": KEY}, "api_key_env: must be the name of an environment variable"),
        ({"base_url": f"https://me:{KEY}@host/v1"}, "base_url: has a user or password"),
        ({"base_url": f"https://host/v1?api_key={KEY}"}, "base_url: has a secret as a parameter"),
        ({"body": {"api_key": KEY}}, "body.api_key: looks like a secret"),
        ({"base_url": None}, "base_url: must be set"),
        ({"base_url": "ftp://host"}, "base_url: must begin with http"),
        ({"model": None}, "model: must be set"),
        ({"path": "a"}, "base_url: must be null with path"),
        ({"verdicts": {}}, "verdicts: set either verdicts"),
        ({"scale": [1, 10]}, "verdicts: set either verdicts"),
        ({"verdicts": {}, "scale": [3, 1]}, "scale: must be"),
        ({"compare": "pairs"}, "verdicts: a pair's verdicts are A, B and tie"),
        ({"criteria": {"style": 0.0}}, "criteria: every weight"),
        ({"body": {"stream": True}}, "body.stream: is set by rlctl"),
        ({}, ""),
    ],
)  # fmt: skip
def test_a_wrong_key_is_told_before_the_start_and_no_secret_is_quoted(
    changes: dict[str, Any], problem: str, make_section: MakeSection
) -> None:
    problems = [f"{key}: {text}" for key, text in make_section(None, **changes).problems()]
    assert not problem or problems[0].startswith(problem)
    assert bool(problems) == bool(problem)
    assert KEY not in "".join(problems)
    assert correctness([make_section(None, **changes)]) == (0, 1.0)


@pytest.mark.parametrize(
    "template, compare, problem",
    [
        ("{completion} {answer} {row.level} {x} {\"a\": 1}", None, ""),
        ("{complation}", None, "has no placeholder {complation}; did you mean completion?"),
        ("nothing", None, "must have {completion}"),
        ("{first}", "pairs", "must have {first} and {second}"),
        ("{completions}", "group", ""),
    ],
)  # fmt: skip
def test_placeholders(template: str, compare: Any, problem: str) -> None:
    found = placeholder_problem(template, compare)
    assert found.startswith(problem) and bool(found) == bool(problem)


def test_a_value_with_a_placeholder_stays_as_it_is() -> None:
    item = RewardInput("{answer}", "{row.secret} {completion}", "4", {"level": 3, "secret": "s"})
    question = make_question("{prompt}|{completion}|{answer}|{row.level}|{a: 1}|{x}", None, [item], [])
    assert question.text == "{answer}|{row.secret} {completion}|4|3|{a: 1}|{x}" and question.ticket == ""
    with pytest.raises(RewardError, match="no column other"):
        make_question("{completion}{row.other}", None, [item], [])
    with pytest.raises(RewardError, match="no answer"):
        make_question("{completion}{answer}", None, [replace(item, answer=None)], [])


@pytest.mark.parametrize(
    "reply, scale, verdicts",
    [
        ("good", None, {"verdict": 1.0}),
        ("verdict: bad\nNo, better:\n**Verdict:** Good.", None, {"verdict": 1.0}),
        ('```json\n{"reason": "fine", "verdict": "bad"}\n```', None, {"verdict": 0.0}),
        ("verdict: 8/10", (0, 10), {"verdict": 0.8}),
        ("verdict: good or bad", None, None),
        ("The verdict is not clear", None, None),
        ("", None, None),
        ("verdict: 11", (0, 10), None),
        ("verdict: 8/100", (0, 10), None),
        ("verdict: eight", (0, 10), None),
    ],
)  # fmt: skip
def test_a_reply_has_one_verdict_or_none(reply: str, scale: Any, verdicts: dict[str, float] | None) -> None:
    words = {"good": 1.0, "bad": 0.0}
    if verdicts is not None:
        assert read_verdicts(reply, ["verdict"], words, scale) == verdicts
        return
    with pytest.raises(RewardError, match="no verdict in the judge's reply"):
        read_verdicts(reply, ["verdict"], words, scale)


def test_a_reply_must_have_each_of_several_verdicts() -> None:
    assert read_verdicts("1: 3\n- [2]: 5", ["1", "2"], {}, (0, 10)) == {"1": 0.3, "2": 0.5}
    with pytest.raises(RewardError, match="no line 2:"):
        read_verdicts("1: 3", ["1", "2"], {}, (0, 10))
    assert read_verdicts("[[B]]", ["verdict"], PAIR_VERDICTS, None) == {"verdict": 0.0}


def test_a_request_has_its_own_connection_and_64_run_at_once(make_section: MakeSection) -> None:
    with JudgeServer(lambda question, number: Answer(seconds=0.5)) as server, Scorer([make_section(server)]) as scorer:
        assert values_of(scorer.score(make_items(*map(str, range(128))))) == [1.0] * 128
    assert server.most_running == 64
    assert all("connection: close" in head.lower() for head in server.headers)
    assert json.dumps(server.bodies).count("grader") == 128
