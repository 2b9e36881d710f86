"""Random sequences of a measured step are such that GRPO's clipping leaves a gradient."""

import json
from math import log
from pathlib import Path

import numpy as np

from rlctl.bench.steps import random_batch


def test_log_probs_are_near_those_of_random_weights_and_advantages_have_both_signs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    share = random_batch(tmp_path, 32, 6, 64, ("advantage", "rollout_log_prob"))
    assert share.sizes.tolist() == [2, 2, 2] and set(share.lengths.tolist()) == {32} and share.mask.sum() == 6 * 31
    assert {name: each.dtype for name, each in share.columns.items()} == dict.fromkeys(share.columns, np.float32)
    assert np.abs(share.columns["rollout_log_prob"] + log(1000)).max() < 0.11
    advantage = share.columns["advantage"]
    assert -1 <= advantage.min() < -0.5 and 0.5 < advantage.max() <= 1
