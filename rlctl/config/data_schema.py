"""Schema of a run's data: data sets, their mixture, and the chat template."""

# ruff: noqa: RUF009  (spec() makes a field, not a default)

from dataclasses import dataclass
from typing import Any, Literal

from rlctl.config.fields import spec


@dataclass
class DatasetSection:
    path: str | list[str] | None = spec(
        "A file (.jsonl, .jsonl.gz, .json, .csv, .parquet), a pattern of file names such as part-*.jsonl, a list of "
        "both, a folder that save_to_disk wrote, tasks of a library as reasoning_gym:NAME, or a hub data set as "
        "name[:configuration]. null is no data set.",
        path="dataset",
    )
    split: str = spec(
        "A split, or a slice of one: train[:90%], train[-10%:], train[10:20]. Files have one split, train."
    )
    prompt_key: str = spec(
        "The column of the prompt: text, or a list of messages. It is used if there is no column of messages. A nested "
        "column is written with dots: extra.question."
    )
    answer_key: str = spec(
        "The column of the reference answer (GRPO) or the response (SFT): text, or a number, written as 42 or 0.5. "
        "A nested column is written with dots: reward_model.ground_truth."
    )
    messages_key: str = spec(
        "The column of chat messages, each {role, content}, where content is text or a list of parts of text, or each "
        "{from, value}, as in ShareGPT's files."
    )
    limit: int | None = spec("Use only the first rows, this many. null uses all.", ge=1)
    args: dict[str, Any] = spec(
        "Only for tasks of a library: the keys of its data set, of which seed must be set and size is the number of "
        "rows."
    )


@dataclass
class SourceSection(DatasetSection):
    weight: float = spec("The share of this source among all draws, in relation to the other weights.", gt=0, le=1e6)


@dataclass
class TrainDataSection(DatasetSection):
    sources: dict[str, SourceSection] = spec(
        "In place of a path: several data sets, each under a name, mixed by weight. A source has the keys of "
        "data.train, whose values it takes where it has none, and weight (1). It starts over when its rows are used up."
    )

    @property
    def paths(self) -> list[str]:
        """Paths of all sources, or of the single data set."""
        paths = list[str]()
        for path in [section.path for section in self.sources.values()] or [self.path]:
            if isinstance(path, str):
                paths.append(path)
            else:
                paths += path or []
        return paths

    def section_of(self, source: str) -> DatasetSection:
        """Return the section of a source by its name; empty: the single data set."""
        return self.sources[source] if source else self


@dataclass
class HeldOutSection(DatasetSection):
    fraction: float | None = spec(
        "In place of a path: this share of data.train is held out and not trained on. The content of its prompt "
        "decides where a row goes, so that it stays there when rows are added, moved or removed.",
        gt=0,
        lt=1,
    )


@dataclass
class DataSection:
    train: TrainDataSection = spec("The data that the run trains on.")
    validation: HeldOutSection = spec("The held-out data.")
    system_prompt: str | None = spec("A system message before every prompt. It needs a chat template.")
    chat_template: Literal["auto", "none"] | str = spec(
        "auto is the tokenizer's own template, where it has one. none is plain text. Anything else is a Jinja file.",
        path="template",
    )
    chat_template_kwargs: dict[str, Any] = spec(
        "Arguments of the chat template, such as {enable_thinking: false}. A row's column chat_template_kwargs and a "
        "request's own go before them."
    )
    special_tokens: Literal["text", "allow"] = spec(
        "Control tokens that rows, environments, tools or persons spell. text encodes them as text. allow encodes "
        "them as control tokens."
    )
    max_prompt_length: int | None = spec(
        "Prompts of more tokens than this are left out of the data set. null leaves out none.", ge=1
    )
    shuffle: bool = spec("Draw a new order for each epoch, with run.seed.")

    @property
    def has_validation(self) -> bool:
        """True if there is held-out data, from data.validation.path or split off data.train."""
        return self.validation.path is not None or self.validation.fraction is not None
