"""Scoring of stored answers by other rewards, without an engine. Answers of an evaluation, or of rollouts.jsonl."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
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
    refuse_reward_models,
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
from rlctl.sandbox.open_sandbox import use_section
from rlctl.telemetry.jsonl import Record, damaged_lines, read_records
from rlctl.telemetry.rollouts_file import index, read_groups
from rlctl.utils.files import write_whole
from rlctl.workers.user_logs import Emit


@dataclass(frozen=True)
class StoredAnswers:
    """Stored answers of one step."""

    # Records of groups in the form of rollouts.jsonl.
    groups: list[Record]
    step: int
    # File of the config with which the answers were sampled.
    config: Path
    # Name of the set of weights.
    target: str
    # Name of the data set.
    data: str
    # Folder for the results.
    root: Path
    # Known settings with which the answers were sampled.
    sampled: dict[str, Any]
    # A line on answers that the file has lost; empty if it has all.
    missing: str = ""


def find_answers(source: Path, root: Path, step: int | None) -> StoredAnswers:
    """Return the answers in an evaluation's folder, or the held-out answers of a run.

    source: folder of an evaluation, or name or path of a run. root: folder of runs. step: step of the run; None means
    the newest step with answers. Raises EvaluationError, also for damaged answers.
    """
    folder = source.parent if source.name == "rollouts.jsonl" else source
    try:
        evaluation = EvaluationFolder(folder).result()
    except DamagedResult as error:
        raise EvaluationError(f"{error}; nothing is scored; {MADE_AGAIN}") from None
    if evaluation is not None:
        groups = list(read_groups(folder / "rollouts.jsonl", index(folder / "rollouts.jsonl")))
        settings = ("temperature", "top_p", "top_k", "max_new_tokens", "seed")
        return StoredAnswers(
            groups=groups,
            step=evaluation["step"],
            config=folder / "config.yaml",
            target=evaluation["target"],
            data=evaluation["data"],
            root=folder.parent,
            sampled={name: evaluation[name] for name in settings if name in evaluation},
        )
    try:
        run = RunDir(find_run(str(folder), root))
    except RunDirError as error:
        raise EvaluationError(f"{error}; or the folder of a finished evaluation") from None
    places = [place for place in index(run.rollouts) if place.purpose == "validation"]
    steps = sorted({place.step for place in places})
    if not steps or (step is not None and step not in steps):
        hint = f"there are those of {', '.join(map(str, steps))}" if steps else "telemetry.groups_per_validation is 0?"
        which = f"of step {step}" if step is not None else "of any step"
        raise EvaluationError(f"{run.rollouts}: no held-out answers {which}; {hint}")
    chosen = steps[-1] if step is None else step
    groups = list(read_groups(run.rollouts, [place for place in places if place.step == chosen]))
    return StoredAnswers(
        groups=groups,
        step=chosen,
        config=run.config,
        target=f"{run.name} step {chosen}",
        data="validation",
        root=run.path / "evals",
        sampled={},
        missing=_lost_answers(run, chosen, len(groups)),
    )


def _lost_answers(run: RunDir, step: int, num_groups: int) -> str:
    """Return a line if rollouts.jsonl has fewer groups of a validation than the run recorded; empty if it has all."""
    records = read_records(run.metrics)
    validations = [record for record in records if record["kind"] == "validation" and record["step"] == step]
    try:
        limit = int(run.recorded_config()["telemetry"]["groups_per_validation"])
        recorded = min(limit, int(validations[-1][HELD_OUT_PROMPTS.name]))
    except (LookupError, TypeError, ValueError):
        return ""  # The run has not recorded how many groups there must be.
    if num_groups >= recorded:
        return ""
    damaged = count(damaged_lines(run.rollouts), "damaged line")
    return f"{run.rollouts}: {num_groups} of the {recorded} tasks recorded at step {step} are there; {damaged}"


def rescore(answers: StoredAnswers, composed: Composed[SettledGrpo], to: Path | None, emit: Emit) -> dict[str, Any]:
    """Score answers by the rewards of a config; write the result to a new folder in `to` and return it.

    to: None means the folder of the first result. Raises EvaluationError, RewardError for a reward that cannot be used,
    and DataError for rows that cannot be read.
    """
    config = composed.settled.config
    if config.has_turns:
        raise EvaluationError("environment: episodes are not scored again: their reward is in part the environment's")
    refuse_reward_models(config)
    groups, inputs = _read_groups(answers, config)
    rows = digest_of_rows([group.task for group in groups])
    name = f"step_{answers.step}--{answers.data}--rescored-{digest_of(composed.values(), answers.target, rows)}"
    folder = EvaluationFolder((to or answers.root) / name)
    logs = folder.path / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    write_whole(folder.path / "config.yaml", composed.to_yaml())
    use_section(config.sandbox)
    with Scorer(config.rewards, logs, emit) as scorer:
        scorer.try_on_sample(sample_item(groups[0].task))
        scores = iter(scorer.score(inputs, group_sizes=[len(group.rollouts) for group in groups]))
    scored = []
    for group in groups:
        rollouts = [replace(rollout, score=next(scores)) for rollout in group.rollouts]
        scored.append(replace(group, rollouts=rollouts))
    facts = {"target": answers.target, "step": answers.step, "data": answers.data, "path": str(folder.path)}
    if answers.missing:
        facts["missing"] = answers.missing
        emit("warning", what=answers.missing)
    records = [_put_scores(record, group) for record, group in zip(answers.groups, scored)]
    result = result_of(scored, config, rows, {**facts, **answers.sampled, "rescored": True})
    folder.finish(records, result)
    return result


def _read_groups(answers: StoredAnswers, config: GrpoConfig) -> tuple[list[RolloutGroup], list[RewardInput]]:
    """Return the groups without scores, and the input of the rewards for each rollout."""
    completion_text = _completion_reader(answers, config)
    groups: list[RolloutGroup] = []
    inputs: list[RewardInput] = []
    for record, task in zip(answers.groups, _read_tasks(answers, config)):
        groups.append(RolloutGroup(task, [_rollout_of_record(task, rollout) for rollout in record["rollouts"]]))
        inputs += [reward_input(task, None, completion_text(rollout)) for rollout in record["rollouts"]]
    return groups, inputs


def _read_tasks(answers: StoredAnswers, config: GrpoConfig) -> list[Task]:
    """Return the task of each group. A run's records have no rows, so the rows are read from the data set."""
    rows: dict[str, dict[str, Any]] = {}
    if any("row" not in record for record in answers.groups):
        for part in part_of(config, "validation"):
            rows |= {f"r{row.number}": row.values for row in part.rows}
        if lost := [record["task"] for record in answers.groups if record["task"] not in rows]:
            raise EvaluationError(f"{len(lost)} tasks, first {lost[0]}, are no rows of data.validation any more")
    section: DatasetSection = config.data.validation if config.data.validation.path else config.data.train
    tasks = []
    for record in answers.groups:
        values = record.get("row", rows.get(record["task"], {}))
        row = Row(number=0, origin=record["task"], values=values)
        messages = question(row, section)[0] if is_chat(row, section) else []
        task = Task(
            id=record["task"],
            tokens=[],
            text=record["prompt"],
            answer=record["answer"],
            row=values,
            messages=messages,
        )
        tasks.append(task)
    return tasks


def _completion_reader(answers: StoredAnswers, config: GrpoConfig) -> Callable[[Record], str]:
    """Return a function that returns the text for the rewards from a rollout's record."""
    # Texts of the special tokens. Only records of evaluations have `completion`; for others these texts are removed.
    special: list[str] = []
    rollouts = chain.from_iterable(record["rollouts"] for record in answers.groups)
    if any("completion" not in rollout for rollout in rollouts):
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
        contents = [str(token["content"]) for token in added if token.get("special")]
    except (ModelError, KeyError, TypeError, AttributeError):
        raise EvaluationError(f"{file}: not readable, and it says which tokens are no part of an answer") from None
    yield from sorted(contents, key=len, reverse=True)


def _rollout_of_record(task: Task, record: Record) -> Rollout:
    """Return a rollout with a record's length and finish reason. Its token ids are zeros, which nobody reads."""
    length = int(record["tokens"])
    request_id = RequestId(RolloutId("validation", task.id, 0, int(record["index"])))
    completion = Completion(
        tokens=np.zeros(length, np.int32),
        log_probs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        finish=record["finish"],
    )
    request = TurnRequest(request_id, prompt_tokens=[], max_new_tokens=length, temperature=0.0, seed=0)
    return Rollout.from_turn(request, completion)


def _put_scores(record: Record, group: RolloutGroup) -> Record:
    """Return a group's record with its scores replaced by those of `group`."""
    rollouts: list[Record] = []
    for rollout_record, rollout in zip(record["rollouts"], group.rollouts):
        rollouts.append({**rollout_record, "reward": rollout.reward, **_score_fields(rollout)})
    return {**record, "rollouts": rollouts}


def _score_fields(rollout: Rollout) -> Record:
    score = asdict(rollout.score) if rollout.score else {"parts": {}, "right": False, "failed": None}
    return {
        "rewards": score["parts"],
        "right": score["right"] if rollout.reward is not None else None,
        "failed": score["failed"],
    }
