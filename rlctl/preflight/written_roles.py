"""Models besides the policy that a config names: the reference, teachers, further roles and reward models. Pure."""

from dataclasses import dataclass, replace

from rlctl.config.grpo_schema import ModelRewardSection, ServedJudgeSection
from rlctl.config.plugins import model_rewards, served_judges
from rlctl.config.role_schema import Place, RoleSection, TeacherSection
from rlctl.config.schema import GrpoConfig, RunConfig
from rlctl.models.facts import ModelSizes
from rlctl.preflight.declared_columns import Role

# Most tokens of a question to a judge and its reply, if `max_length` is null.
_LONGEST_JUDGED = 8192


@dataclass(frozen=True)
class WrittenRole:
    """The section of a role in the config."""

    name: Role
    # Folder or hub name of a model or of an adapter; None for the policy's first weights, or if `lora` names its base.
    path: str | None
    # Folder or hub name of an adapter over `path`.
    lora: str | None
    place: Place
    # Number of engines that score, and GPUs of each, if the place is engines.
    num_engines: int = 1
    tensor_parallel_size: int = 1
    # True for a reward model, whose value head values rollouts.
    has_value_head: bool = False
    # True for a judge, which answers questions in its own tokens.
    is_judge: bool = False
    # Most tokens of a conversation that a reward model values or a judge reads and writes; None for the default.
    max_length: int | None = None

    @property
    def weights(self) -> str | None:
        """Folder or hub name of the weights; None for the policy's first weights."""
        return self.lora or self.path


def written_roles(config: RunConfig) -> dict[Role, WrittenRole]:
    """Return the roles that the config has a model for, by name."""
    sections: dict[Role, RoleSection] = {}
    for key, value in vars(config).items():
        named = value if isinstance(value, dict) else {}
        entries = {key: value} | {f"{key}.{name}": section for name, section in named.items()}
        sections |= {name: section for name, section in entries.items() if isinstance(section, RoleSection)}
    roles = {}
    for name, section in sections.items():
        roles[name] = WrittenRole(name, section.path, lora=None, place=section.place)
        if isinstance(section, TeacherSection):
            roles[name] = replace(
                roles[name],
                lora=section.lora,
                num_engines=section.num_engines,
                tensor_parallel_size=section.tensor_parallel_size,
            )
    for index, reward in reward_models(config).items():
        name = reward_role(index)
        roles[name] = WrittenRole(
            name,
            reward.path,
            lora=None,
            place=reward.place,
            num_engines=reward.num_engines,
            tensor_parallel_size=reward.tensor_parallel_size,
            has_value_head=True,
            max_length=reward.max_length,
        )
    for index, judge in judges_on_engines(config).items():
        name = reward_role(index)
        roles[name] = WrittenRole(
            name,
            judge.path,
            lora=None,
            place="engines",
            num_engines=judge.num_engines,
            tensor_parallel_size=judge.tensor_parallel_size,
            is_judge=True,
            max_length=judge.max_length,
        )
    return roles


def longest_sequence_of(role: WrittenRole, sizes: ModelSizes, policy_longest: int) -> int:
    """Return the most tokens of a sequence that a role's model scores. policy_longest: of the policy's sequences."""
    longest = policy_longest
    if role.is_judge:
        longest = role.max_length or _LONGEST_JUDGED
    elif role.has_value_head:
        # Another tokenizer may need more tokens for the same text.
        longest = role.max_length or 2 * policy_longest
    return min(longest, sizes.max_positions)


def reward_models(config: RunConfig) -> dict[int, ModelRewardSection]:
    """Return index -> section of the entries of `rewards` that are reward models; none in an SFT run."""
    return model_rewards(config.rewards) if isinstance(config, GrpoConfig) else {}


def judges_on_engines(config: RunConfig) -> dict[int, ServedJudgeSection]:
    """Return index -> section of the entries of `rewards` that engines of the run judge; none in an SFT run."""
    return served_judges(config.rewards) if isinstance(config, GrpoConfig) else {}


def reward_role(index: int) -> Role:
    """Return the role of the reward model or judge that is the entry `index` of `rewards`."""
    return f"rewards.{index}"
