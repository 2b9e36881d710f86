"""All checks of a config: contradictions between values that are each valid alone.

The checks are pure, except that they read the files named in the config. Each check is a generator of violations. A
value that was already reported as wrong is `BROKEN`. A check that reads it ends without an error, so each mistake is
reported once, and one mistake hides no other.
"""

from contextlib import suppress

from rlctl.config.builtin import is_shipped
from rlctl.config.errors import BrokenValueError, Problem
from rlctl.config.provenance import Origin
from rlctl.preflight.backend import Violation, Violations, unbroken
from rlctl.preflight.check_adapters import check_adapters
from rlctl.preflight.check_environment import check_environment
from rlctl.preflight.check_grpo import (
    check_advantage,
    check_algorithm,
    check_async,
    check_corrections,
    check_engines,
    check_overlong,
    check_rewards,
    check_sampling,
)
from rlctl.preflight.check_inputs import check_data, check_generated, check_run_folder, check_run_name, check_validation
from rlctl.preflight.check_model import check_chat, check_graph, check_lengths, check_micro_batch, check_model
from rlctl.preflight.check_recipe import check_recipe
from rlctl.preflight.check_roles import check_roles
from rlctl.preflight.check_sandbox import check_sandbox
from rlctl.preflight.check_trackers import check_trackers
from rlctl.preflight.check_trainer import check_backends, check_batch, check_offload, check_optimizer, check_profile
from rlctl.preflight.cluster_plan import check_nodes
from rlctl.preflight.critic import check_critic
from rlctl.preflight.settled import Settled


def check(settled: Settled, origins: dict[str, Origin], *, resume: bool, away: bool = False) -> list[Problem]:
    """Return every contradiction in a config. Values that were already reported as wrong are `BROKEN`.

    resume: the run's directory may exist. away: the run will be on another machine, so that installed packages are not
    checked here.
    """
    config = settled.config
    sizes = settled.facts
    sequences = None
    # `check_batch` reports an update of 0 sequences.
    with suppress(BrokenValueError):
        sequences = config.step_shape.per_update or None
    checks: list[Violations] = [
        check_model(config),
        check_lengths(settled),
        check_micro_batch(settled),
        check_optimizer(config),
        check_offload(config),
        check_backends(config, sizes, sequences),
        check_adapters(settled),
        check_chat(config),
        check_validation(config),
        check_data(config),
        check_profile(config),
        check_nodes(config),
        check_roles(settled),
    ]
    if grpo := settled.grpo:
        checks += [
            check_rewards(grpo.config),
            check_environment(grpo.config, sizes),
            check_sandbox(grpo.config, away),
            check_algorithm(grpo, away),
            check_advantage(grpo),
            check_critic(grpo),
            check_sampling(grpo),
            check_overlong(grpo.config),
            check_engines(grpo, away),
            check_async(grpo),
            check_corrections(grpo),
        ]
    if sft := settled.sft:
        checks += [check_graph(sft), check_recipe(sft, away)]
    checks.append(check_batch(settled))
    if not resume:
        checks.append(check_run_name(config))
    checks.append(check_run_folder(config))
    if not away:
        checks += [check_trackers(config), check_generated(config)]
    problems: list[Problem] = []
    for violations in checks:
        for violation in unbroken(violations):
            place = violation.where or _last_place(violation, origins)
            problems.append(Problem(place, violation.key, violation.message))
    return problems


def _last_place(violation: Violation, origins: dict[str, Origin]) -> str:
    """Return the location of the violation's key that was written last.

    The order is: files of rlctl, files of the user, overrides by the command itself, overrides that the user typed.
    """

    def find_origin(key: str) -> Origin:
        inner_origins = (origin for name, origin in origins.items() if name.startswith(f"{key}."))
        return origins.get(key) or next(inner_origins, Origin())

    def lateness(origin: Origin) -> tuple[int, bool, bool]:
        is_users_file = origin.file is not None and not is_shipped(origin.file)
        return origin.override, bool(origin.text), is_users_file

    key_origins = [find_origin(key) for key in (violation.key, *violation.others)]
    return str(max(key_origins, key=lateness))
