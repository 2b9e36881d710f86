"""rlctl/README.md: its examples run as they are printed there, and the names it uses exist."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.telemetry_schema import UserTrackerSection
from rlctl.grpo.losses.check import check_loss, one_token, outcome
from rlctl.models.model_sizes import read_sizes
from rlctl.preflight.load import load
from rlctl.telemetry.events import EventLog
from rlctl.telemetry.jsonl import read_records
from rlctl.telemetry.trackers.base import open_trackers
from rlctl.training.rank import TrainerRank
from tests.scored import columns, first_tokens
from tests.unit.grpo.losses.drawn import load_loss
from tests.unit.test_house import FILES, ORDER, PACKAGE, tree

README = (PACKAGE / "README.md").read_text()


def block(title: str) -> str:
    """Return the Python example of a section."""
    (code,) = re.findall(rf"^### {title}\n.*?```python\n(.*?)```", README, re.MULTILINE | re.DOTALL)
    assert isinstance(code, str) and len(code.splitlines()) < 30
    return code


def example(title: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the object of a section's example. It is imported from a file, so that it can be pickled."""
    module = f"readme_{name.lower()}"
    (folder / f"{module}.py").write_text(block(title))
    monkeypatch.syspath_prepend(folder)
    return getattr(__import__(module), name)


def test_the_reward_scores_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brevity = example("A reward", "brevity", tmp_path, monkeypatch)
    assert [brevity("", "x" * length, None, {}) for length in (0, 50, 100, 200)] == [0, -0.5, -1, -1]


def test_the_tracker_writes_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tracker.py").write_text(block("A tracker"))
    monkeypatch.chdir(tmp_path)
    section = UserTrackerSection("my_tracker:CsvTracker", {"digits": 2})
    (tracker,) = open_trackers([section], tmp_path, {}, EventLog(tmp_path / "events.jsonl"))
    tracker.write("step", 3, {"loss/policy": 0.123})
    tracker.close()
    assert (tmp_path / "metrics.csv").read_text() == "step,3,loss/policy,0.12\n"
    assert read_records(tmp_path / "events.jsonl") == []


def test_the_backend_answers_what_preflight_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = example("A training backend", "ReplicatedBackend", tmp_path, monkeypatch)()
    trainer = load("sft", None, ["trainer.num_ranks=2"]).config.trainer
    sizes = (
        '{"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16, '
    )
    sizes += '"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64}'
    (tmp_path / "config.json").write_text(sizes)
    model = read_sizes(tmp_path / "config.json")
    assert backend.layout(trainer).data == 2
    assert backend.shard_counts(trainer).rank_parameters(model) == model.parameters
    assert sum(state.device for state in backend.states(trainer, model, 4).values()) == 16 * model.parameters
    assert list(backend.check_layout(trainer, model, 8)) == []
    section = README[README.index("`TrainerRank`") : README.index("Everything that both")]
    names = re.findall(r"`(\w+)`", section)
    assert set(names) - {"TrainerRank"} == TrainerRank.__abstractmethods__


def test_the_advantage_ranks_within_each_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert block("An advantage") == (PACKAGE.parent / "tests/plugins/rank_advantage.py").read_text()
    advantage = example("An advantage", "RankAdvantage", tmp_path, monkeypatch)(most=2.0)
    rollouts = columns(rewards=[5.0, 1, 2, 7, 7, 9], groups=[0, 0, 0, 4, 4, 8])
    assert first_tokens(advantage, rollouts).tolist() == [2, -2, 0, 0, 0, 0]


def test_the_loss_is_the_one_that_a_run_trains_and_keeps_the_contract() -> None:
    file = Path(__file__).parents[1] / "plugins" / "my_loss.py"
    assert block("A loss").partition("\n")[2] == file.read_text()
    loss = load_loss(f"grpo.loss.name={file}:Sapo", "grpo.loss.tau_down=2")
    assert [finding for finding in check_loss(loss) if finding.problem] == []
    # On policy the gradient is that of REINFORCE, for any tau.
    row = one_token(-1.0, -1.0, -1.5)
    assert outcome(loss, [[row]], [row]).gradients[0].item() == pytest.approx(1.5)


def test_its_table_has_every_folder_from_top_to_bottom() -> None:
    rows = re.findall(r"^\| (`\w+/`(?:, `\w+/`)*) \|", README, re.MULTILINE)
    listed = [tuple(re.findall(r"\w+", row)) for row in rows]
    existing = [tuple(folder for folder in folders if (PACKAGE / folder).is_dir()) for folders in ORDER]
    assert listed == [folders for folders in existing if folders]


def test_the_classes_and_files_that_it_names_exist() -> None:
    classes = set[str]()
    for path in FILES:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                classes.add(node.name)
            elif isinstance(node, ast.Assign):
                classes |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    names = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)*)(?:\.\w+)?`", prose))
    assert names - classes == set()
    paths = {path for path in re.findall(r"`([\w/]+/[\w/]*\.(?:py|md))`", prose) if "NAME" not in path}
    root = PACKAGE.parent
    assert [path for path in paths if not ((PACKAGE / path).exists() or (root / path).exists())] == []
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert [link for link in links if not (PACKAGE / link).exists()] == []
