"""Trial of a config's rewards on every row of its data: each reference answer is scored as if the policy had given it.

A data set whose own answers fail its tests is found so, before a run trains on it.
"""

from dataclasses import dataclass, field, replace

from rlctl.config.schema import GrpoConfig
from rlctl.data.datasets import path_text
from rlctl.data.load_data import load_chat, load_prompts, read_rows
from rlctl.rewards.scorer import Scorer
from rlctl.rollout.scoring import sample_item

# Rows that are scored at a time.
_ROWS_AT_A_TIME = 256


@dataclass
class AnswerCounts:
    """Counts of a data set's own answers."""

    # Path of the data set, for messages.
    path: str
    num_rows: int = 0
    # Place of each row whose answer is not right, and of each row whose answer has no score, with the reason.
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    # Rows without an answer.
    num_silent: int = 0

    def describe(self) -> list[str]:
        """Return lines for the user."""
        num_right = self.num_rows - self.num_silent - len(self.wrong) - len(self.failed)
        lines = [f"rewards: right answers in {num_right:,} of {self.num_rows:,} rows of {self.path}"]
        if self.wrong:
            lines.append(f"rewards: another answer, rows {len(self.wrong):,}: {_list_first(self.wrong)}")
        if self.failed:
            lines.append(f"rewards: no score, rows {len(self.failed):,}: {_list_first(self.failed)}")
        if self.num_silent:
            lines.append(f"rewards: no answer, rows {self.num_silent:,} (data.train.answer_key)")
        return lines


def score_all_answers(config: GrpoConfig) -> list[str]:
    """Score the answers of all rows of data.train; return lines with the counts and the first rows of each kind.

    Raises UnusableError if rewards fail at the first row, and DataError for a bad row.
    """
    unlimited = replace(config, data=replace(config.data, max_prompt_length=None))
    chat = load_chat(config, config.model.path)
    lines: list[str] = []
    with Scorer(config.rewards, episodes=config.environment.is_enabled) as scorer:
        for section in config.data.train.sources.values() or [config.data.train]:
            rows = read_rows(config, section)
            tasks, _ = load_prompts(unlimited, section, chat, rows)
            counts = AnswerCounts(path_text(section.path), len(rows))
            pairs = [(row.origin, task) for row, task in zip(rows, tasks, strict=True) if task.answer is not None]
            counts.num_silent = len(rows) - len(pairs)
            for start in range(0, len(pairs), _ROWS_AT_A_TIME):
                part = pairs[start : start + _ROWS_AT_A_TIME]
                for (origin, _), score in zip(part, scorer.score([sample_item(task) for _, task in part]), strict=True):
                    if score.failed:
                        counts.failed.append(f"{origin}: {score.failed}")
                    elif not score.right:
                        counts.wrong.append(origin)
            lines += counts.describe()
    return lines


def _list_first(places: list[str]) -> str:
    further = f" and {len(places) - 3:,} more" if len(places) > 3 else ""
    return ", ".join(places[:3]) + further
