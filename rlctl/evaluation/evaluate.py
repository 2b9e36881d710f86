"""An evaluation: held-out tasks of several data sets, sampled and scored by the code of a run's validation."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.data.chat import Chat
from rlctl.data.load_data import end_tokens, load_chat
from rlctl.data.tasks import Task
from rlctl.evaluation.figures import result_of
from rlctl.evaluation.store import DamagedResult, EvaluationFolder, digest_of, digest_of_rows, refuse_reward_models
from rlctl.evaluation.target import Target, digest_of_weights
from rlctl.grpo.group_record import group_records
from rlctl.grpo.validation import Validation
from rlctl.launch.sampling import decoder, held_out_tasks, make_runner
from rlctl.models.model_files import ModelFiles
from rlctl.preflight.load import Composed
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.settled import SettledGrpo
from rlctl.rewards.scorer import Scorer
from rlctl.rollout.episode_setup import environment_pool, set_up
from rlctl.rollout.scoring import GroupScorer, sample_item
from rlctl.rollout.types import RolloutGroup
from rlctl.sandbox.open_sandbox import use_section
from rlctl.utils.files import write_whole
from rlctl.workers.user_logs import Emit

# Most damaged parts with a warning each.
_MOST_LINES = 5
# Called with (name of the data set, number of finished tasks, number of its tasks).
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DataSet:
    """Tasks to evaluate, and the folder for their answers."""

    name: str
    settled: SettledGrpo
    tasks: list[Task]
    folder: EvaluationFolder
    # Digest of the rows. Only evaluations with equal rows are compared.
    rows: str


class Evaluation:
    """Evaluation of one set of weights. Raises DataError, ModelError.

    settings: config of each data set, by the data set's name. The configs differ only in data.validation.
    """

    def __init__(self, target: Target, settings: Mapping[str, Composed[SettledGrpo]], root: Path, emit: Emit) -> None:
        self.target = target
        self._emit = emit
        first = next(iter(settings.values())).settled.config
        refuse_reward_models(first)
        self._files = ModelFiles.prepare(first.model, root, first.run.seed)
        self._chat = load_chat(first, self._files.chat)
        self._stops = end_tokens(first, self._chat).stops
        weights = digest_of_weights(Path(self._files.adapter or self._files.folder))
        self.sets = [self._make_data_set(name, composed, root, weights) for name, composed in settings.items()]

    def run(self, save_every: int, progress: Progress) -> list[dict[str, Any]]:
        """Sample and score the missing answers; return the result of each data set.

        Answers that an earlier call saved are not sampled again. save_every: number of tasks in each saved part. Raises
        PlacementError, RewardError, UnusableEnvironmentError, EvaluationError, RuntimeError.
        """
        unfinished = [data for data in self.sets if not self._has_result(data.folder)]
        if unfinished:
            self._sample_sets(unfinished, save_every, progress)
        results = [data.folder.result() for data in self.sets]
        return [result for result in results if result]

    def _has_result(self, folder: EvaluationFolder) -> bool:
        """Return True if a folder has a result without damage. Warn of a damaged result, which is computed again."""
        try:
            return folder.result() is not None
        except DamagedResult as error:
            self._emit("warning", what=f"{error}; the result is made again from its answers")
            return False

    def _sample_sets(self, sets: Sequence[DataSet], save_every: int, progress: Progress) -> None:
        """Sample and score the missing answers of these data sets, and write their results."""
        # Imported here, because the import is slow and finished results do not need it.
        from rlctl.launch.engines import engines

        # All sets have the same settings but for their rows. The logs are in the folder of the first set.
        settled = sets[0].settled
        logs = sets[0].folder.path / "logs"
        config = settled.config
        logs.mkdir(parents=True, exist_ok=True)
        use_section(config.sandbox)
        for data in sets:
            with data.folder.claim():
                self._warn_damage(data.folder.drop_damaged())
        with ExitStack() as stack:
            environments = None
            setup = None
            if config.has_turns:
                # The pool starts before Ray, because Ray changes this process's environment variables.
                environments = stack.enter_context(environment_pool(config, logs, self._emit))
                setup = set_up(config, environments, self._chat, sets[0].tasks[0])
            scorer = stack.enter_context(
                Scorer(config.rewards, logs, self._emit, episodes=config.environment.is_enabled)
            )
            if config.rewards:
                scorer.try_on_sample(sample_item(sets[0].tasks[0]))
            score = GroupScorer(scorer, decoder(self._chat.tokenizer, special=False))
            # No engine is started if all answers are saved, and only the result is missing.
            if any(data.folder.missing(len(data.tasks), save_every) for data in sets):
                events = environments.events if environments else None
                started = engines(settled, self._files, self._stops, self.target.step, logs, self._emit, events)
                dispatcher = stack.enter_context(started)
                runner = make_runner(settled, self._chat, dispatcher, environments, setup, trains=False)
                stack.callback(runner.close)
                for data in sets:
                    validation = Validation(data.settled.config, dispatcher, runner, score, data.tasks)
                    self._sample_missing(data, validation, save_every, progress)
        for data in sets:
            self._finish_set(data)

    def _sample_missing(self, data: DataSet, validation: Validation, save_every: int, progress: Progress) -> None:
        """Sample, score and save the groups that are missing in the folder."""
        with data.folder.claim():
            count = len(data.tasks)
            missing = data.folder.missing(count, save_every)
            num_finished = count - sum(map(len, missing))
            progress(data.name, num_finished, count)
            for places in missing:
                data.folder.save(places, validation.groups(self.target.step, places))
                num_finished += len(places)
                progress(data.name, num_finished, count)

    def _warn_damage(self, damage: Sequence[str]) -> None:
        """Warn of damaged parts: one line for each of the first `_MOST_LINES`, and the number of the others."""
        for line in damage[:_MOST_LINES]:
            self._emit("warning", what=line)
        if len(damage) > _MOST_LINES:
            self._emit("warning", what=f"{len(damage) - _MOST_LINES} more parts are damaged and sampled again")

    def _finish_set(self, data: DataSet) -> None:
        """Write rollouts.jsonl and the result of a data set, all of whose answers are saved."""
        groups = data.folder.groups(data.tasks)
        facts = {"target": self.target.name, "step": self.target.step, "data": data.name}
        facts |= {"model": self.target.model, "path": str(data.folder.path)}
        records = answer_records(groups, self._chat, self.target.step)
        data.folder.finish(records, result_of(groups, data.settled.config, data.rows, facts))

    def _make_data_set(self, name: str, composed: Composed[SettledGrpo], root: Path, weights: str) -> DataSet:
        """Read the tasks of a data set, and create its folder in `root`. weights: digest of the weights."""
        settled = composed.settled.settle_on(RunMachine(), self._files.facts.sizes)
        tasks = held_out_tasks(settled, self._chat, self._emit)
        rows_digest = digest_of_rows(tasks)
        weights_name = f"step_{self.target.step}" if self.target.run else self.target.name
        path = root / f"{weights_name}--{name}--{digest_of(composed.values(), weights, rows_digest)}"
        path.mkdir(parents=True, exist_ok=True)
        write_whole(path / "config.yaml", composed.to_yaml())
        return DataSet(name, settled, tasks, EvaluationFolder(path), rows_digest)


def answer_records(groups: Sequence[RolloutGroup], chat: Chat, step: int) -> list[dict[str, Any]]:
    """Return the groups as records of rollouts.jsonl. Each rollout also has `completion`, the text for its rewards."""
    decode_for_rewards = decoder(chat.tokenizer, special=False)
    records = group_records(groups, decoder(chat.tokenizer, special=True))
    for group, record in zip(groups, records):
        texts = decode_for_rewards([rollout.sampled_tokens.tolist() for rollout in group.rollouts])
        for rollout, text in zip(record["rollouts"], texts):
            rollout["completion"] = text
        record["row"] = group.task.row
    return [{"kind": "group", "step": step, "purpose": "validation", **record} for record in records]
