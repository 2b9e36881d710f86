"""What is found out before anything starts."""

import pytest

from rlctl.cluster.launch import check_room
from rlctl.data.datasets import DataError
from rlctl.data.prompts import Prompt


def test_a_prompt_that_leaves_no_room_for_an_answer_is_named_with_what_mends_it() -> None:
    prompts = [Prompt("r0", [1] * 3, "", None), Prompt("r1", [1] * 9, "", None)]
    check_room(prompts, answer=7, length=16)
    with pytest.raises(DataError, match=r"prompt r1 has 9 tokens; .*=8 that .* 16: data.max_prompt_length=8 leaves"):
        check_room(prompts, answer=8, length=16)
