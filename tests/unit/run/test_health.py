"""Health checks of a run: each bound warns once, and a resumed run remembers its warnings."""

import json
from collections.abc import Iterable

import pytest

from rlctl.grpo.health import grpo_health
from rlctl.preflight.load import load
from rlctl.run.health import Ceiling, Decline, Health, HealthCheck, HealthWarning, Jump


def look_at(health: Health, metric: str, figures: Iterable[float], first_step: int = 1) -> list[list[HealthWarning]]:
    """Let `health` check one value of a metric in each step. Return the warnings of each step."""
    return [health.look(step, {metric: figure}) for step, figure in enumerate(figures, first_step)]


def count_warnings(warnings_by_step: list[list[HealthWarning]]) -> list[int]:
    """Return the number of warnings in each step."""
    return [len(warnings) for warnings in warnings_by_step]


def find_warned_steps(check: HealthCheck, figures: Iterable[float]) -> list[int]:
    """Return the steps at which `check` warns. figures: value of its metric in each step."""
    warnings_by_step = look_at(Health([check], stop=False), check.metric, figures)
    return [step for step, warnings in enumerate(warnings_by_step, 1) if warnings]


def make_mismatch_ceiling() -> Ceiling:
    return Ceiling("mismatch", "m", bound=1.05, message="{value}")


def resume_health(resumed: Health, before: Health) -> None:
    """Load the state of `before` into `resumed`, as a resume from a checkpoint does."""
    resumed.load_state_dict(json.loads(json.dumps(before.state_dict())))


def test_a_ceiling_warns_once_and_again_after_it_recovered() -> None:
    assert find_warned_steps(make_mismatch_ceiling(), [1.05, 1.06, 2.8, 1.0, 1.1]) == [2, 5]


def test_a_value_that_is_no_number_is_above_every_ceiling() -> None:
    assert find_warned_steps(make_mismatch_ceiling(), [1.0, float("nan")]) == [2]


def test_a_patient_ceiling_warns_when_the_bound_is_left_for_long() -> None:
    check = Ceiling("failed", "f", bound=0.5, message="{value} for {steps} steps", patience=3)
    assert find_warned_steps(check, [0.6, 0.6, 0.1, 0.6, 0.6, 0.6, 0.6]) == [6]


def test_a_step_without_the_metric_says_nothing_either_way() -> None:
    health = Health([make_mismatch_ceiling()], stop=False)
    assert len(health.look(0, {"m": 2.0})) == 1
    assert health.look(1, {}) == []
    assert health.look(2, {"m": 2.0}) == []


def test_a_gradient_norm_far_above_its_neighbours_is_told() -> None:
    check = Jump("grad_norm", "g", bound=20, message="{value:g} is {ratio:.0f} times", window=4)
    *earlier_warnings, warnings = look_at(Health([check], stop=False), "g", [1.0, 1.2, 0.8, 19.0, 400.0])
    assert count_warnings(earlier_warnings) == [0, 0, 0, 0]
    (warning,) = warnings
    assert warning.text == "400 is 364 times"
    assert warning.value == pytest.approx(400 / 1.1)


def test_steps_that_teach_nothing_are_no_neighbours() -> None:
    check = Jump("grad_norm", "g", bound=20, message="", window=4)
    assert find_warned_steps(check, [0.5, 0.0, 0.0, 0.0, 0.6, 0.0, 0.0, 0.5, 30.0]) == [9]


def test_a_new_level_is_usual_after_half_a_window() -> None:
    check = Jump("grad_norm", "g", bound=20, message="", window=4)
    assert find_warned_steps(check, [1, 1, 1, 1, 100, 100, 100, 100, 100, 1, 2500]) == [5, 11]


def test_held_out_accuracy_may_not_fall_far_below_its_start() -> None:
    check = Decline("accuracy", "a", bound=0.1, message="{value:.0%}, {lost:.0%} below {start:.0%}", worse=-1)
    assert find_warned_steps(check, [0.5, 0.9, 0.4, 0.32, 0.31, 0.45, 0.2]) == [4, 7]


def test_held_out_loss_may_not_rise_far_above_its_start() -> None:
    check = Decline("loss", "l", bound=0.1, message="", worse=1)
    assert find_warned_steps(check, [2.0, 1.0, 2.05, 2.2]) == [4]


def test_a_resume_goes_on_with_what_was_measured_and_said() -> None:
    def make_checks() -> list[HealthCheck]:
        return [
            Jump("grad_norm", "g", bound=20, message="", window=4),
            Decline("accuracy", "a", bound=0.1, message="", worse=-1),
            Ceiling("m", "m", bound=1, message=""),
        ]

    before = Health(make_checks(), stop=False)
    for step in range(4):
        before.look(step, {"g": 1.0, "a": 0.5, "m": 2.0})
    resumed = Health(make_checks(), stop=False)
    resume_health(resumed, before)
    warnings = resumed.look(5, {"g": 400.0, "a": 0.3, "m": 2.0})
    assert [warning.check for warning in warnings] == ["grad_norm", "accuracy"]


def test_a_resume_stops_again_at_what_stopped_the_run() -> None:
    before = Health([make_mismatch_ceiling()], stop=True)
    assert [warning.fatal for warning in before.look(3, {"m": 2.0})] == [True]
    resumed = Health([make_mismatch_ceiling()], stop=True)
    resume_health(resumed, before)
    assert [warning.fatal for warning in resumed.look(4, {"m": 2.0})] == [True]


def test_the_bounds_are_the_configs() -> None:
    for stop in (False, True):
        run = load("grpo", None, [f"health.stop={str(stop).lower()}"]).settled
        health = grpo_health(run)
        assert health.look(0, {"validation/accuracy": 0.927}) == []
        mismatch, accuracy = health.look(1, {"mismatch/token_mult_prob_error": 2.8, "validation/accuracy": 0.747})
        assert (mismatch.check, mismatch.fatal) == ("mismatch", stop)
        assert (accuracy.check, accuracy.fatal) == ("accuracy", stop)
        assert "held-out accuracy is 74.7%, 18.0% below its start of 92.7%, at most 10.0%" in accuracy.text


def test_keys_of_the_config_move_the_bounds() -> None:
    overrides = ["health.max_grad_norm_ratio=5", "health.grad_norm_window=4", "health.max_accuracy_drop=0.3"]
    health = grpo_health(load("grpo", None, overrides).settled)
    # Half of a window of 4 is 2 steps.
    warnings_by_step = look_at(health, "train/grad_norm", [1.0, 1.0, 4.9, 15.0], first_step=0)
    assert count_warnings(warnings_by_step) == [0, 0, 0, 1]
    assert warnings_by_step[3][0].text.endswith(
        "15 times the median of the last 4 steps, at most 5 times (health.max_grad_norm_ratio)"
    )
    warnings_by_step = look_at(health, "validation/accuracy", [0.9, 0.61, 0.59], first_step=0)
    assert count_warnings(warnings_by_step) == [0, 0, 1] and "at most 30.0%" in warnings_by_step[2][0].text


@pytest.mark.parametrize(
    ("settings", "loss", "remedy"),
    [
        (["grpo.loss={name: gspo, proximal: rollout}"], "gspo", "set grpo.loss.proximal=recompute"),
        (["grpo.loss=dppo"], "dppo", "raise grpo.loss.mask_low and grpo.loss.mask_high"),
        (
            ["grpo.loss=gspo", "grpo.updates_per_step=2"],
            "gspo",
            "set grpo.updates_per_step=1, or raise grpo.loss.clip_low and grpo.loss.clip_high",
        ),
    ],
)
def test_a_loss_that_clips_before_the_policy_has_moved_is_told_once(
    settings: list[str], loss: str, remedy: str
) -> None:
    run = load("grpo", None, settings).settled
    health = grpo_health(run)
    warnings_by_step = look_at(health, "ratio/clipped_first", [0.05, 0.368, 0.4], first_step=0)
    assert count_warnings(warnings_by_step) == [0, 1, 0]
    assert warnings_by_step[1][0].text == (
        f"{loss} clips 37% of the tokens before the policy has moved, at most 5% (health.max_clipped_share): its "
        f"bounds hold the gap between engine and trainer; {remedy}"
    )


def test_rewards_that_fail_for_most_rollouts_stop_a_run_and_a_resumed_one_again() -> None:
    run = load("grpo", None, ["health.max_failed_reward_share=0.25", "health.failed_reward_steps=3"]).settled
    health = grpo_health(run, lambda: "score: raised ValueError at mine.py:3 (96 times)")
    *earlier_warnings, warnings = look_at(health, "reward/failed_share", [1.0, 1.0, 0.25, 1.0, 0.5, 0.3])
    assert count_warnings(earlier_warnings) == [0, 0, 0, 0, 0]
    (warning,) = warnings
    assert warning.fatal
    assert warning.text == (
        "rewards failed for 30% of the rollouts, in 3 steps in a row for more than 25% (health.max_failed_reward_share)"
        "; most of them score: raised ValueError at mine.py:3 (96 times)"
    )
    resumed = grpo_health(run)
    resume_health(resumed, health)
    assert count_warnings(look_at(resumed, "reward/failed_share", [1.0, 1.0, 1.0], first_step=7)) == [0, 0, 1]


def test_tools_that_raise_in_many_of_their_calls_are_told_with_the_most_common_line() -> None:
    run = load("grpo", None, ["health.max_tool_raised_share=0.25"]).settled
    health = grpo_health(run, tool_cause=lambda: "add: raised AttributeError at mine.py:7 (61 times)")
    warnings_by_step = look_at(health, "environment/tool_raised", [0.25, 0.42, 0.57])
    assert count_warnings(warnings_by_step) == [0, 1, 0]
    warning = warnings_by_step[1][0]
    assert not warning.fatal and warning.text == (
        "tools raised in 42% of their calls, at most 25% (health.max_tool_raised_share); most of them add: raised "
        "AttributeError at mine.py:7 (61 times)"
    )


def test_calls_that_are_mostly_malformed_are_told_with_the_key_of_their_format() -> None:
    run = load("grpo", None, ["health.max_malformed_call_share=0.5"]).settled
    health = grpo_health(run)
    warnings_by_step = look_at(health, "environment/malformed_calls", [0.5, 0.9, 1.0])
    assert count_warnings(warnings_by_step) == [0, 1, 0]
    warning = warnings_by_step[1][0]
    assert not warning.fatal and warning.text == (
        "90% of the tool calls are malformed, at most 50% (health.max_malformed_call_share): rlctl runs rollouts shows "
        "them; environment.tool_format names the format that is parsed"
    )


def test_turns_that_take_longer_than_a_client_waits_are_told_before_they_do() -> None:
    health = grpo_health(load("grpo", None, []).settled)
    warnings_by_step = look_at(health, "agent/longest_turn", [500.0, 512.4, 900.0])
    assert count_warnings(warnings_by_step) == [0, 1, 0]
    warning = warnings_by_step[1][0]
    assert not warning.fatal and warning.text == (
        "an agent waited 512 s for a turn, at most 500 (health.max_agent_turn_s): clients of OpenAI and Anthropic end "
        "a request after 600 s, and give up after three; lower generation.max_new_tokens, play fewer rollouts at a "
        "time, or raise the client's timeout"
    )


def test_a_validation_without_scores_is_told() -> None:
    run = load("grpo", None, []).settled
    health = grpo_health(run)
    warnings_by_step = []
    for step, num_failed in enumerate((0, 100, 200, 200)):
        metrics = {"validation/failed_rewards": num_failed, "validation/answers": 200.0}
        warnings_by_step.append(health.look(step, metrics))
    assert count_warnings(warnings_by_step) == [0, 0, 1, 0]
    warning = warnings_by_step[2][0]
    assert not warning.fatal and warning.text.startswith("100% of the held-out answers have no score")


@pytest.mark.parametrize("override", ["async.enabled=true", "generation.top_p=0.8", "generation.top_k=20"])
def test_tokens_of_older_weights_or_of_a_cut_distribution_are_not_judged(override: str) -> None:
    run = load("grpo", None, [override]).settled
    health = grpo_health(run)
    assert health.look(1, {"mismatch/token_mult_prob_error": 1.13, "mismatch/parity": 1.0}) == []
    (warning,) = health.look(2, {"mismatch/token_mult_prob_error": 1.13, "mismatch/parity": 2.8})
    assert warning.text.startswith("mismatch/parity is 2.8, at most 1.05 (health.max_token_mult_prob_error)")


def test_a_model_that_rounds_more_is_held_to_its_own_bound() -> None:
    health = grpo_health(load("grpo", None, []).settled, mismatch_bound=1.12)
    assert health.look(1, {"mismatch/token_mult_prob_error": 1.0607}) == []
    (warning,) = health.look(2, {"mismatch/token_mult_prob_error": 1.13})
    assert "1.13, at most 1.12 (health.max_token_mult_prob_error=1.05, and twice the rounding" in warning.text


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_an_asynchronous_run_whose_rollouts_are_far_off_policy_is_told(is_asynchronous: bool) -> None:
    run = load("grpo", None, [f"async.enabled={str(is_asynchronous).lower()}"]).settled
    health = grpo_health(run)
    # Steps 6 to 9 of a collapse of guess-tiny: rewards fell from step 9 on. Its parity was exact, and its accuracy was
    # above that of the start.
    warnings_by_step = look_at(health, "mismatch/kl", [0.025, 0.064, 0.23, 0.31], first_step=6)
    if not is_asynchronous:
        assert count_warnings(warnings_by_step) == [0, 0, 0, 0]
        return
    assert count_warnings(warnings_by_step) == [0, 1, 0, 0]
    text = warnings_by_step[1][0].text
    assert text.startswith("mismatch/kl is 0.064 nats a token, at most 0.05 (health.max_off_policy_kl)")
    assert text.endswith("lower trainer.optimizer.lr or async.max_trajectory_age_steps")
