"""The data of a run: rows are read before anything starts, and tokenized while Ray, ranks and engines start."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic

from rlctl.config.schema import RunConfig
from rlctl.data.chat import Chat
from rlctl.data.cursor import Drawn
from rlctl.data.ends import EndTokens
from rlctl.data.load import end_tokens, load_chat
from rlctl.launch.session import Session
from rlctl.models.model_files import ModelFiles


@dataclass(frozen=True)
class RunData(Generic[Drawn]):
    """Tasks or samples of a run, tokenized."""

    train: list[Drawn]
    validation: list[Drawn]


@dataclass(frozen=True)
class DataLoading(Generic[Drawn]):
    """The data of a run while it loads. The chat is known first, since engines are made with its end tokens."""

    chat: "Future[tuple[Chat, EndTokens]]"
    data: "Future[RunData[Drawn]]"


def load_run_chat(session: Session, config: RunConfig, files: ModelFiles) -> tuple[Chat, EndTokens]:
    """Load the tokenizer by a run's config or its recipe's, and find the tokens that end an answer."""
    whose = "" if config.kind == session.config.kind else "validation.recipe: "
    with session.starting(f"{whose}tokenizer"):
        chat = load_chat(config, files.folder)
        ends = end_tokens(config, chat)
    session.events.emit("data", what=f"{whose}answers end at {ends}")
    for warning in ends.warnings:
        session.events.emit("warning", what=warning)
    return chat, ends
