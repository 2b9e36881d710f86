"""The screen at every size and in every state of a run."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from rich.cells import cell_len
from rich.console import Console

from rlctl.dashboard.console import write_svg
from rlctl.dashboard.dashboard import render
from rlctl.dashboard.state import RunState, read_state
from rlctl.dashboard.view import LiveDashboard
from rlctl.generation.engine import EngineStats
from rlctl.grpo.metrics import EngineInterval, engine_metrics
from rlctl.telemetry.events import EventLog
from tests.unit.dashboard.synthetic import START, async_metrics, on_engines, step_metrics, write_run
from tests.waiting import until


def draw_screen(path: Path, width: int, height: int, **options: object) -> list[str]:
    """Return the lines of a run's dashboard on a screen of this size. options: arguments of rich's Console."""
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, **options)  # type: ignore[arg-type]
    console.print(render(read_state(path), width, height))
    return out.getvalue().rstrip("\n").split("\n")


@pytest.mark.parametrize("size", [(80, 24), (140, 40), (100, 30), (116, 24), (200, 60), (60, 15), (30, 8), (20, 4)])
@pytest.mark.parametrize("steps", [0, 1, 20])
@pytest.mark.parametrize("metrics", [step_metrics, async_metrics])
def test_no_line_is_wider_and_no_screen_higher_than_the_terminal(
    size: tuple[int, int], steps: int, metrics: Callable[[int], dict[str, float]], tmp_path: Path
) -> None:
    lines = draw_screen(write_run(tmp_path, steps=steps, ended=None, metrics=metrics).path, *size)
    assert {cell_len(line) for line in lines} == {size[0]}
    assert len(lines) <= size[1]


def test_a_narrow_terminal_has_one_column_of_whole_numbers(tmp_path: Path) -> None:
    text = "\n".join(draw_screen(write_run(tmp_path).path, 40, 30))
    assert "1,209" in text and "80.0%" in text and "Step time" not in text


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
@pytest.mark.parametrize("metrics", [step_metrics, async_metrics])
def test_the_usual_terminals_are_filled(
    size: tuple[int, int], metrics: Callable[[int], dict[str, float]], tmp_path: Path
) -> None:
    assert len(draw_screen(write_run(tmp_path, metrics=metrics).path, *size)) == size[1]


def test_an_asynchronous_run_shows_a_timeline_the_ages_of_its_groups_and_what_to_change(tmp_path: Path) -> None:
    path = write_run(tmp_path, metrics=async_metrics).path
    for size in ((80, 24), (80, 40), (140, 40)):
        text = "\n".join(draw_screen(path, *size))
        for part in (
            "Timeline ──",
            "busy · refit 0.25s · stall 4ms",
            "trainer    40.0%",
            "generator  60.0%",
            "trainer waits 20% for stragglers: raise async.max_trajectory_age_steps",
            "≤ 2 · mixed 25.0%",
            "0      8",
            "1.00040",
        ):
            assert part in text or (part.startswith("trainer waits") and size == (80, 24)), (part, size)
    wide = draw_screen(path, 140, 40)
    trainer = next(line for line in wide if "trainer    40.0%" in line)
    assert [trainer.count(sign) > 0 for sign in "·█▒▓"] == [True, True, True, False]
    assert trainer.count("█") > trainer.count("·") > trainer.count("▒")
    assert "age trained" in "\n".join(wide) and "in flight" in "\n".join(wide)


def test_a_mismatch_of_older_weights_is_no_alarm(tmp_path: Path) -> None:
    path = write_run(
        tmp_path, metrics=lambda step: {**async_metrics(step), "mismatch/token_mult_prob_error": 1.021}
    ).path
    text = "\n".join(draw_screen(path, 140, 40))
    assert "mismatch    1.02100  " in text and "▲" not in text


def test_a_mismatch_under_equal_weights_is_an_alarm_of_an_asynchronous_run_too(tmp_path: Path) -> None:
    path = write_run(tmp_path, metrics=lambda step: {**async_metrics(step), "mismatch/parity": 1.021}).path
    text = "\n".join(draw_screen(path, 140, 40))
    assert "parity      1.02100 ▲" in text and "mismatch    1.00030  " in text


def test_80_columns_show_everything_a_person_needs(tmp_path: Path) -> None:
    text = "\n".join(draw_screen(write_run(tmp_path, steps=12, ended=None).path, 80, 24))
    for part in (
        "rlctl grpo · grpo--tiny--1",
        "step 12/20",
        "60%",
        "eta",
        "generation of step 12",
        "weights v12",
        "reward        0.816",
        "accuracy      81.6%",
        "validation    60.0%",
        "mismatch    1.00030",
        "truncated      2.1%",
        "Step time  last 2.50s · mean 2.50s",
        "generation   1.50s  1.50s",
        "tokens/s/device",
        "effective     1,195",
        "trainer    60.0%",
        "trainer 0.4 · engine 1.1",
        "mismatch 1: exact · uniform: rewards all equal · effective: end to end",
        "1 rank · 1 engine",
        "checkpoint of step 10",
    ):
        assert part in text, part


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
def test_rewards_that_fail_have_a_row_while_it_goes_on(size: tuple[int, int], tmp_path: Path) -> None:
    def metrics(step: int) -> dict[str, float]:
        return {**step_metrics(step), "reward/failed_share": 0.3 if step < 12 else 0.0}

    failing = write_run(tmp_path, "failing", steps=11, ended=None, metrics=metrics).path
    assert "rew failed    30.0% ▲" in "\n".join(draw_screen(failing, *size))
    mended = write_run(tmp_path, "mended", steps=12, ended=None, metrics=metrics).path
    assert "rew failed" not in "\n".join(draw_screen(mended, *size))


def test_140_columns_add_the_curve_and_the_memory(tmp_path: Path) -> None:
    text = "\n".join(draw_screen(write_run(tmp_path).path, 140, 40))
    assert "Accuracy ──" in text and "step 1 to 20" in text
    assert "1.00 ┤" in text and "━ validation" in text
    assert "trainer rank  0.40 GiB" in text
    assert "validation of step 20: accuracy 0.800" in text
    assert "✔ done" in text


def test_before_the_first_step_it_shows_what_starts_and_for_how_long(tmp_path: Path) -> None:
    state = read_state(write_run(tmp_path, steps=0, ended=None).path)
    state.now = state.startup["engine 0"][0] + 12.3
    out = io.StringIO()
    Console(file=out, width=80, height=24).print(render(state, 80, 24))
    text = out.getvalue()
    assert "✔ ray         2.00s" in text
    assert "● engine 0      12s" in text


def test_a_mismatch_above_the_limit_is_marked_also_without_colour(tmp_path: Path) -> None:
    sound = write_run(tmp_path, "sound").path
    bad = write_run(
        tmp_path, "bad", metrics=lambda step: {**step_metrics(step), "mismatch/token_mult_prob_error": 1.021}
    ).path
    assert "1.02100 ▲" in "\n".join(draw_screen(bad, 80, 24))
    assert "▲" not in "\n".join(draw_screen(sound, 80, 24))


def test_an_sft_run_shows_its_loss(tmp_path: Path) -> None:
    path = write_run(
        tmp_path, algorithm="sft", metrics=lambda step: {"loss/nll": 2.0 / step, "time/step": 1.0, "time/train": 1.0}
    ).path
    text = "\n".join(draw_screen(path, 140, 40))
    assert "rlctl sft" in text and "Loss ──" in text and "reward" not in text
    # Measured by a recipe.
    assert "accuracy      80.0%" in text


def test_a_run_with_an_environment_shows_turns_tools_and_how_episodes_ended(tmp_path: Path) -> None:
    game_metrics = {"turns": 2.5, "tool_calls": 0.0, "tool_errors": 0.0, "failed": 0.0}
    game_metrics |= {"endings/done": 0.75, "endings/max_turns": 0.25}
    tool_metrics = {**game_metrics, "tool_calls": 1.5, "tool_errors": 0.1, "malformed_calls": 0.05, "failed": 3.0}

    def draw_run(name: str, metrics: dict[str, float]) -> str:
        environment_metrics = {f"environment/{key}": metric for key, metric in metrics.items()}
        run = write_run(tmp_path, name, metrics=lambda step: {**step_metrics(step), **environment_metrics})
        return "\n".join(draw_screen(run.path, 80, 50))

    game = draw_run("game", game_metrics)
    tools = draw_run("with", tool_metrics)
    for row in ("turns         2.500", "done          75.0%", "max_turns     25.0%"):
        assert row in game and row in tools
    assert "tool" not in game and "env failed" not in game
    assert "malformed      5.0%" in tools
    assert "tool calls    1.500" in tools and "tool error    10.0%" in tools and "env failed        3 ▲" in tools


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ({"ranks": 2, "engines": 3, "device": "cpu", "shared": True, "devices": {"trainer": 1, "generator": 1}},
         "2 ranks · 3 engines │"),
        ({"ranks": 4, "engines": 2, "device": "cuda", "shared": False, "devices": {"trainer": 4, "generator": 2}},
         "4 ranks · 2 engines │"),
        ({"ranks": 2, "engines": 1, "device": "cuda", "shared": False, "devices": {"trainer": 2, "generator": 2}},
         "2 ranks · 1 engine x 2 GPUs │"),
        ({"ranks": 2, "engines": 1, "device": "cuda", "shared": True, "devices": {"trainer": 2, "generator": 2}},
         "2 ranks and 1 engine on the same 2 GPUs │"),
        ({"ranks": 1, "engines": 1, "device": "cuda", "shared": True, "devices": {"trainer": 1, "generator": 1}},
         "1 rank and 1 engine on 1 GPU │"),
        ({"ranks": 2, "engines": 0, "device": "cuda", "shared": False, "devices": {"trainer": 2, "generator": 1}},
         "2 ranks │"),
    ],
)  # fmt: skip
def test_the_head_counts_ranks_and_engines_and_what_they_are_on(
    tmp_path: Path, start: dict[str, object], expected: str
) -> None:
    run = write_run(tmp_path, ended=None)
    EventLog(run.events).emit("run_started", num_steps=20, start_step=20, **start)
    assert expected in draw_screen(run.path, 80, 24)[2]


def test_an_idle_bar_is_as_long_as_its_number_says(tmp_path: Path) -> None:
    idle = {"idle/trainer": 0.25, "idle/generator": 1.0}
    path = write_run(tmp_path, metrics=lambda step: {**step_metrics(step), **idle}).path
    for size, room in (((80, 24), 16), ((140, 40), 24)):
        lines = draw_screen(path, *size)
        assert any(f"trainer    25.0%  {'█' * (room // 4)}{'░' * (room * 3 // 4)}" in line for line in lines), size
        assert any(f"generator   100%  {'█' * room}" in line for line in lines), size


def test_a_constant_series_is_flat_at_the_bottom_also_where_it_changes_by_less_than_is_shown(tmp_path: Path) -> None:
    def metrics(step: int) -> dict[str, float]:
        constant = {"length/truncated": 0.0, "mismatch/token_mult_prob_error": 1 + 1e-7 * (step % 2)}
        return {**step_metrics(step), **constant}

    lines = draw_screen(write_run(tmp_path, metrics=metrics).path, 80, 24)
    for label in ("truncated        0%", "mismatch    1.00000"):
        assert sum(label in line for line in lines) == 1
        row = next(line for line in lines if label in line)
        assert set(row.split(label)[1].split("│")[0].split()[0]) == {"▁"}
    sft = write_run(tmp_path, "sft", algorithm="sft", metrics=lambda step: {"loss/nll": 2.0, "time/step": 1.0}).path
    curve = [line for line in draw_screen(sft, 140, 40) if "┤" in line]
    assert "2.00 ┤⣀⣀⣀" in curve[-1] and "⣀" not in "".join(curve[:-1])


def many_engines_metrics(step: int) -> dict[str, float]:
    """Return the metrics of a step with 64 engines, of which engine 37 is slow and engine 5 idle."""
    before = [EngineStats(busy=0.0, tokens=0, at=1.0)] * 64
    after = [EngineStats(busy=2.0, tokens=2400, at=5.0)] * 64
    after[37] = EngineStats(busy=3.0, tokens=1200, at=5.0)
    after[5] = EngineStats(busy=1.0, tokens=1200, at=5.0)
    return async_metrics(step) | engine_metrics(EngineInterval(before, after, devices=64))


def find_events_rows(lines: list[str]) -> list[int]:
    """Return the rows of a screen at which the panel of events begins."""
    return [row for row, line in enumerate(lines) if "─ Events" in line]


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
def test_sixty_four_engines_are_shown_by_their_median_and_the_worst(tmp_path: Path, size: tuple[int, int]) -> None:
    without_engines = write_run(tmp_path, "without", metrics=async_metrics, devices=(64, 64)).path
    with_engines = write_run(tmp_path, "with", metrics=many_engines_metrics, devices=(64, 64)).path
    lines = draw_screen(with_engines, *size)
    slowest_lines = [line for line in lines if "slowest" in line]
    assert len(slowest_lines) == 1 and "engines 1,200, slowest 400 (#37) ─╯" in slowest_lines[0]
    assert find_events_rows(lines) == find_events_rows(draw_screen(without_engines, *size))
    if size[0] > 116:
        idlest_lines = [line for line in lines if "idlest" in line]
        assert len(idlest_lines) == 1 and "75.0%" in idlest_lines[0]


def metrics_without_sampling_at_the_end(step: int) -> dict[str, float]:
    """Return a step's metrics in an asynchronous run of 20 steps, whose last two steps have nothing left to sample."""
    metrics = {**async_metrics(step), "tokens/generated": 900.0}
    metrics["tokens/sampled"] = {19: 20.0, 20: 0.0}.get(step, 900.0)
    if step > 18:
        metrics |= {"idle/generator": 1.0, "throughput/generation": 0.0}
    return metrics


def test_an_asynchronous_run_that_is_done_shows_the_last_step_that_sampled(tmp_path: Path) -> None:
    done = write_run(tmp_path, metrics=metrics_without_sampling_at_the_end).path
    for size in ((80, 24), (140, 40)):
        text = "\n".join(draw_screen(done, *size))
        assert "generator  60.0%" in text and "generation    2,500" in text, size
    assert "generator  40.0%  ██" in "\n".join(draw_screen(done, 140, 40))
    # While the run goes on, its generator is shown as idle.
    running = write_run(tmp_path, "b", steps=19, ended=None, metrics=metrics_without_sampling_at_the_end).path
    assert "generator     0%" in "\n".join(draw_screen(running, 80, 24))


def test_engines_of_a_teacher_have_memory_and_idle_time(tmp_path: Path) -> None:
    text = "\n".join(draw_screen(write_run(tmp_path, metrics=on_engines).path, 140, 44))
    assert "teacher       3.50 GiB" in text and "teacher    75.0%  ███" in text


@pytest.mark.parametrize("metrics", [step_metrics, async_metrics, on_engines])
def test_nothing_is_cut_off_at_80_columns(tmp_path: Path, metrics: Callable[[int], dict[str, float]]) -> None:
    devices = {"device/utilization": 1.0, "memory/trainer_gib": 131.2, "memory/engine_gib": 128.4}
    run = write_run(tmp_path, metrics=lambda step: {**metrics(step), **devices}, ended=None)
    events = EventLog(run.events, now=lambda: START + 1000)
    log = f"{tmp_path}/runs/grpo--tiny--1/logs/attempt_1/trainer-0.log"
    reason = "trainer-0 died during update: killed by signal 9; its last words are in"
    events.emit("checkpoint", step=20, path=f"{tmp_path}/runs/grpo--tiny--1/checkpoints/step_20", seconds=0.3)
    events.emit("warning", what=f"{reason} {log}")
    lines = draw_screen(run.path, 80, 34)
    assert [line for line in lines if "…" in line] == []
    text = " ".join(line.strip("│").strip() for line in lines)
    assert "checkpoint of step 20 (0.30s) checkpoints/step_20" in text
    assert reason in text and log in text.replace(" ", "")


def test_a_failure_is_told_in_the_head(tmp_path: Path) -> None:
    run = write_run(tmp_path, ended=None)
    EventLog(run.events).emit("run_ended", status="failed", reason="engine 0 died\ntwice")
    assert "✘ failed: engine 0 died twice" in "\n".join(draw_screen(run.path, 80, 24))


def test_no_color_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path).path
    options = {"force_terminal": True, "color_system": "truecolor"}
    assert "\x1b[32m" in "\n".join(draw_screen(path, 80, 24, **options))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in "\n".join(draw_screen(path, 80, 24, **options))


def test_a_frame_of_a_long_run_is_cheap(tmp_path: Path) -> None:
    state = read_state(write_run(tmp_path, steps=2000).path)
    console = Console(file=io.StringIO(), width=140, height=40, force_terminal=True)
    num_calls = 0

    def count_call(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        if event in ("call", "c_call"):
            num_calls += 1

    # Calls are counted, since seconds depend on the machine. 37,000 calls took 7 ms of one core.
    old_profile = sys.getprofile()
    sys.setprofile(count_call)
    console.print(render(state, 140, 40))
    sys.setprofile(old_profile)
    assert 1000 < num_calls < 200_000


def test_the_live_view_leaves_the_screen_as_it_was_and_ends_with_the_summary(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=12, ended=None)
    out = io.StringIO()
    with LiveDashboard(run, Console(file=out, width=80, height=24, force_terminal=True)):
        until(lambda: "step 12/20" in out.getvalue())
        EventLog(run.events).emit("run_ended", status="done", next=["rlctl runs list"])
    text = out.getvalue()
    # The escapes that enter and leave the terminal's other screen.
    enter = text.index("\x1b[?1049h")
    leave = text.index("\x1b[?1049l")
    assert enter < text.index("step 12/20") < leave < text.index("Next steps")
    assert "12 of 20" in text[leave:]


def test_a_view_that_fails_says_so_at_the_end_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path, steps=3, ended=None)
    out = io.StringIO()
    widths: list[int] = []

    def fail_to_draw(state: RunState, width: int) -> NoReturn:
        widths.append(width)
        raise ZeroDivisionError

    monkeypatch.setattr("rlctl.dashboard.dashboard.header", fail_to_draw)
    with LiveDashboard(run, Console(file=out, width=80, height=24, force_terminal=True)):
        until(lambda: bool(widths))
        EventLog(run.events).emit("run_ended", status="done")
    assert "the view stopped early: ZeroDivisionError" in out.getvalue()
    assert "3 of 20" in out.getvalue()


@pytest.mark.parametrize(("theme", "background"), [("dark", "#10141c"), ("light", "#fcfcfa")])
def test_the_svg_is_self_contained(tmp_path: Path, theme: str, background: str) -> None:
    screen = render(read_state(write_run(tmp_path).path), 140, 40)
    write_svg(screen, "rlctl", tmp_path / "a.svg", 140, 40, theme)
    text = (tmp_path / "a.svg").read_text()
    assert text.startswith("<svg") and "Throughput" in text
    assert background in text
    assert "url(http" not in text and os.path.getsize(tmp_path / "a.svg") < 200_000
