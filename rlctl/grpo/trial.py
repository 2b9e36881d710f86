"""Rewards tried on the first row before anything starts, as a run tries them once it has its data."""

from dataclasses import replace

from rlctl.config.schema import GrpoConfig
from rlctl.rewards.scorer import Score, Scorer
from rlctl.rollout.types import sample_item


def try_rewards(config: GrpoConfig) -> Score:
    """Score the first row of data.train, answered with its own answer.

    Raises UnusableError for rewards that are no use, DataError for a row or a tokenizer that is none.
    """
    from rlctl.data.load import load_chat, load_prompts, read_rows

    train = replace(config.data.train, limit=1)
    first = replace(config, data=replace(config.data, train=train, max_prompt_length=None))
    rows = read_rows(first, train)
    prompts, _ = load_prompts(first, train, load_chat(first, config.model.path), rows)
    with Scorer(config.rewards) as scorer:
        return scorer.try_on_sample(sample_item(prompts[0]))
