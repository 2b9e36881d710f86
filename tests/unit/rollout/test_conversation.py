"""A conversation's rows: the sampled tokens, each token once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlctl.generation.requests import Completion
from rlctl.rollout.conversation import Conversation


def make_turn(tokens: list[int], version: int = 0) -> Completion:
    count = len(tokens)
    log_probs = -np.arange(1, count + 1, dtype=np.float32)
    return Completion(np.array(tokens, np.int32), log_probs, np.full(count, version, np.int32), "stop")


def test_a_conversation_that_only_grows_is_one_row() -> None:
    conversation = Conversation()
    first = conversation.add_turn(make_turn([3, 4], 7), conversation.add_context([1, 2], None))
    second = conversation.add_turn(make_turn([6], 8), conversation.add_context([5], first))
    assert conversation.tokens(second) == [1, 2, 3, 4, 5, 6]
    (row,) = conversation.rows()
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.sampled.tolist() == [False, False, True, True, False, True]
    assert row.log_probs.tolist() == [0, 0, -1, -2, 0, -1]
    assert row.versions.tolist() == [-1, -1, 7, 7, -1, 8]
    assert row.turns.tolist() == [-1, -1, 0, 0, -1, 1]


def test_a_history_that_is_written_anew_is_a_row_of_its_own() -> None:
    conversation = Conversation()
    conversation.add_turn(make_turn([3, 4]), conversation.add_context([1, 2], None))
    conversation.add_turn(make_turn([6]), conversation.add_context([1, 2, 4, 5], None))
    assert [row.tokens[row.sampled].tolist() for row in conversation.rows()] == [[3, 4], [6]]


def test_what_is_said_after_the_last_turn_trains_nothing_and_is_left_out() -> None:
    conversation = Conversation()
    conversation.add_context([5], conversation.add_turn(make_turn([3]), conversation.add_context([1], None)))
    assert [row.tokens.tolist() for row in conversation.rows()] == [[1, 3]]
    assert Conversation().rows() == []


# For each node: whether it is sampled, its number of tokens, and the node before it, counted back from it.
shapes = st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 4)), max_size=12)


@given(shapes)
def test_every_sampled_token_trains_exactly_once_after_the_tokens_that_it_was_sampled_after(
    shape: list[tuple[bool, int, int]],
) -> None:
    conversation = Conversation()
    conversation.add_context([-1], None)
    num_tokens = 0
    sampled = set[int]()
    # Tokens before each sampled token.
    tokens_before = dict[int, list[int]]()
    for is_turn, count, back in shape:
        tokens = list(range(num_tokens, num_tokens + count))
        num_tokens += count
        parent = max(0, len(conversation.nodes) - 1 - back)
        if is_turn:
            sampled |= set(tokens)
            for place, token in enumerate(tokens):
                tokens_before[token] = conversation.tokens(parent) + tokens[:place]
            conversation.add_turn(make_turn(tokens), parent)
        else:
            conversation.add_context(tokens, parent)
    rows = conversation.rows()
    trained: list[int] = []
    for row in rows:
        trained += row.tokens[row.sampled].tolist()
        for place in np.flatnonzero(row.sampled):
            assert row.tokens[:place].tolist() == tokens_before[int(row.tokens[place])]
        assert (row.versions[~row.sampled] == -1).all() and (row.turns[~row.sampled] == -1).all()
    assert sorted(trained) == sorted(sampled)
