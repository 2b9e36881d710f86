import pytest

from rlctl.config.grpo_schema import RewardSection
from rlctl.rewards.base import RewardError, RewardFailure, RewardInput, attempt
from rlctl.rewards.load_rewards import load_reward


def score_text(name: str, completion: str, answer: str | None, pattern: str | None = None) -> object:
    """Return the value of a built-in reward, or its failure as a text."""
    section = RewardSection(name, 1.0, None, pattern, 5.0, 64)
    outcome = attempt(load_reward(section), RewardInput("p", completion, answer, {}))
    return str(outcome) if isinstance(outcome, RewardFailure) else outcome


@pytest.mark.parametrize(("completion", "expected_value"), [("19", 1.0), (" 19\n", 1.0), ("019", 0.0), ("", 0.0)])
def test_exact_compares_all_but_the_white_space_around(completion, expected_value):
    assert score_text("exact", completion, "19 ") == expected_value


@pytest.mark.parametrize(
    ("completion", "expected_value"),
    [("so #### 19", 1.0), ("#### 1 then #### 19", 0.0), ("19", 0.0), ("#### ", 0.0)],
)
def test_regex_compares_the_first_group_of_the_first_match(completion, expected_value):
    assert score_text("regex", completion, "19", r"#### ?(\d*)") == expected_value


@pytest.mark.parametrize(("pattern", "complaint"), [("(", "bad pattern"), (None, "no group"), (r"\d+", "no group")])
def test_a_pattern_that_cannot_work_is_refused_when_loaded(pattern, complaint):
    with pytest.raises(RewardError, match=complaint):
        load_reward(RewardSection("regex", 1.0, None, pattern, 5.0, 64))


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("1/2", "0.5"),
        ("19", "the answer is 19."),
        (r"\frac12", r"so \boxed{0.5}"),
        ("x^2+2x+1", "$(x+1)^2$"),
        (r"\boxed{3}", "$3$"),
        ("$1000$", "1,000"),
        (r"\{1,2\}", r"$\{2,1\}$"),
    ],
)
def test_math_verify_sees_through_notation(answer, completion):
    assert score_text("math_verify", completion, answer) == 1.0


@pytest.mark.parametrize("completion", ["20", "", "no idea", r"\boxed{1}"])
def test_math_verify_gives_nothing_for_another_value(completion):
    assert score_text("math_verify", completion, "19") == 0.0


@pytest.mark.parametrize("name", ["exact", "regex", "math_verify"])
def test_a_row_without_an_answer_cannot_be_scored(name):
    assert score_text(name, "19", None, "(19)") == "no answer: the row has none to compare with"


def test_math_verify_refuses_an_answer_that_is_no_mathematics():
    assert str(score_text("math_verify", "19", "")).startswith("unreadable answer")
