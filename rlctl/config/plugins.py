"""Names and import paths of rlctl's rewards, environments, trackers, losses, advantages and engines. Nothing is
imported.
"""

from collections.abc import Sequence

from rlctl.config.grpo_schema import ModelRewardSection, RewardEntry, ServedJudgeSection

# Name in the config -> function that builds the reward from its section.
REWARDS = {
    **{name: f"rlctl.rewards.builtin:{name}" for name in ("exact", "regex", "math_verify", "reasoning_gym")},
    "judge": "rlctl.rewards.judge.judge:judge_reward",
}
# Names of rewards that score without a reference answer.
_WITHOUT_ANSWERS = ("model", "judge", "python_tests", "reasoning_gym")
# Prefix of a data set's path (before the colon) -> class that generates its rows.
ROW_GENERATORS = {"reasoning_gym": "rlctl.data.reasoning_gym:ReasoningGym"}
# Name in the config -> class of the loss; below, of the advantage.
LOSSES = {
    "grpo": "rlctl.grpo.losses.grpo:GrpoLoss",
    "dr_grpo": "rlctl.grpo.losses.dr_grpo:DrGrpoLoss",
    "gspo": "rlctl.grpo.losses.gspo:GspoLoss",
    "cispo": "rlctl.grpo.losses.cispo:CispoLoss",
    "reinforce": "rlctl.grpo.losses.reinforce:ReinforceLoss",
    "dppo": "rlctl.grpo.losses.dppo:DppoLoss",
}
ADVANTAGES = {
    "group_mean": "rlctl.grpo.advantages.group_mean:GroupMean",
    "leave_one_out": "rlctl.grpo.advantages.leave_one_out:LeaveOneOut",
    "batch_normalized": "rlctl.grpo.advantages.batch_normalized:BatchNormalized",
    "gdpo": "rlctl.grpo.advantages.gdpo:Gdpo",
    "quantile": "rlctl.grpo.advantages.quantile:QuantileBaseline",
    "pass_at_k": "rlctl.grpo.advantages.pass_at_k:PassAtK",
    "gae": "rlctl.grpo.advantages.gae:Gae",
}
# Name in the config -> class of the environment. The classes follow the interface in rlctl/environments/README.md.
ENVIRONMENTS = {
    "calculator": "rlctl.environments.calculator:Calculator",
    "guess": "rlctl.environments.guess:Guess",
    "maze": "rlctl.environments.maze:Maze",
    "sqlite": "rlctl.environments.sqlite:Sqlite",
}
# Name in the config -> class that plays an environment of another project. That environment runs in another process.
SHELVES = {
    "harbor": "rlctl.environments.shelves.harbor:Harbor",
    "openenv": "rlctl.environments.shelves.openenv:OpenEnv",
}
# Name of a shelf -> function that yields its tasks in a folder, as (row, reason for a refusal).
FOLDER_TASKS = {
    "harbor": "rlctl.environments.shelves.harbor:read_rows",
}
# Name in the config -> function of the agent whose server, of another project, plays the rollout.
AGENTS = {
    "verifiers": "rlctl.environments.shelves.verifiers:run",
}
# Name in the config -> class of an environment whose tools run in the run's sandbox.
TOOLS = {
    "python": "rlctl.environments.sandbox_tools:PythonTool",
    "shell": "rlctl.environments.sandbox_tools:ShellTool",
    "python_shell": "rlctl.environments.sandbox_tools:PythonShellTools",
}
NAMED_ENVIRONMENTS = ENVIRONMENTS | SHELVES | TOOLS
# Rewards and environments that run programs in the run's sandbox.
SANDBOXED = frozenset({"harbor", "python_tests", *TOOLS})
# Column of a row that names its environment.
ENVIRONMENT_COLUMN = "environment"
# Modules that declare metrics, in a list `METRICS` of `telemetry.metrics.Metric`. They import no torch.
METRICS = (
    "rlctl.telemetry.clock",
    "rlctl.telemetry.throughput",
    "rlctl.telemetry.resource_monitor",
    "rlctl.refit.protocol",
    "rlctl.training.metric_rows",
    "rlctl.run.health",
    "rlctl.environments.metric_rows",
    "rlctl.rewards.metric_rows",
    "rlctl.rewards.judge.metric_rows",
    "rlctl.grpo.metric_rows",
    "rlctl.grpo.losses.sections",
    "rlctl.grpo.critic_rows",
    "rlctl.sft.metric_rows",
)
# Base classes of users' losses and advantages.
LOSS_BASE = "rlctl.grpo.losses.base:PolicyLoss"
ADVANTAGE_BASE = "rlctl.grpo.advantages.base:Advantage"
# Name in the config -> the engine's `EngineKind`.
ENGINES = {"vllm": "rlctl.generation.vllm.kind:KIND"}
# Class of which a user's engine is an instance, and options class of an engine without options.
ENGINE_BASE = "rlctl.generation.spec:EngineKind"
ENGINE_OPTIONS_BASE = "rlctl.generation.spec:NoOptions"
# Name in the config -> class of the tracker. It is called with the run directory, the config and the keys of its entry.
TRACKERS = {
    "tensorboard": "rlctl.telemetry.trackers.tensorboard:TensorBoard",
    "wandb": "rlctl.telemetry.trackers.wandb:WandB",
    "mlflow": "rlctl.telemetry.trackers.mlflow:MLflow",
    "trackio": "rlctl.telemetry.trackers.trackio:Trackio",
    "swanlab": "rlctl.telemetry.trackers.swanlab:SwanLab",
}
# First arguments of a tracker's class, and name -> signature of the methods that each tracker must have.
TRACKER_ARGUMENTS = ("run", "config")
TRACKER_METHODS = {"write": "write(self, kind, step, metrics)", "close": "close(self)"}

# Reward names in metrics and rollouts that are no entry of `rewards`: the penalty of grpo.overlong, and the
# environment's own reward.
OVERLONG = "overlong"
ENVIRONMENT_REWARD = "environment"


def needs_answers(rewards: Sequence[RewardEntry]) -> bool:
    """Return True if a reward needs the reference answer: a built-in one, but no model, judge, tests or
    reasoning_gym."""
    return any(":" not in reward.name and reward.name not in _WITHOUT_ANSWERS for reward in rewards)


def reward_names(rewards: Sequence[RewardEntry]) -> list[str]:
    """Return each reward's name in metrics and rollouts: the function's name. A second `regex` becomes `regex-2`."""
    names = [reward.name.rpartition(":")[2] for reward in rewards]
    numbers = [names[: index + 1].count(name) for index, name in enumerate(names)]
    return [name if number == 1 else f"{name}-{number}" for name, number in zip(names, numbers)]


def model_rewards(rewards: Sequence[RewardEntry]) -> dict[int, ModelRewardSection]:
    """Return index -> section of each reward that is a reward model."""
    return {index: reward for index, reward in enumerate(rewards) if isinstance(reward, ModelRewardSection)}


def served_judges(rewards: Sequence[RewardEntry]) -> dict[int, ServedJudgeSection]:
    """Return index -> section of each judge that engines of the run serve."""
    judges = {index: reward for index, reward in enumerate(rewards) if isinstance(reward, ServedJudgeSection)}
    return {index: judge for index, judge in judges.items() if judge.path is not None}


def correctness(rewards: Sequence[RewardEntry]) -> tuple[int, float]:
    """Return (index, threshold) of the reward that decides if an answer is right. Default: the first reward, at 1."""
    for index, reward in enumerate(rewards):
        if reward.correct_at is not None:
            return index, reward.correct_at
    return 0, 1.0
