"""Shortened steps are on only if all attributes that they use exist in vLLM. They honour or refuse each parameter."""

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.generation.vllm.fast import next_token, switch
from rlctl.generation.vllm.fast.switch import EITHER, REQUEST, SCHEDULER, shorten_steps
from rlctl.generation.vllm.make_requests import vllm_request
from rlctl.preflight.engines.vllm import COMPARED
from tests.system.engines import spec_for
from tests.turns import turn

FAST = Path(switch.__file__).parent


def read_names(file: str, *owners: str) -> set[str]:
    """Return the dotted names that a file reads or sets of `owners`, such as "self._scheduler"."""
    names = set()
    for node in ast.walk(ast.parse((FAST / file).read_text())):
        if isinstance(node, ast.Attribute):
            owner, _, name = ast.unparse(node).rpartition(".")
            if owner in owners:
                names.add(name)
    return names


@pytest.mark.parametrize("file", ["next_token.py", "step_outputs.py"])
def test_every_name_of_a_scheduler_and_of_a_request_is_asked_for(file: str) -> None:
    scheduler_names = {name.rpartition(".")[2] for name in SCHEDULER}
    owners = ("scheduler", "self._scheduler", "manager", "self._manager")
    # `_FEATURES` checks these attributes.
    parts = {"kv_cache_manager", "block_pool", "coordinator"}
    assert read_names(file, *owners) <= scheduler_names | parts
    request_names = set(REQUEST).union(*EITHER)
    assert read_names(file, "request") <= request_names | {"num_in_flight_tokens"}


def test_no_name_is_asked_for_that_nothing_reads() -> None:
    # If a newer vLLM lacks a name that is not used, shortened steps must not be switched off.
    files = ["next_token.py", "step_outputs.py"]
    attributes = set[str]()
    request_names = set[str]()
    for file in files:
        nodes = ast.walk(ast.parse((FAST / file).read_text()))
        attributes.update(node.attr for node in nodes if isinstance(node, ast.Attribute))
        request_names |= read_names(file, "request")
    assert {name.rpartition(".")[2] for name in SCHEDULER} <= attributes | {*next_token._FEATURES}
    assert {*REQUEST} <= request_names


def llm(scheduler: Any) -> Any:
    """Return an object with the attributes of vLLM's engine that the switch reads."""
    return SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler)))


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
    message = shorten_steps(llm(SimpleNamespace(running=[])), spec_for(tmp_path))
    assert message == (
        "generation.engine.fast_path=auto uses vLLM's own steps: vLLM 0.32.0 has no Scheduler.gone.part, "
        "Request.was_renamed"
    )


def test_this_vllm_has_every_name_of_a_request() -> None:
    assert switch._missing_of_requests() == []


def test_every_sampling_parameter_is_honoured_or_refused(tmp_path: Path) -> None:
    """Each parameter of this vLLM that shortened steps do not read is refused at any other value."""
    llm_engine = SimpleNamespace(input_processor=SimpleNamespace(process_inputs=lambda *args, **options: args[2]))
    params = vllm_request(llm_engine, spec_for(tmp_path), turn(0))
    assert params.max_tokens == turn(0).max_new_tokens
    refused = []
    names = [name for name in params.__struct_fields__ if not name.startswith("_")]
    for name in names:
        usual_value = getattr(params, name)
        setattr(params, name, object())
        try:
            switch.refuse_what_is_not_honoured(params)
        except ValueError as error:
            refused.append(name)
            assert str(error).startswith(f"{name}=<object")
            assert str(error).endswith("generation.engine.fast_path=off honours it")
        setattr(params, name, usual_value)
    assert {"min_p", "presence_penalty", "bad_words", "min_tokens", "logit_bias", "n", "logprobs"} <= {*refused}
    assert {*refused, *switch.HONOURED} == set(names)


def test_requests_pass_on_every_sampling_key_of_the_config(tmp_path: Path) -> None:
    """vLLM gets the same sampling parameters with shortened steps as without."""
    llm_engine = SimpleNamespace(input_processor=SimpleNamespace(process_inputs=lambda *args, **options: args[2]))
    spec = replace(spec_for(tmp_path), top_p=0.9, top_k=20, stop_token_ids=(4,))
    off = replace(spec, options={**spec.options, "fast_path": False})
    request = turn(0, longest=7, temperature=0.7, seed=3)
    for engine_spec in (spec, off):
        params = vllm_request(llm_engine, engine_spec, request)
        assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.7, 0.9, 20, 3)
        assert (params.max_tokens, params.stop_token_ids) == (7, [4])
        parity_params = vllm_request(llm_engine, engine_spec, turn(0, temperature=0.7, purpose="parity"))
        assert (parity_params.temperature, parity_params.top_p, parity_params.top_k) == (0.7, 1.0, 0)
