"""State of one episode: its budgets, the conversation of its current try, and its counts over all tries."""

from dataclasses import dataclass, field
from typing import Literal

from rlctl.environments.contract import Message, Reward
from rlctl.environments.outcomes import EnvironmentFailure
from rlctl.environments.tool_formats import Call, MalformedCall
from rlctl.generation.requests import RequestId, TurnRequest, turn_seed
from rlctl.rollout.conversation import Conversation
from rlctl.rollout.types import Ending, PlayedEpisode, Rollout, RolloutStart


@dataclass(frozen=True)
class EpisodeLimits:
    """Budgets of one episode."""

    max_turns: int
    # The most tokens of a whole conversation.
    max_length: int
    # The most seconds of a try, from its begin.
    timeout_s: float
    # Number of further tries of an episode after failures.
    max_retries: int
    # keep: earlier turns stay as they were sampled. strip: the chat template renders earlier turns again; if the tokens
    # then differ from the sampled ones, a new training row begins.
    history: Literal["keep", "strip"]
    # The most tokens of all rows of a training episode, if they must fit into one micro-batch; None: no bound.
    max_trained: int | None = None


@dataclass(eq=False)
class EpisodeState:
    """State of one rollout that an environment, a function or an agent plays."""

    start: RolloutStart
    limits: EpisodeLimits
    conversation: Conversation = field(default_factory=Conversation)
    # Index of the node that the next turn follows; -1 before the first prompt.
    leaf: int = -1
    # Messages since the last turn, not tokenized yet.
    added: list[Message] = field(default_factory=list)
    # Number of messages in the first prompt.
    opening: int = 0
    ending: Ending = "failed"
    # Time at which this try began, by the event loop's clock.
    began: float = 0.0
    # The fields from here on are sums over all tries. `PlayedEpisode` documents each.
    failures: int = 0
    environment_s: float = 0.0
    tool_calls: int = 0
    tool_errors: int = 0
    tool_raised: int = 0
    malformed_calls: int = 0
    # Number of control tokens, such as <|im_end|>, in the text of messages to the policy. They are encoded as text.
    spelled: int = 0
    # Number of messages that the chat template left out.
    unwritten: int = 0
    # Seconds of an agent's longest wait for a turn, in any try.
    longest_turn_s: float = 0.0

    # Counts of an agent's session by name; None: no agent plays.
    counts: dict[str, float] | None = None
    # Reason why a request of the agent continued no earlier turn -> number of such requests.
    rewritten: dict[str, int] = field(default_factory=dict)

    def begin(self, now: float) -> None:
        """Begin a try: empty the conversation, and start its clock. now: by the event loop's clock."""
        self.conversation = Conversation()
        self.leaf = -1
        self.added = []
        self.opening = 0
        self.began = now

    @property
    def messages(self) -> list[Message]:
        """Messages of the conversation, in order, including those not tokenized yet."""
        return [*self.conversation.messages, *self.added]

    def used_up(self, turn: int, length: int, now: float) -> Ending | None:
        """Return the budget that forbids turn number `turn` after `length` tokens, as an ending; None if none does."""
        if turn >= self.limits.max_turns:
            return "max_turns"
        if length >= self.limits.max_length or self.start.max_new_tokens < 1:
            return "max_length"
        return "time" if now - self.began > self.limits.timeout_s else None

    def request(self, turn: int, tokens: list[int]) -> TurnRequest:
        """Return the request of a turn after these tokens."""
        start = self.start
        room = min(start.max_new_tokens, self.limits.max_length - len(tokens))
        return TurnRequest(RequestId(start.id, turn), tokens, room, start.temperature, turn_seed(start.seed, turn))

    def count_calls(self, calls: list[Call]) -> None:
        """Count the tool calls of a turn."""
        self.tool_calls += len(calls)
        self.malformed_calls += sum(isinstance(call, MalformedCall) for call in calls)

    def rollout(self, reward: Reward | None, failure: EnvironmentFailure | None) -> Rollout:
        """Return the ended episode as a rollout; without rows if it failed. Raises nothing."""
        conversation = self.conversation
        episode = PlayedEpisode(
            messages=self.messages,
            opening=self.opening,
            ending="failed" if failure else self.ending,
            turns=conversation.turns,
            reward=None if failure else reward,
            failure=str(failure) if failure else None,
            failures=self.failures,
            environment_s=self.environment_s,
            tool_calls=self.tool_calls,
            tool_errors=self.tool_errors,
            tool_raised=self.tool_raised,
            spelled=self.spelled,
            unwritten=self.unwritten,
            malformed_calls=self.malformed_calls,
            longest_turn_s=self.longest_turn_s,
            counts=self.counts,
            rewritten=self.rewritten or None,
        )
        finish = conversation.completions[-1].finish if conversation.turns else "stop"
        return Rollout(self.start.id, [] if failure else conversation.rows(), finish, episode=episode)
