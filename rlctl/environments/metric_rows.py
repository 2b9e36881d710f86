"""Declarations of the metrics of episodes: with environments, rollout functions and agents."""

from rlctl.telemetry.metrics import EPISODES, Condition, Metric, PanelRow, ReportChart, grpo_where, rows_where

WITH_EPISODES = Condition(
    lambda settled: settled.sampling is not None and settled.sampling.config.has_turns,
    "where rollouts are episodes: of an environment, a rollout function or an agent",
)
_WITH_AGENT = grpo_where(lambda settled: settled.config.agent.is_enabled, "with an agent")
_ALONE = ReportChart(EPISODES)
_FAILED_CALLS = ReportChart(EPISODES, "Tool calls that failed", 30)
_FAILURES = ReportChart(EPISODES, "Environment failures", 60)
# A table: the formatter would put each argument on its own line.
# fmt: off
TURNS = Metric("environment/turns", "turns of an episode, mean; episodes that failed count in none of these metrics",
    chart=ReportChart(EPISODES, "Turns of an episode", 10), panel=[PanelRow("turns", 140)])
TOOL_RAISED = Metric("environment/tool_raised",
    "share of tool calls in which the tool's own code raised (health.max_tool_raised_share)", "share",
    chart=_FAILED_CALLS)
MALFORMED_CALLS = Metric("environment/malformed_calls",
    "share of tool calls that cannot be read, text that only looks like one included", "share", chart=_ALONE,
    panel=[PanelRow("malformed", 170, used=True)])
LONGEST_TURN = Metric("agent/longest_turn", "longest wait of an agent for a turn in a step, in seconds")
METRICS = (
    *rows_where(
        WITH_EPISODES, TURNS,
        Metric("environment/tool_calls", "tool calls of an episode, mean",
            chart=ReportChart(EPISODES, "Tool calls of an episode", 20),
            panel=[PanelRow("tool calls", 150, used=True)]),
        Metric("environment/tool_errors", "share of tool calls that were malformed or whose tool raised", "share",
            chart=_FAILED_CALLS, panel=[PanelRow("tool error", 160, used=True)]),
        TOOL_RAISED, MALFORMED_CALLS,
        Metric("environment/spelled_tokens", "control tokens that rows, environments or tools spelled, encoded as text",
            chart=_ALONE),
        Metric("environment/unwritten_messages",
            "messages of environments and agents that the chat template leaves out", chart=_ALONE),
        Metric("environment/seconds", "seconds in which an episode waited for its environment, mean", "seconds",
            chart=ReportChart(EPISODES, "Waits for the environment", 70)),
        Metric("environment/rows", "rows that an episode trains on, mean; above 1 where its history was rewritten",
            chart=ReportChart(EPISODES, "Rows of an episode", 80)),
        Metric("environment/failed",
            "episodes left out: their environment failed in every try, or no micro-batch holds them", chart=_FAILURES,
            panel=[PanelRow("env failed", 30, "bold red", failure=True)]),
        Metric("environment/retries", "failed tries of the episodes that succeeded later", chart=_FAILURES),
        Metric("environment/endings/NAME",
            "share of episodes that ended so: done, answered, max_turns, max_length, time", "share",
            chart=ReportChart(EPISODES, "Endings of episodes", 40), panel=[PanelRow("", 180)]),
        Metric("reward/turns_K", "mean reward of the episodes of K turns",
            chart=ReportChart(EPISODES, "Reward by turns", 50)),
        Metric("validation/turns", "turns of a held-out episode, mean",
            chart=ReportChart(EPISODES, "Turns of an episode", 10)),
        Metric("validation/failed_episodes", "held-out episodes that were left out, because their environment failed",
            chart=_FAILURES),
    ),
    *rows_where(
        _WITH_AGENT, LONGEST_TURN,
        Metric("agent/rows_per_episode",
            "rows that an agent's episode trains on, mean; above 1 where it rewrites its history"),
        Metric("agent/coalesced", "requests of a step that repeated one, and got the same turn"),
        Metric("agent/rewritten", "requests of a step that continued no turn, and so began another row"),
        Metric("agent/refused", "requests of a step that were answered by an error"),
        Metric("agent/overridden/NAME", "requests of a step whose parameter of sampling was not used"),
        Metric("agent/unenforced/NAME", "requests of a step with a parameter that the policy was not held to"),
        Metric("agent/ignored/NAME", "requests of a step with an unknown parameter"),
    ),
)
# fmt: on
