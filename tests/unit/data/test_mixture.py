"""A mixture of sources keeps its shares at every moment, and goes on bit-exactly from any."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.config.schema import GrpoConfig
from rlctl.data.cursor import Cursor, TaskSource
from rlctl.data.files import DataError
from rlctl.data.load_data import part_of, read_train
from rlctl.data.mixture import MixedCursor, Shares, first_of_each, order_of
from rlctl.data.tasks import Task
from rlctl.preflight.load import load

weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


@given(weights, st.integers(0, 10**7))
def test_after_any_number_of_draws_every_source_has_its_share_to_within_two_draws(
    ratios: list[float], draws: int
) -> None:
    counts = Shares(ratios).counts(draws)
    total = sum(ratios)
    assert sum(counts) == draws
    # Weights are rounded to a millionth.
    assert all(abs(count - draws * ratio / total) <= 2 + draws * 1e-4 for count, ratio in zip(counts, ratios))


@given(weights, st.integers(0, 10**6))
def test_each_draw_adds_one_to_the_counts_of_its_source(ratios: list[float], number: int) -> None:
    shares = Shares(ratios)
    source, source_number = shares.source(number)
    expected = shares.counts(number)
    assert source_number == expected[source]
    expected[source] += 1
    assert shares.counts(number + 1) == expected


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 99), st.integers(0, 200), st.booleans())
def test_a_resume_goes_on_with_the_same_draws_and_each_row_comes_once_an_epoch(
    sizes: list[int], seed: int, before: int, shuffle: bool
) -> None:
    named_sizes = {f"s{source}": size for source, size in enumerate(sizes)}
    ratios = [source + 0.5 for source in range(len(sizes))]
    cursor = MixedCursor(named_sizes, ratios, seed, shuffle)
    resumed = MixedCursor(named_sizes, ratios, seed, shuffle)
    draws = cursor.draw(before)
    assert draws == [resumed.draw_at(number) for number in range(before)]
    resumed.load_state_dict(json.loads(json.dumps(cursor.state_dict())))
    assert resumed.position == before
    following = cursor.draw(50)
    assert resumed.draw(7) + resumed.draw(0) + resumed.draw(43) == following
    seen = Counter((draw.epoch, draw.row) for draw in draws + following)
    assert set(seen.values()) <= {1} and {draw.row for draw in draws} <= set(range(sum(sizes)))


def test_other_sources_rows_or_weights_than_those_of_the_checkpoint_are_refused() -> None:
    state = MixedCursor({"a": 3, "b": 4}, [1.0, 2.0], 0, True).state_dict()
    for sizes, ratios in (
        ({"a": 3, "c": 4}, [1.0, 2.0]),
        ({"a": 3, "b": 5}, [1.0, 2.0]),
        ({"a": 3, "b": 4}, [1.0, 1.0]),
    ):
        with pytest.raises(DataError, match="the checkpoint was made with the sources"):
            MixedCursor(sizes, ratios, 0, True).load_state_dict(state)


def test_held_out_rows_of_all_sources_are_among_the_first() -> None:
    tasks = [Task(f"r{row}", [1], "", None, source=source) for row, source in enumerate("aaabbc")]
    assert [task.id for task in first_of_each(tasks, 4)] == ["r0", "r3", "r5", "r1"]
    plain = [replace(task, source="") for task in tasks]
    assert first_of_each(plain, None) == plain


def config_of(folder: Path, *overrides: str) -> GrpoConfig:
    for name, rows in (("sums", 8), ("words", 4)):
        lines = (json.dumps({"prompt": f"{name} {row}", "answer": str(row)}) for row in range(rows))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "my.yaml").write_text(
        "defaults: grpo.yaml\nmodel: {path: qwen/none}\nrewards: [exact]\n"
        "data: {train: {sources: {sums: {path: sums.jsonl, weight: 3}, words: {path: words.jsonl}}}}\n"
    )
    config = load("grpo", str(folder / "my.yaml"), list(overrides)).config
    assert isinstance(config, GrpoConfig)
    return config


def test_sources_are_read_one_after_the_other_and_keep_their_names(tmp_path: Path) -> None:
    config = config_of(tmp_path, "data.train.sources.words.limit=3")
    rows = read_train(config)
    assert [row.source for row in rows] == ["sums"] * 8 + ["words"] * 3
    assert [row.number for row in rows] == list(range(11))
    tasks = [Task(f"r{row.number}", [1], "", None, source=row.source) for row in rows]
    source = TaskSource(tasks, order_of(tasks, config))
    assert Counter(task.source for task in source.draw(40)) == {"sums": 30, "words": 10}
    train = replace(config.data.train, sources={})
    without_sources = replace(config, data=replace(config.data, train=train))
    assert isinstance(order_of(tasks, without_sources), Cursor)
    held_out = part_of(config_of(tmp_path, "data.validation.fraction=0.4"), "validation")
    assert [part.name for part in held_out] == ["validation (sums)", "validation (words)"]
