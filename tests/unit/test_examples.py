"""examples/: each is short, says what it is in a page of ten lines, and does it; its table is true.

`test_readmes.py` runs the commands of the pages. Whole runs are in `tests/system/test_examples.py`.
"""

import asyncio
import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any, ClassVar

import nbformat
import numpy as np
import pytest

import rlctl
from rlctl.config.builtin import EXAMPLES, example_names
from rlctl.config.load_cluster import load_cluster
from rlctl.config.telemetry_schema import UserTrackerSection
from rlctl.environments.contract import read_contract
from rlctl.grpo.losses.check import check_loss, one_token, outcome
from rlctl.launch.prepare import RunRequest, prepare
from rlctl.telemetry.events import EventLog
from rlctl.telemetry.jsonl import read_records
from rlctl.telemetry.trackers.base import open_trackers
from tests.scored import columns, first_tokens
from tests.unit.grpo.losses.drawn import load_loss

MOST_LINES = 60
MOST_LINES_OF_A_PAGE = 12
RECIPES_BY_EXAMPLE = {path.parent.name: path for path in sorted(EXAMPLES.glob("*/recipe.yaml"))}


def code_cells(path: Path) -> list[str]:
    notebook = nbformat.read(path, as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def num_lines(path: Path) -> int:
    """Return the lines of a program, a recipe or a notebook's cells; 0 for a page and for rows."""
    if path.suffix == ".ipynb":
        return sum(len(source.splitlines()) for source in code_cells(path))
    return len(path.read_text().splitlines()) if path.suffix in (".py", ".yaml", ".sh") else 0


def table() -> dict[str, tuple[str, int, str]]:
    """Return {example: (its file, its lines, its command)} of the table."""
    rows = re.findall(r"(?m)^\| \[.+\]\((.+)/README\.md\) \| `(.+)` \| (\d+) \| `(.+)` \|$", page_of(""))
    return {name: (file, int(lines), command) for name, file, lines, command in rows}


def page_of(name: str) -> str:
    return (EXAMPLES / name / "README.md").read_text()


def load(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES / name)
    return import_module(module)


def test_the_table_has_each_example_with_its_file_lines_and_command() -> None:
    rows = table()
    assert sorted(rows) == example_names()
    for name, (file, lines, command) in rows.items():
        folder = EXAMPLES / name
        assert (folder / file).is_file()
        assert lines == sum(num_lines(path) for path in folder.iterdir() if path.is_file()) <= MOST_LINES, name
        assert command in [line.partition("  ")[0] for line in page_of(name).splitlines()]


@pytest.mark.parametrize("name", example_names())
def test_a_page_is_ten_lines_with_commands_and_a_link_to_more(name: str) -> None:
    text = page_of(name)
    assert len(text.splitlines()) <= MOST_LINES_OF_A_PAGE
    assert text.count("```") == 2 and "](../../" in text


@pytest.mark.parametrize("name", sorted(RECIPES_BY_EXAMPLE.keys() - {"model", "reward-model", "judge"}))
def test_a_recipe_loads_and_its_parts_take_the_first_row(name: str, home: Path) -> None:
    recipe = RECIPES_BY_EXAMPLE[name]
    rlctl.check(recipe, try_rewards=True, try_environments=True)


def test_the_judge_finds_the_rows_own_answer_right(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), load("judge", "server", monkeypatch).Judge) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"rewards.0.base_url=http://127.0.0.1:{server.server_port}/v1"
        checked = rlctl.check(RECIPES_BY_EXAMPLE["judge"], [address], try_rewards=True)
        server.shutdown()
    assert any("judge 1; its own answer is right" in note for note in checked.notes)


def test_the_reward_is_nearer_to_1_for_a_nearer_number(monkeypatch: pytest.MonkeyPatch) -> None:
    near = load("reward", "near", monkeypatch).near
    scores = [near("40+9=", completion, "49", {}) for completion in ("49", " 44", "47", "9", "-49", "", "=")]
    assert scores == [1.0, 0.75, 0.9, 0.0, 0.0, 0.0, 0.0]


def test_the_environment_charges_each_further_use_and_pays_a_right_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = load("environment", "priced_calculator", monkeypatch).PricedCalculator
    contract = read_contract(kind, {"price": 0.25})
    assert contract.problems == []
    assert [tool["function"]["name"] for tool in contract.tools] == ["answer", "calculate"]
    game = kind(price=0.25)
    assert "12 * 9" in game.reset(expression="12 * 9")
    assert game.get_reward() == {"right": 0.0, "price": 0.0}
    assert (game.calculate("12 * 9"), game.calculate("1 + 1")) == ("108", "2")
    assert game.get_reward() == {"right": 0.0, "price": -0.25}
    game.answer(108)
    assert game.get_reward() == {"right": 1.0, "price": -0.25}


class Guesser(BaseHTTPRequestHandler):
    """A model that answers with the next of its guesses."""

    guesses: ClassVar[list[str]] = []
    requests: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append((self.path, self.headers["Authorization"], body["messages"]))
        message = {"role": "assistant", "content": self.guesses.pop(0)}
        answer = json.dumps({"choices": [{"message": message}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Guesser) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


@dataclass
class TaskOfARow:
    """A task as agents and rollout functions are given it."""

    row: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    answer: str | None = None


def test_the_agent_plays_by_the_hints_until_it_wins_or_has_guessed_five_times(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load("agent", "guesser", monkeypatch).run
    task = TaskOfARow(row={"low": 1, "high": 15, "secret": 4})
    Guesser.guesses[:] = ["8", "it is 2.", "4"]
    Guesser.requests.clear()
    assert run(task, address, "secret-key") == pytest.approx(1.2)
    paths = {path for path, _, _ in Guesser.requests}
    keys = {key for _, key, _ in Guesser.requests}
    assert (paths, keys) == ({"/v1/chat/completions"}, {"Bearer secret-key"})
    last_messages = Guesser.requests[-1][2]
    assert [message["content"] for message in last_messages[1:]] == ["8", "lower", "it is 2.", "higher"]
    Guesser.guesses[:] = ["1"] * 5
    assert run(task, address, "secret-key") == 0.0 and Guesser.guesses == []
    Guesser.guesses[:] = ["none"]
    assert run(task, address, "secret-key") == 0.0


def test_the_loss_keeps_the_contract_and_bounds_the_weight_of_bad_answers_alone() -> None:
    loss = load_loss(f"grpo.loss.name={EXAMPLES / 'loss/topr.py'}:Topr", "grpo.loss.proximal=rollout")
    assert [finding for finding in check_loss(loss) if finding.problem] == []
    # Arguments: log pi, log mu, advantage. The gradient by log pi is -w A.
    for log_prob, rollout_log_prob, advantage, expected in (
        (-1.0, -2.0, 0.5, -0.5),
        (-2.0, -1.0, 0.5, -0.5),
        (-1.0, -2.0, -0.5, 0.5),
        (-2.0, -1.0, -0.5, 0.5 * np.exp(-1)),
    ):
        row = one_token(log_prob, rollout_log_prob, advantage)
        assert outcome(loss, [[row]], [row]).gradients[0].item() == pytest.approx(expected)


def test_the_advantage_counts_a_task_less_the_more_of_its_rollouts_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    advantage = load("advantage", "focal", monkeypatch).Focal(focus=2.0)
    rollouts = columns(
        rewards=[1, 0, 0, 0, 1, 1, 1, 0, 1, 1],
        groups=[0, 0, 0, 0, 7, 7, 7, 7, 3, 3],
        right=[True, False, False, False, True, True, True, False, True, True],
    )
    hard = [0.75 * 0.75**2, *[-0.25 * 0.75**2] * 3]
    easy = [*[0.25 * 0.25**2] * 3, -0.75 * 0.25**2]
    assert first_tokens(advantage, rollouts) == pytest.approx([*hard, *easy, 0, 0])


@dataclass
class Completions:
    """A policy of a rollout function that gives its completions in order."""

    completions: list[list[int]]
    prompts: list[list[int]] = field(default_factory=list)

    async def sample(self, tokens: list[int]) -> "Completions":
        self.prompts.append(tokens)
        self.tokens = self.completions.pop(0)
        return self


def test_the_rollout_function_goes_back_to_the_first_token_of_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("rollout-function", "backtrack", monkeypatch)
    four, nine, end = (module.TOKENIZER.token_to_id(token) for token in ("4", "9", "<eos>"))
    task = TaskOfARow(tokens=[20, 21], answer="49")
    for completions, reward, prompts in (
        ([[four, nine, end]], 1.0, [[20, 21]]),
        ([[four, four, end], [nine, end]], 0.5, [[20, 21], [20, 21, four]]),
        ([[nine, four, end], [nine, end]], 0.0, [[20, 21], [20, 21, nine]]),
        ([[end], [four, nine, end]], 0.5, [[20, 21], [20, 21]]),
    ):
        policy = Completions(completions)
        assert asyncio.run(module.play(task, policy)) == reward
        assert policy.prompts == prompts


def test_the_tracker_keeps_metrics_and_rollouts_and_replaces_repeated_steps(tmp_path: Path) -> None:
    file = EXAMPLES / "tracker/sqlite_tracker.py"
    section = UserTrackerSection(f"{file}:SqliteTracker", {"file": "sums.sqlite"})
    rollouts = [{"index": 0, "text": [["4", True], ["9", True]], "reward": 1.0}]
    rollouts.append({"index": 1, "text": [["94", True]], "reward": 0.0})
    for loss in (0.5, 0.25):
        (tracker,) = open_trackers([section], tmp_path, {}, EventLog(tmp_path / "events.jsonl"))
        tracker.write("step", 3, {"loss/policy": loss})
        tracker.samples("train", 3, [{"task": "e0-r1", "rollouts": rollouts}])
        tracker.close()
    assert read_records(tmp_path / "events.jsonl") == []
    connection = sqlite3.connect(tmp_path / "sums.sqlite")
    assert connection.execute("select * from metrics").fetchall() == [("step", 3, "loss/policy", 0.25)]
    assert connection.execute("select number, text from rollouts").fetchall() == [(0, "49"), (1, "94")]
    command = [sys.executable, str(file), str(tmp_path / "sums.sqlite")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == ["3\te0-r1\t94\t0.0", "3\te0-r1\t49\t1.0"]


def test_the_model_has_facts_and_its_recipe_loads(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("model", "make_model", monkeypatch)
    (home / "recipe.yaml").write_text(RECIPES_BY_EXAMPLE["model"].read_text())
    module.LlamaForCausalLM(module.SHAPE).save_pretrained(home / module.FOLDER)
    module.TOKENIZER.save_pretrained(home / module.FOLDER)
    prepared = prepare(RunRequest("sft", "recipe.yaml", []), "planned")
    assert prepared.problems == []


def test_the_sweep_checks_a_config_of_each_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = load("sweep", "sweep", monkeypatch)
    monkeypatch.setattr("sys.argv", ["sweep.py", "grpo.num_steps=7"])
    configs = [rlctl.check("grpo-tiny", sweep.overrides_of(rate)).config for rate in sweep.RATES]
    assert [config["trainer"]["optimizer"]["lr"] for config in configs] == list(sweep.RATES)
    assert len({config["run"]["name"] for config in configs}) == len(sweep.RATES)
    assert {config["grpo"]["num_steps"] for config in configs} == {7}


def test_the_notebook_is_one_without_outputs_and_its_config_has_no_problem(home: Path) -> None:
    path = EXAMPLES / "notebook/sums.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if "outputs" in cell)
    cells = code_cells(path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for source in cells[:2]:
        exec(compile(source, "cell", "exec"), namespace)
    assert namespace["checked"].config["grpo"]["num_steps"] == 40
    for source in cells[2:]:
        compile(source, "cell", "exec")


@pytest.mark.parametrize("name", ["sft-to-export", "judge"])
def test_the_script_is_one_of_bash(name: str) -> None:
    subprocess.run(["bash", "-n", str(EXAMPLES / name / "run.sh")], check=True)


def test_both_clusters_have_two_nodes() -> None:
    assert load_cluster(str(EXAMPLES / "two-nodes/two-nodes.yaml"), []).nodes == 2
    assert load_cluster(str(EXAMPLES / "two-nodes/lab.yaml"), []).hosts == ["gpu1", "gpu2"]
