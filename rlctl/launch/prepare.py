"""Preparation of a run: from a command's recipe and overrides to a run that can start.

`prepare` goes through these stages, up to the one that its caller names:

- checked: the config is composed, typed and checked, and so is the first row of its data. No torch, Ray or vLLM.
- planned: facts of a new model are derived, and the run is placed on this machine or a cluster.
- read: all rows are read and checked. A dry run tokenizes them as well; a run does it while Ray starts.

Nothing is printed here, and no run is started. Wrong input raises ConfigError.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlctl.config.errors import ConfigError, ModelError, Problem, UserError, locate_errors
from rlctl.config.schema import GrpoConfig
from rlctl.data.end_tokens import EndTokens
from rlctl.data.files import DataError, files_of
from rlctl.data.load_data import RowReader, RunRows, end_tokens, part_of
from rlctl.launch.first_row import (
    check_first_rows,
    has_users_reward,
    local_chat,
    try_all,
    try_all_rows,
    try_environments,
)
from rlctl.launch.loading import load_run_samples, load_run_tasks
from rlctl.launch.resume import Resumed, find_resumed, refuse_contradictions, replace_lost_model
from rlctl.launch.sampling import held_out_tasks
from rlctl.models.facts import find_facts
from rlctl.models.model_sizes import config_file
from rlctl.preflight.cluster_plan import capacity_rows, planned_cluster, settle_on_cluster
from rlctl.preflight.engine_rules import engine_rules
from rlctl.preflight.installation import explain_missing
from rlctl.preflight.load import Composed, load
from rlctl.preflight.machine import RunMachine, device_of, read_machine
from rlctl.preflight.placement import this_machine
from rlctl.preflight.plan import RunPlan, crowding_notes, disk_notes, make_plan
from rlctl.preflight.settled import Settled
from rlctl.preflight.written_roles import written_roles
from rlctl.run.run_dir import RunDir
from rlctl.sandbox.base import SandboxError
from rlctl.sandbox.open_sandbox import choose_sandbox, use_section
from rlctl.utils.files import folder_bytes, foreign_link, write_whole

if TYPE_CHECKING:
    from rlctl.cluster.jobs.submit import TargetCluster

Stage = Literal["checked", "planned", "read"]


class MissingPackagesError(UserError):
    """Packages that the run needs are not installed. The input is correct, so the exit code is 1 and not 2."""

    exit_code = 1


class PrepareProgress(Protocol):
    """Display of a preparation's progress for the user."""

    def busy(self, activity: str) -> AbstractContextManager[None]:
        """Show `activity` while the block runs."""
        ...

    def note(self, lines: Iterable[str]) -> None:
        """Show notes for the user, one line each."""
        ...


class SilentProgress:
    """`PrepareProgress` that shows nothing."""

    def busy(self, activity: str) -> AbstractContextManager[None]:
        """Show nothing."""
        return nullcontext()

    def note(self, lines: Iterable[str]) -> None:
        """Show nothing."""


@dataclass(frozen=True)
class RunRequest:
    """Run as requested by a command: recipe, overrides, and the machine or cluster."""

    # "grpo" or "sft"; None: the recipe's.
    kind: str | None
    # Name or file of the recipe; None: the tiny recipe.
    recipe: str | None
    overrides: list[str]
    # Name or directory of a run to resume; None: a new run.
    resume: Path | None = None
    # True: nothing is started or fetched.
    is_dry: bool = False
    # Cluster that the run is submitted to; None: this process drives the run.
    target: "TargetCluster | None" = None
    # True: the run waits until the cluster has free devices.
    waits: bool = False
    # True: this process is a job on a cluster, and the cluster has the devices.
    is_job: bool = False
    # True: the recipe is the config of an existing run.
    is_of_run: bool = False
    # Overrides that the command itself adds, and the key under which the file has the config; see `compose`.
    command_overrides: Sequence[str] = ()
    within: str = ""

    @property
    def is_away(self) -> bool:
        """True if the run will be on another machine with its own files."""
        return self.target is not None and self.target.away


@dataclass
class PreparedRun:
    """Run after its preparation up to some stage."""

    request: RunRequest
    progress: PrepareProgress
    # Config, settled without a machine.
    composed: Composed[Settled]
    # Run to resume; None: a new run.
    resumed: Resumed | None
    # Config, settled for the plan's machine once there is a plan.
    settled: Settled = field(init=False)
    # Plan with placement and memory; None before the stage `planned`.
    plan: RunPlan | None = None
    # Load on a planned cluster (`placement.nodes`) as table rows, see `capacity_rows`; None on a real machine or
    # cluster.
    demands: list[tuple[str, str]] | None = None
    # Reasons why the run does not fit the machine or cluster.
    problems: list[Problem] = field(default_factory=list)
    # Number of rows of train and validation. None before the stage `read`, and in a dry run without the data on this
    # machine.
    row_counts: dict[str, int] | None = None
    # Tokens that end an answer; None except in a dry run with the model on this machine.
    ends: EndTokens | None = None

    def __post_init__(self) -> None:
        self._set_config(self.composed)

    def advance(self, last: Stage) -> None:
        """Do all stages up to `last` that are not done. Raises ConfigError, and MissingPackagesError before a run's
        rows are read.
        """
        if last != "checked" and self.plan is None:
            self._make_plan()
        if last == "read" and self.row_counts is None:
            self.require_fit()
            if self.request.is_dry:
                self._read_for_dry_run()
            else:
                self._read_for_run()

    def require_fit(self) -> None:
        """Raise ConfigError if the run does not fit the machine or cluster."""
        if self.problems:
            raise ConfigError(self.problems)

    def derive_facts(self) -> None:
        """Derive the facts of new models on this machine, then check the config again. Raises ConfigError."""
        settled = self.composed.settled
        paths = {"model.path": settled.config.model.path} if settled.facts is None else {}
        for name, role in written_roles(settled.config).items():
            if role.weights is not None and settled.role_facts[name].sizes is None:
                paths[f"{name}.path"] = role.path or role.weights
        files = {key: config_file(path) for key, path in paths.items()}
        new_files = {key: file for key, file in files.items() if file is not None}
        if not new_files:
            return
        for key, file in new_files.items():
            try:
                with self.progress.busy("deriving the model's facts"):
                    find_facts(file.parent)
            except ModelError as error:
                raise ConfigError([self._problem(key, str(error))]) from error
        self._set_config(load(self.request.kind, self.request.recipe, self.request.overrides))

    def try_first_rows(self) -> None:
        """Read the first row of each data set as a run would, and add a note for each finding. Raises ConfigError."""
        self.notes += check_first_rows(self.composed.settled)

    def try_users_code(self, *, rewards: bool, environments: bool) -> None:
        """Call rewards and begin an episode on the first row, and add the results to the notes. Raises ConfigError.

        A dry run downloads neither a model nor data.
        """
        if rewards or environments:
            with self.progress.busy("trying the first row"):
                fetch = not self.request.is_dry
                self.notes += try_all(self.composed, rewards=rewards, environments=environments, fetch=fetch)

    def try_all_rows(self) -> None:
        """Score the answer of every row of the data, and add the counts to the notes. Raises ConfigError."""
        with self.progress.busy("scoring all rows"):
            self.notes += try_all_rows(self.composed)

    def write_config(self) -> Path:
        """Write the resolved config as NAME.dry-run.yaml next to the run directories, and return its path.

        An earlier file of this recipe is replaced.
        """
        run = self.composed.config.run
        path = Path(run.dir) / f"{run.name or self.composed.recipe.stem}.dry-run.yaml"
        try:
            if link := foreign_link(path.parent):
                raise OSError(f"{link} is another user's symbolic link")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, self.composed.to_yaml())
        except OSError as error:
            reason = f"cannot write {path}: {error.strerror or error}"
            raise ConfigError([self._problem("run.dir", reason)]) from error
        return path

    def _set_config(self, composed: Composed[Settled]) -> None:
        self.composed = composed
        self.settled = composed.settled
        self.notes = list(composed.notes)
        # The reader keeps the rows until the run takes them.
        self.reader = RowReader(composed.config)

    def _make_plan(self) -> None:
        """Make the plan, and set `problems` to the reasons why the run does not fit."""
        request = self.request
        target = request.target
        if self.resumed is None and not request.is_away:
            self.derive_facts()
        settled = self.composed.settled
        nodes = settled.config.placement.nodes
        if target is not None:
            machine = RunMachine(device_of(target.gpus), target.device_memory)
            self.settled = settled.settle_on(machine, settled.facts)
            self.plan = make_plan(self.settled, target.free_resources())
        elif nodes is None:
            self._plan_here()
        elif request.is_dry:
            cluster = planned_cluster(nodes)
            self.settled = settle_on_cluster(settled, cluster)
            self.plan = make_plan(self.settled, cluster.resources)
            self.demands = capacity_rows(self.settled, self.plan)
        else:
            reason = "is a planned cluster, for --dry-run only: leave it out"
            raise ConfigError([self._problem("placement.nodes", reason)])
        assert self.plan
        self.problems = self._problems_of(self.plan)
        sampling = settled.sampling
        # A dry run for this machine calls the user's code here. A run calls it later.
        if request.is_dry and target is None and self.demands is None and sampling is not None:
            self.try_users_code(rewards=has_users_reward(sampling.config), environments=sampling.config.has_turns)

    def _plan_here(self) -> None:
        """Place the run on this machine.

        In a job the run uses the cluster's devices, so the plan's problems are ignored and only its notes count.
        """
        settled = self.composed.settled
        machine = read_machine(Path(settled.config.run.dir).absolute())
        memory = min((gpu.memory for gpu in machine.gpus), default=machine.memory)
        cores = None if self.request.is_job else machine.cores
        saved = folder_bytes(RunDir(self.resumed.run).checkpoints) if self.resumed else 0
        self.settled = settled.settle_on(RunMachine(device_of(len(machine.gpus)), memory), settled.facts)
        self.plan = make_plan(self.settled, this_machine(len(machine.gpus)), machine.disk_free + saved, cores)
        if not self.request.is_dry:
            self.notes += [*disk_notes(self.plan.schedule), *crowding_notes(self.settled, cores)]

    def _problems_of(self, plan: RunPlan) -> list[Problem]:
        request = self.request
        misplaced = plan.misplaced
        if request.is_job and not request.is_dry:
            return []
        # The plan of a dry run shows a lack of room, and a run that waits waits for room.
        if request.is_dry or request.waits:
            misplaced = None
        elif misplaced and request.target is not None:
            misplaced += "; --wait waits for it"
        reasons = {
            "trainer.num_ranks": misplaced or plan.too_large,
            "model.path": plan.unserved,
            "run.dir": plan.unsaved,
            **{f"{name}.place": reason for name, reason in plan.unplaced.items()},
        }
        return [self._problem(key, reason) for key, reason in reasons.items() if reason]

    def _read_for_run(self) -> None:
        """Read the rows for the run, and try its environments on the first row."""
        composed = self.composed
        sampling = composed.settled.sampling
        self._require_packages()
        with self._reading("reading the data"):
            rows = self._read_rows()
        if sampling is None:
            return
        if composed.settled.grpo:
            first_row = rows.train[0]
            section = composed.config.data.train.section_of(first_row.source)
        else:
            with self._reading("reading the recipe's data"):
                part = part_of(sampling.config, "validation")[0]
            first_row = part.rows[0]
            section = part.section
        self._choose_sandbox(sampling.config)
        if sampling.config.has_turns and not self.request.is_job:
            with self.progress.busy("reading the environments"):
                setup = try_environments(composed, section, first_row, local_chat(sampling.config))
            self.progress.note(setup.notes)

    def _choose_sandbox(self, config: GrpoConfig) -> None:
        """Choose the sandbox of the run's programs by a probe, as this user. Raises ConfigError if none does."""
        section = config.sandbox
        if config.runs_programs:
            with self.progress.busy("probing the sandbox"):
                try:
                    chosen = choose_sandbox(section)
                except SandboxError as error:
                    remedy = f"see sandbox.require={section.require} and rlctl doctor"
                    raise ConfigError([self._problem("sandbox.name", f"{error}; {remedy}")]) from error
            chosen.sandbox.close()
            self.progress.note([str(chosen)])
            section = replace(section, name=chosen.name)
        use_section(section)

    def _require_packages(self) -> None:
        assert self.plan
        sampling = self.composed.settled.sampling
        packages = ["torch", "transformers", "ray"]
        if sampling is not None:
            packages += engine_rules(sampling.config.generation.engine).packages
        absent = [name for name in packages if find_spec(name) is None]
        if absent:
            raise MissingPackagesError(explain_missing(*absent))

    def _read_for_dry_run(self) -> None:
        """Read and tokenize all rows on this machine. Raises ConfigError for rows that the run would refuse."""
        settled = self.composed.settled
        chat = None
        if config_file(settled.config.model.path):
            with self._reading("loading the tokenizer"):
                chat = local_chat(settled.config)
                self.ends = end_tokens(settled.config, chat)
        data = settled.config.data
        if _are_here(data.train.paths) and _are_here(data.validation.path):
            with self._reading("reading the data"):
                rows = self._read_rows()
                if chat and settled.facts and settled.grpo:
                    load_run_tasks(settled.grpo, rows, chat, self._note_warning)
                elif chat and settled.facts and settled.sft:
                    load_run_samples(settled.sft, rows, chat, self._note_warning)
        sampling = settled.sampling
        if sampling is None or settled.grpo or not chat or not settled.facts:
            return
        recipes_data = sampling.config.data
        if _are_here(recipes_data.validation.path or recipes_data.train.paths):
            with self._reading("reading the recipe's data"):
                held_out_tasks(sampling, local_chat(sampling.config), self._note_warning)

    def _note_warning(self, kind: str, **fields: Any) -> None:
        """Show a warning about rows. A run would emit it as an event."""
        if kind == "warning":
            self.progress.note([fields["what"]])

    def _read_rows(self) -> RunRows:
        rows = self.reader.read()
        self.row_counts = {"train": len(rows.train), "validation": len(rows.validation)}
        return rows

    @contextmanager
    def _reading(self, activity: str) -> Iterator[None]:
        with locate_errors("data", DataError), self.progress.busy(activity):
            yield

    def _problem(self, key: str, reason: str) -> Problem:
        return Problem(str(self.composed.origins.get(key, "")), key, reason)


def prepare(request: RunRequest, last: Stage, progress: PrepareProgress | None = None) -> PreparedRun:
    """Prepare a run up to and including the stage `last`. Raises ConfigError with every problem of a stage at once.

    Problems of the plan are raised by the stage `read`. A caller that stops at `planned` finds them in
    `PreparedRun.problems`.
    """
    progress = progress or SilentProgress()
    recipe = request.recipe
    resumed = None
    replaced: list[str] = []
    if request.resume is not None:
        if recipe is not None:
            reason = f"a run keeps its own config: leave out {recipe}"
            raise ConfigError([Problem(f"--resume {request.resume}", "", reason)])
        resumed = find_resumed(request.resume, request.overrides)
        recipe = str(resumed.run / "config.yaml")
        if not request.is_away:
            replaced = replace_lost_model(resumed)
        progress.note(f"the folder of model.path is gone: going on with {override}" for override in replaced)
    composed = load(
        request.kind,
        recipe,
        [*replaced, *request.overrides],
        resume=resumed is not None or request.is_of_run,
        away=request.is_away,
        within=request.within,
        command_overrides=request.command_overrides,
    )
    if resumed:
        refuse_contradictions(composed, resumed.run)
    prepared = PreparedRun(request, progress, composed, resumed)
    prepared.advance(last)
    return prepared


def _are_here(paths: str | list[str] | None) -> bool:
    """Return True if all files of a data set are on this machine, or if `paths` is None."""
    return paths is None or all(Path(file).exists() for file in files_of(paths))
