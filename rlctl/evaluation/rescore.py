"""Stored answers scored again by other rewards: those of an evaluation, or of a run's rollouts.jsonl. No engine."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlctl.config.data_schema import DatasetSection
from rlctl.config.errors import ModelError
from rlctl.config.json_files import read_object
from rlctl.config.run_weights import chat_folder
from rlctl.config.schema import GrpoConfig
from rlctl.dashboard.formats import count
from rlctl.data.datasets import Row
from rlctl.data.load_data import part_of
from rlctl.data.rows import is_chat, question
from rlctl.data.tasks import Task
from rlctl.evaluation.figures import result_of
from rlctl.evaluation.store import (
    MADE_AGAIN,
    DamagedResult,
    EvaluationError,
    EvaluationFolder,
    digest_of,
    digest_of_rows,
)
from rlctl.generation.requests import Completion, RequestId, RolloutId, TurnRequest
from rlctl.grpo.metric_rows import HELD_OUT_PROMPTS
from rlctl.preflight.load import Composed
from rlctl.preflight.settled import SettledGrpo
from rlctl.rewards.base import RewardInput
from rlctl.rewards.scorer import Scorer
from rlctl.rollout.scoring import reward_input, sample_item
from rlctl.rollout.types import Rollout, RolloutGroup
from rlctl.run.run_dir import RunDir, RunDirError, find_run
from rlctl.telemetry.jsonl import Record, damaged_lines, read_records
from rlctl.telemetry.rollouts_file import index, read_groups
from rlctl.utils.files import write_whole
from rlctl.workers.user_logs import Emit


@dataclass(frozen=True)
class StoredAnswers:
    """Groups as rollouts.jsonl has them, of one step."""

    groups: list[Record]
    step: int
    # Config that they were sampled by.
    config: Path
    # Name of the set of weights, and of the data set.
    target: str
    data: str
    # Folder that results go to.
    root: Path
    # Settings that the answers were sampled with, where they are known.
    sampled: dict[str, Any]
    # A line on answers that are not in the file any more; empty for none.
    missing: str = ""


def find_answers(source: Path, root: Path, step: int | None) -> StoredAnswers:
    """Return the answers of an evaluation's folder, or the held-out ones of a run, by name or path.

    step: of a run; None: the newest with answers. Raises EvaluationError, also for answers that are damaged.
    """
    folder = source.parent if source.name == "rollouts.jsonl" else source
    try:
        evaluation = EvaluationFolder(folder).result()
    except DamagedResult as error:
        raise EvaluationError(f"{error}; nothing is scored; {MADE_AGAIN}") from None
    if evaluation is not None:
        groups = list(read_groups(folder / "rollouts.jsonl", index(folder / "rollouts.jsonl")))
        facts = (evaluation["target"], evaluation["data"])
        known = ("temperature", "top_p", "top_k", "max_new_tokens", "seed")
        sampled = {name: evaluation[name] for name in known if name in evaluation}
        return StoredAnswers(groups, evaluation["step"], folder / "config.yaml", *facts, folder.parent, sampled)
    try:
        run = RunDir(find_run(str(folder), root))
    except RunDirError as error:
        raise EvaluationError(f"{error}; or the folder of a finished evaluation") from None
    places = [place for place in index(run.rollouts) if place.purpose == "validation"]
    steps = sorted({place.step for place in places})
    if not steps or step not in (None, *steps):
        there = f"there are those of {', '.join(map(str, steps))}" if steps else "telemetry.groups_per_validation is 0?"
        which = f"of step {step}" if step is not None else "of any step"
        raise EvaluationError(f"{run.rollouts}: no held-out answers {which}; {there}")
    chosen = steps[-1] if step is None else step
    groups = list(read_groups(run.rollouts, [place for place in places if place.step == chosen]))
    target, missing = f"{run.name} step {chosen}", _missing(run, chosen, len(groups))
    return StoredAnswers(groups, chosen, run.config, target, "validation", run.path / "evals", {}, missing)


def _missing(run: RunDir, step: int, found: int) -> str:
    """Return a line if the run's config has more answers of this validation recorded than were found."""
    validations = [each for each in read_records(run.metrics) if each["kind"] == "validation" and each["step"] == step]
    try:
        most = run.recorded_config()["telemetry"]["groups_per_validation"]
        recorded = min(int(most), int(validations[-1][HELD_OUT_PROMPTS.name]))
    except (LookupError, TypeError, ValueError):
        return ""  # Nothing says how many there were.
    if found >= recorded:
        return ""
    damaged = count(damaged_lines(run.rollouts), "damaged line")
    return f"{run.rollouts}: {found} of the {recorded} tasks recorded at step {step} are there; {damaged}"


def rescore(answers: StoredAnswers, composed: Composed[SettledGrpo], to: Path | None, emit: Emit) -> dict[str, Any]:
    """Return the result of the answers under the rewards of `composed`, and keep it next to the first one.

    Raises RewardError for a reward that cannot be used, DataError where rows are gone.
    """
    config = composed.settled.config
    if config.has_turns:
        raise EvaluationError("environment: episodes are not scored again: their reward is in part the environment's")
    groups, items = _groups(answers, config)
    rows = digest_of_rows([group.task for group in groups])
    name = f"step_{answers.step}--{answers.data}--rescored-{digest_of(composed.values(), answers.target, rows)}"
    folder = EvaluationFolder((to or answers.root) / name)
    logs = folder.path / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    write_whole(folder.path / "config.yaml", composed.to_yaml())
    with Scorer(config.rewards, logs, emit) as scorer:
        scorer.try_on_sample(sample_item(groups[0].task))
        scores = iter(scorer.score(items))
    scored = [replace(g, rollouts=[replace(one, score=next(scores)) for one in g.rollouts]) for g in groups]
    facts = {"target": answers.target, "step": answers.step, "data": answers.data, "path": str(folder.path)}
    if answers.missing:
        facts["missing"] = answers.missing
        emit("warning", what=answers.missing)
    records = [_rescored(record, group) for record, group in zip(answers.groups, scored)]
    result = result_of(scored, config, rows, {**facts, **answers.sampled, "rescored": True})
    folder.finish(records, result)
    return result


def _groups(answers: StoredAnswers, config: GrpoConfig) -> tuple[list[RolloutGroup], list[RewardInput]]:
    """Return the groups without scores, and the rewards' input of each rollout."""
    tasks, texts = _tasks(answers, config), _completions(answers, config)
    groups, items = [], []
    for record, task in zip(answers.groups, tasks):
        groups.append(RolloutGroup(task, [_rollout_of_record(task, rollout) for rollout in record["rollouts"]]))
        items += [reward_input(task, None, texts(rollout)) for rollout in record["rollouts"]]
    return groups, items


def _tasks(answers: StoredAnswers, config: GrpoConfig) -> list[Task]:
    """Return the task of each group. A run's records lack the rows, which are read from the data set again."""
    rows: dict[str, dict[str, Any]] = {}
    if any("row" not in record for record in answers.groups):
        rows = {f"r{row.number}": row.values for part in part_of(config, "validation") for row in part.rows}
        if lost := [record["task"] for record in answers.groups if record["task"] not in rows]:
            raise EvaluationError(f"{len(lost)} tasks, first {lost[0]}, are no rows of data.validation any more")
    section: DatasetSection = config.data.validation if config.data.validation.path else config.data.train
    tasks = []
    for record in answers.groups:
        values = record.get("row", rows.get(record["task"], {}))
        row = Row(0, record["task"], values)
        messages = question(row, section)[0] if is_chat(row, section) else []
        tasks.append(Task(record["task"], [], record["prompt"], record["answer"], values, messages=messages))
    return tasks


def _completions(answers: StoredAnswers, config: GrpoConfig) -> Callable[[Record], str]:
    """Return a function from a rollout's record to the text that rewards are given."""
    special: list[str] = []
    if any("completion" not in rollout for record in answers.groups for rollout in record["rollouts"]):
        special = list(_special_tokens(Path(config.model.tokenizer or chat_folder(config.model.path))))

    def text(rollout: Record) -> str:
        if "completion" in rollout:
            return str(rollout["completion"])
        sampled = "".join(part for part, is_sampled in rollout["text"] if is_sampled)
        for token in special:
            sampled = sampled.replace(token, "")
        return sampled

    return text


def _special_tokens(folder: Path) -> Iterator[str]:
    """Yield the texts of the special tokens of a tokenizer. Raises EvaluationError."""
    file = folder / "tokenizer.json"
    try:
        added = read_object(file).get("added_tokens") or []
        contents = [str(each["content"]) for each in added if each.get("special")]
    except (ModelError, KeyError, TypeError, AttributeError):
        raise EvaluationError(f"{file}: not readable, and it says which tokens are no part of an answer") from None
    yield from sorted(contents, key=len, reverse=True)


def _rollout_of_record(task: Task, record: Record) -> Rollout:
    """Return a rollout of the record's length and end; its tokens are not known, and nothing reads them."""
    n = int(record["tokens"])
    ids = RequestId(RolloutId("validation", task.id, 0, int(record["index"])))
    completion = Completion(np.zeros(n, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), record["finish"])
    return Rollout.from_turn(TurnRequest(ids, [], n, 0.0, 0), completion)


def _rescored(record: Record, group: RolloutGroup) -> Record:
    rollouts: Sequence[Record] = [
        {**old, "reward": new.reward, **_score_fields(new)} for old, new in zip(record["rollouts"], group.rollouts)
    ]
    return {**record, "rollouts": rollouts}


def _score_fields(rollout: Rollout) -> Record:
    score = asdict(rollout.score) if rollout.score else {"parts": {}, "right": False, "failed": None}
    return {
        "rewards": score["parts"],
        "right": score["right"] if rollout.reward is not None else None,
        "failed": score["failed"],
    }
