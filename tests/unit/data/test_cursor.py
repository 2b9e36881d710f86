from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.data.cursor import Cursor, Draw, TaskSource
from rlctl.data.files import DataError
from rlctl.data.tasks import Task

sizes = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@given(rows=st.integers(1, 25), seed=st.integers(0, 2**32), shuffle=st.booleans(), batches=sizes)
def test_every_row_comes_exactly_once_an_epoch_whatever_the_batch_sizes(rows, seed, shuffle, batches):
    cursor = Cursor(rows, seed, shuffle)
    draws = list(chain.from_iterable(cursor.draw(size) for size in batches))
    assert len(draws) == sum(batches)
    epochs = Counter(draw.epoch for draw in draws)
    for epoch in range(max(epochs)):
        assert sorted(draw.row for draw in draws if draw.epoch == epoch) == list(range(rows))
    last = [draw.row for draw in draws if draw.epoch == max(epochs)]
    assert len(last) == len(set(last))


@given(rows=st.integers(1, 25), seed=st.integers(0, 99), before=sizes, after=sizes)
def test_a_resume_from_any_point_continues_the_identical_order(rows, seed, before, after):
    cursor = Cursor(rows, seed, shuffle=True)
    for size in before:
        cursor.draw(size)
    resumed = Cursor(rows, seed, shuffle=True)
    resumed.load_state_dict(cursor.state_dict())
    assert [resumed.draw(size) for size in after] == [cursor.draw(size) for size in after]


@given(rows=st.integers(1, 25), seed=st.integers(0, 99), batches=sizes)
def test_the_order_does_not_depend_on_how_it_is_cut_into_batches(rows, seed, batches):
    draws = Cursor(rows, seed, shuffle=True).draw(sum(batches))
    cursor = Cursor(rows, seed, shuffle=True)
    assert list(chain.from_iterable(cursor.draw(size) for size in batches)) == draws


def test_epochs_and_seeds_differ_in_order_and_without_shuffle_nothing_does():
    rows = [draw.row for draw in Cursor(50, seed=0, shuffle=True).draw(100)]
    assert rows[:50] != rows[50:]
    assert rows[:50] != [draw.row for draw in Cursor(50, seed=1, shuffle=True).draw(50)]
    assert Cursor(2, seed=0, shuffle=False).draw(3) == [Draw(0, 0), Draw(0, 1), Draw(1, 0)]


def test_the_state_is_three_numbers_however_far_the_cursor_went():
    cursor = Cursor(10, seed=0, shuffle=True)
    cursor.draw(1003)
    assert cursor.state_dict() == {"epoch": 100, "index": 3, "rows": 10}


def test_no_rows_is_an_error():
    with pytest.raises(DataError, match="empty"):
        Cursor(0, seed=0, shuffle=True)


def test_a_state_of_a_data_set_of_another_size_is_refused():
    with pytest.raises(DataError, match="10 rows, the data set now has 11"):
        Cursor(11, 0, True).load_state_dict(Cursor(10, 0, True).state_dict())


def test_a_source_names_each_draw_by_epoch_and_row_of_the_data_set():
    # The rows between were too long.
    tasks = [Task(f"r{row}", [1], "x", "y") for row in (0, 7)]
    source = TaskSource(tasks, Cursor(2, seed=0, shuffle=False))
    assert [prompt.id for prompt in source.draw(4)] == ["e0-r0", "e0-r7", "e1-r0", "e1-r7"]
