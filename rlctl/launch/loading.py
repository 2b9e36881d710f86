"""The data of a run: rows are read before anything starts, and tokenized while Ray, ranks and engines start."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from rlctl.config.schema import GrpoConfig, SftConfig
from rlctl.data.chat import Chat
from rlctl.data.cursor import Drawn
from rlctl.data.datasets import DataError
from rlctl.data.ends import EndTokens
from rlctl.data.load import RunRows, load_chat, load_prompts, load_samples
from rlctl.data.preview import step_lengths
from rlctl.data.tasks import SupervisedSample, Task
from rlctl.launch.session import Session
from rlctl.models.model_files import ModelFiles
from rlctl.preflight.backend import layout_of
from rlctl.preflight.resolved import Resolved
from rlctl.run.fingerprint import digest_rows

if TYPE_CHECKING:
    from rlctl.rewards.scorer import Scorer


@dataclass(frozen=True)
class RunData(Generic[Drawn]):
    """Prompts or samples of a run, tokenized."""

    train: list[Drawn]
    validation: list[Drawn]


@dataclass(frozen=True)
class DataLoading(Generic[Drawn]):
    """The data of a run on its way. The chat is known first, since engines are made with its end tokens."""

    chat: "Future[tuple[Chat, EndTokens]]"
    data: "Future[RunData[Drawn]]"

    @classmethod
    def begin(
        cls, threads: Executor, session: Session, files: ModelFiles, load: Callable[[Chat], RunData[Drawn]]
    ) -> "DataLoading[Drawn]":
        """Start to load the chat in `threads`, then the data by `load`."""
        chat = threads.submit(_chat, session, files)
        return cls(chat, threads.submit(lambda: load(chat.result()[0])))


def _chat(session: Session, files: ModelFiles) -> tuple[Chat, EndTokens]:
    """Load the tokenizer, and tell which tokens end an answer."""
    config = session.config
    with session.starting("tokenizer"):
        chat = load_chat(config, files.folder)
        ends = chat.ends
        if isinstance(config, GrpoConfig):
            ends = ends.with_further(config.generation.stop_token_ids, chat.tokenizer)
    session.events.emit("data", what=f"answers end at {ends}")
    for warning in ends.warnings:
        session.events.emit("warning", what=warning)
    return chat, ends


def load_run_prompts(
    session: Session, config: GrpoConfig, files: ModelFiles, rows: RunRows, scorer: "Scorer", chat: Chat
) -> RunData[Task]:
    """Tokenize the prompts, and try the rewards on the first one. Raises DataError or RewardError."""
    from rlctl.rollout.scoring import sample_item

    length, answer = Resolved(config).max_length(files.max_length), config.generation.max_new_tokens
    found: dict[str, list[Task]] = {"validation": []}
    with session.starting("data"):
        for name, section, listed in rows.parts(config.data):
            found[name], report = load_prompts(config, section, chat, listed)
            session.events.emit("data", what=f"{name}: {report}")
            check_room(found[name], answer, length)
    session.depend_on_rows(digest_rows(found["train"]))
    with session.starting("rewards"):
        scorer.try_on_sample(sample_item(found["train"][0]))
    return RunData(found["train"], found["validation"][: config.validation.max_prompts])


def load_run_samples(
    session: Session, config: SftConfig, files: ModelFiles, rows: RunRows, chat: Chat
) -> RunData[SupervisedSample]:
    """Tokenize the samples, and tell how they pack. Raises DataError."""
    from rlctl.training.micro_batching import packing

    length = Resolved(config).max_length(files.max_length)
    found: dict[str, list[SupervisedSample]] = {"validation": []}
    with session.starting("data"):
        for name, section, listed in rows.parts(config.data):
            found[name], report = load_samples(config, section, chat, listed, length)
            session.events.emit("data", what=f"{name}: {report}")
        shards = layout_of(config.trainer).data
        packs = packing(step_lengths(found["train"], config), shards, config.trainer.micro_batch_tokens)
        session.events.emit("data", what=f"packing: {packs}")
    session.depend_on_rows(digest_rows(found["train"]))
    return RunData(found["train"], found["validation"][: config.validation.max_prompts])


def check_room(prompts: list[Task], answer: int, length: int) -> None:
    """Raise DataError if a prompt leaves less than `answer` tokens of the model's `length`."""
    longest = max(prompts, key=lambda prompt: len(prompt.tokens))
    if len(longest.tokens) + answer > length:
        raise DataError(
            f"prompt {longest.id} has {len(longest.tokens)} tokens; with generation.max_new_tokens={answer} that is "
            f"above the longest sequence, {length}: data.max_prompt_length={length - answer} leaves such prompts out"
        )
