"""Shortened steps are on only where every name that they rely on exists, and honour every parameter or refuse it."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.generation.vllm.build import vllm_request
from rlctl.generation.vllm.fast import device_step, switch
from rlctl.generation.vllm.fast.device_step import MODULES, RUNNER, device_names_lacking
from rlctl.generation.vllm.fast.switch import COMPARED, EITHER, REQUEST, SCHEDULER, shorten_steps
from tests.system.engines import spec_for
from tests.turns import turn

FAST = Path(switch.__file__).parent


def read_of(file: str, *owners: str) -> set[str]:
    """Return the dotted names that a file reads or sets of `owners`, such as "self._scheduler"."""
    found = set()
    for node in ast.walk(ast.parse((FAST / file).read_text())):
        if isinstance(node, ast.Attribute):
            owner, _, name = ast.unparse(node).rpartition(".")
            found |= {name} if owner in owners else set()
    return found


@pytest.mark.parametrize("file", ["next_token.py", "step_outputs.py", "prefix_hashes.py"])
def test_every_name_of_a_scheduler_and_of_a_request_is_asked_for(file: str) -> None:
    asked = {name.rpartition(".")[2] for name in SCHEDULER}
    owners = ("scheduler", "self._scheduler", "core.scheduler", "manager", "self._manager")
    # Named by what they are part of.
    parts = {"kv_cache_manager", "block_pool", "coordinator"}
    assert read_of(file, *owners) <= asked | parts
    assert read_of(file, "request") <= {*REQUEST, *(name for pair in EITHER for name in pair), "num_in_flight_tokens"}


def test_every_name_of_a_model_runner_is_asked_for() -> None:
    asked = {".".join(name.split(".")[:2]) for name in RUNNER} | {name.split(".")[0] for name in RUNNER}
    read = read_of("device_step.py", "runner") | {f"sampler.{name}" for name in read_of("device_step.py", "sampler")}
    assert read - {f"sampler.{place.partition(':')[2]}" for place in MODULES} <= asked


class Runner:
    """A model runner of vLLM's second kind, as far as names go."""


Runner.__module__ = "vllm.v1.worker.gpu.model_runner"


def test_a_runner_without_a_name_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    runner: Any = Runner()
    for name in RUNNER:
        owner = runner
        *parts, last = name.split(".")
        for part in parts:
            if not hasattr(owner, part):
                setattr(owner, part, SimpleNamespace())
            owner = getattr(owner, part)
        if not hasattr(owner, last):
            setattr(owner, last, SimpleNamespace())
    assert device_names_lacking(runner) == [], "another version is left alone"
    monkeypatch.setattr("vllm.__version__", device_step.COMPARED[0])
    monkeypatch.setattr(device_step, "MODULES", ("json:dumps", "json:gone", "no_such_module:dumps"))
    del runner.sampler.penalties_state.apply_penalties
    assert device_names_lacking(runner) == [
        "GPUModelRunner.sampler.penalties_state.apply_penalties",
        "json:gone",
        "no_such_module:dumps",
    ]
    assert device_names_lacking(object()) == [], "a CPU's runner is left alone"
    assert len(MODULES) == 6


def llm(scheduler: Any) -> Any:
    """vLLM's engine, as far as the switch asks."""
    core = SimpleNamespace(scheduler=scheduler, request_block_hasher=None)
    return SimpleNamespace(
        engine_core=SimpleNamespace(engine_core=core), collective_rpc=lambda method: [[], ["GPUModelRunner.x"]]
    )


def test_a_version_that_nobody_compared_has_vllms_own_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("vllm.__version__", "0.99.0+cpu")
    assert shorten_steps(llm(None), spec_for(tmp_path)) == (
        "generation.engine.fast_path=auto uses vLLM's own steps: shortened ones were compared with vLLM 0.32.0 on this "
        "device, not with 0.99.0"
    )


def test_names_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("vllm.__version__", COMPARED["cpu"][0])
    monkeypatch.setattr(switch, "SCHEDULER", ("running", "gone.part"))
    monkeypatch.setattr(switch, "REQUEST", ("status", "was_renamed"))
    said = shorten_steps(llm(SimpleNamespace(running=[])), spec_for(tmp_path))
    assert said == (
        "generation.engine.fast_path=auto uses vLLM's own steps: vLLM 0.32.0 has no Scheduler.gone.part, "
        "Request.was_renamed, GPUModelRunner.x"
    )


def test_this_vllm_has_every_name_of_a_request() -> None:
    assert switch._missing_of_requests() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("min_p", 0.1), ("presence_penalty", 0.5), ("repetition_penalty", 1.2), ("bad_words", ["no"]), ("min_tokens", 3)],
)
def test_a_parameter_that_shortened_steps_pass_over_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    from vllm import SamplingParams

    made = SimpleNamespace(input_processor=SimpleNamespace(process_inputs=lambda *args, **named: args[2]))
    assert vllm_request(made, spec_for(tmp_path), turn(0)).max_tokens == turn(0).max_new_tokens
    with pytest.raises(ValueError, match=f"{name}=.*generation.engine.fast_path=off honours it"):
        switch.refuse_what_is_not_honoured(SamplingParams(**{name: value}))
