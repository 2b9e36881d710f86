"""Generator of the page `configs/COMING_FROM.md`: keys of other tools and their equals in rlctl."""

from rlctl.config.peer_keys import PeerKey, rows_of_tool

_OPENING = """# Coming from TRL, verl, NeMo-RL or prime-rl

The tables have the keys of these tools and rlctl's key for each. `rlctl config check` answers an unknown key by the
same rows. An empty second column is a feature that rlctl does not have, and the third column names the feature.
`rlctl config reference --peers > configs/COMING_FROM.md` writes this page.

`rlctl config import FILE -o mine.yaml` drafts a recipe from a config of verl, NeMo-RL or prime-rl. Each value that has
an equal is translated. Each other line stays as a comment with the reason, and `TODO` asks for a decision.
[README.md](README.md) has every key of rlctl.
"""
# Tool -> paragraph on how it differs from rlctl.
_DIFFERENCES = {
    "TRL": """A script of TRL builds a trainer in Python. Here a recipe names model, data, rewards and settings, and
`rlctl.train` runs it from Python ([rlctl/api](../rlctl/api/README.md)). TRL counts completions in a batch;
`grpo.num_prompts_per_step` counts prompts, and each has `grpo.num_generations_per_prompt` completions. There are no
epochs: count steps. `accelerate launch` starts a process on each GPU, and `trl vllm-serve` starts the engine; here
one command starts trainer ranks and engines. A reward function of TRL's form works as it is
([rlctl/rewards](../rlctl/rewards/README.md)), and a `Dataset` may stand in place of a file:
[a script of both](../rlctl/api/README.md#from-a-script-of-trl).""",
    "verl": """verl splits a batch of prompts into mini-batches and each of these into micro-batches, by number.
Here `grpo.updates_per_step` says how many updates a batch gives, and ranks pack sequences up to
`trainer.micro_batch_tokens`. verl places worker groups on a pool of nodes times GPUs; here `trainer.num_ranks`,
`generation.num_engines` and `placement.colocated` say the same. PPO is `grpo.advantage.name=gae` with a `critic`. A
row's answer is in `reward_model.ground_truth` there; `data.train.answer_key` names that column here, and a recipe
names its rewards where verl picks one by `data_source`.""",
    "NeMo-RL": """The names are the nearest: a step has `grpo.num_prompts_per_step` prompts with
`grpo.num_generations_per_prompt` answers in both. NeMo-RL cuts this batch by `policy.train_global_batch_size`, in
sequences; `grpo.updates_per_step` is the number of updates. NeMo-RL's environments score answers; here that is a
reward, and an environment is the other side of a conversation. Both bound the age of a sample by
`max_trajectory_age_steps`.""",
    "prime-rl": """prime-rl runs a trainer, an orchestrator and an inference server, each with its section or file.
Here one recipe and one command start all processes. prime-rl always generates and trains at the same time; here
`async.enabled=true` does so. `orchestrator.batch_size` counts rollouts, `grpo.num_prompts_per_step` counts prompts:
divide by the group size. prime-rl's loss is `grpo.loss.name: dppo` here. Environments of the verifiers library are
not read by their name: write an environment or an agent ([rlctl/environments](../rlctl/environments/README.md)).""",
    "vLLM": """Options of `vllm serve` that people set beside these tools.""",
}


def coming_from_page() -> str:
    """Return the page as Markdown."""
    parts = [_OPENING]
    for tool, difference in _DIFFERENCES.items():
        rows = sorted(rows_of_tool(tool), key=lambda row: row.key)
        lines = [f"## {tool}", "", difference, "", f"| {tool} | rlctl | remark |", "| --- | --- | --- |"]
        lines += [_table_row(row) for row in rows]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _table_row(row: PeerKey) -> str:
    """Return the Markdown table row for one key."""
    joint = " or " if " or " in row.rlctl_key else ", "
    rlctl_keys = joint.join(f"`{key}`" for key in row.rlctl_keys)
    remark = row.note.replace("|", "\\|")
    if not row.rlctl_key:
        remark = f"rlctl has no {remark}"
    return f"| `{row.key}` | {rlctl_keys} | {remark} |"
