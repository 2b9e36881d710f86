"""A run gets the strongest sandbox that a probe finds to hold; a weaker one than its config asks for is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.config.sandbox_schema import SandboxName, SandboxSection
from rlctl.config.schema import GrpoConfig
from rlctl.preflight.load import load
from rlctl.sandbox import open_sandbox as choice
from rlctl.sandbox.base import GUARANTEES, Program, SandboxError
from rlctl.sandbox.command import CommandSandbox
from rlctl.sandbox.probe import probe
from tests.unit.sandbox.kinds import LOCAL_KINDS, SMALL, local_sandbox

# The template isolates nothing but the environment's variables.
WEAK = "env HOME={folder} PATH=/usr/bin:/bin sh -c 'cd {folder}; exec \"$@\"' sh"
# A container's client stands for docker here: bubblewrap, with the folder at one place and python3 of the system.
CONTAINER = (
    "bwrap --die-with-parent --unshare-all --as-pid-1 --new-session --ro-bind /usr /usr --symlink usr/bin /bin "
    "--symlink usr/lib /lib --symlink usr/lib64 /lib64 --proc /proc --dev /dev --tmpfs /tmp "
    "--bind {folder} /work --chdir /work prlimit --as=100000000 --nproc={processes}"
)


def section(*overrides: str) -> SandboxSection:
    config = load("grpo", "grpo-tiny", list(overrides)).config
    assert isinstance(config, GrpoConfig)
    return config.sandbox


@pytest.mark.parametrize("kind", LOCAL_KINDS)
def test_a_probe_finds_every_guarantee_of_a_kind(kind: SandboxName) -> None:
    report = probe(local_sandbox(kind))
    claims = local_sandbox(kind).isolation
    assert dict(report.strengths) == dict(claims)
    # An older kernel may hold less, and the kind says so.
    assert list(report.breaches) == [name for name in GUARANTEES if claims[name] == "absent"]


@pytest.mark.long
def test_a_weaker_sandbox_than_required_is_refused_with_all_reasons() -> None:
    if shutil.which("python3", path="/usr/bin:/bin") is None:
        pytest.skip("no python3 of the system")
    with pytest.raises(SandboxError) as caught:
        choice.choose_sandbox(section("sandbox=command", f"sandbox.command={json.dumps(WEAK)}"))
    reasons = str(caught.value).split("; ")
    assert [reason.split()[4] for reason in reasons[:3]] == ["TCP,", "outside", "a"], reasons
    assert "processes had 384 MiB together, with a limit of 128" in reasons[3]
    assert "processes outlived their program by 1 s" in reasons[4]


def test_a_kind_that_cannot_work_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match=r"bwrap.* not found: apt-get install bubblewrap"):
        choice.choose_sandbox(section("sandbox=bwrap"))


def test_auto_is_the_strongest_that_works_here() -> None:
    chosen = choice.choose_sandbox(section())
    strongest = next(kind for kind in LOCAL_KINDS if not isinstance(local_sandbox(kind), str))
    assert chosen.name == chosen.sandbox.name == strongest
    assert set(chosen.report.strengths) == set(GUARANTEES)


def test_processes_of_a_run_open_the_sandbox_of_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLCTL_SANDBOX", raising=False)
    assert choice.run_section() is None
    monkeypatch.setenv("RLCTL_SANDBOX", "{}")
    asked = section("sandbox=process", "sandbox.cpu_s=3")
    choice.use_section(asked)
    assert choice.run_section() == asked
    assert choice.section_limits(asked).cpu_s == 3
    assert choice.open_sandbox().name == "process"


def test_a_command_gets_its_values_and_its_program() -> None:
    local_sandbox("bwrap")
    if shutil.which("python3", path="/usr/bin:/bin") is None:
        pytest.skip("no python3 of the system")
    sandbox = CommandSandbox(CONTAINER)
    program = Program(
        source="import os; open('out', 'w').write(os.environ['X']); print(os.getcwd())",
        outputs=("out",),
        variables={"X": "y"},
    )
    result = sandbox.run(program, SMALL)
    assert (result.stdout, result.files) == (b"/work\n", {"out": b"y"}), result


def test_a_command_that_fails_is_no_verdict_and_its_stop_command_runs(tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    sandbox = CommandSandbox("sh -c 'exit 125'", f"sh -c 'echo $0 >> {stopped}' {{id}}")
    with pytest.raises(SandboxError, match="the program was not run: exit status 125"):
        sandbox.run(Program(argv=("true",)), SMALL)
    sandbox = CommandSandbox("env", f"sh -c 'echo $0 >> {stopped}' {{id}}")
    assert sandbox.run(Program(argv=("sleep", "60")), replace(SMALL, wall_s=0.2)).ending == "wall_time"
    names = stopped.read_text().split()
    assert len(set(names)) == 2 and all(name.startswith("rlctl-") for name in names)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sandbox=jail"], "sandbox.name"),
        (["sandbox=command"], "sandbox.command: must be set"),
        (["sandbox.url=http://x"], "needs sandbox.name=url, not auto"),
        (["sandbox=url", "sandbox.url=x"], "must begin with http:// or https://"),
        (["sandbox=command", "sandbox.command='docker {image}'"], "{image} is none of {id}, {folder}"),
        (["sandbox=command", "sandbox.command=no-such-program"], "there is no program no-such-program"),
        (["sandbox.require=[network, disk]"], "disk"),
        (["sandbox.readable=[/no/such]"], "there is no folder /no/such"),
        (["environment.name=python", "sandbox.wall_s=30"], "must be below environment.timeout_s=30"),
        (["environment.name=shell", "sandbox=url", "sandbox.url=http://x"], "keeps no state for the tools"),
        (["sandbox.stop_command=true"], "needs sandbox.command"),
    ],
)
def test_a_mistake_in_the_section_is_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match="sandbox") as caught:
        load("grpo", "grpo-tiny", overrides)
    assert message in str(caught.value)
