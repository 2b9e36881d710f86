"""Shortened steps are on only where every name that they rely on exists, and honour every parameter or refuse it."""

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.generation.vllm.build import vllm_request
from rlctl.generation.vllm.fast import next_token, switch
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


@pytest.mark.parametrize("file", ["next_token.py", "step_outputs.py"])
def test_every_name_of_a_scheduler_and_of_a_request_is_asked_for(file: str) -> None:
    asked = {name.rpartition(".")[2] for name in SCHEDULER}
    owners = ("scheduler", "self._scheduler", "manager", "self._manager")
    # Named by their features.
    parts = {"kv_cache_manager", "block_pool", "coordinator"}
    assert read_of(file, *owners) <= asked | parts
    assert read_of(file, "request") <= {*REQUEST, *(name for pair in EITHER for name in pair), "num_in_flight_tokens"}


def test_no_name_is_asked_for_that_nothing_reads() -> None:
    # Without it a newer vLLM would lose the shortened steps for nothing.
    files = ["next_token.py", "step_outputs.py"]
    trees = [ast.walk(ast.parse((FAST / file).read_text())) for file in files]
    read = {node.attr for tree in trees for node in tree if isinstance(node, ast.Attribute)}
    assert {name.rpartition(".")[2] for name in SCHEDULER} <= read | {*next_token._FEATURES}
    assert {*REQUEST} <= set().union(*(read_of(file, "request") for file in files))


def llm(scheduler: Any) -> Any:
    """vLLM's engine, as far as the switch asks."""
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
    said = shorten_steps(llm(SimpleNamespace(running=[])), spec_for(tmp_path))
    assert said == (
        "generation.engine.fast_path=auto uses vLLM's own steps: vLLM 0.32.0 has no Scheduler.gone.part, "
        "Request.was_renamed"
    )


def test_this_vllm_has_every_name_of_a_request() -> None:
    assert switch._missing_of_requests() == []


def test_every_sampling_parameter_is_honoured_or_refused(tmp_path: Path) -> None:
    """Each parameter of this vLLM that shortened steps do not read is refused at any other value."""
    made = SimpleNamespace(input_processor=SimpleNamespace(process_inputs=lambda *args, **named: args[2]))
    params = vllm_request(made, spec_for(tmp_path), turn(0))
    assert params.max_tokens == turn(0).max_new_tokens
    refused = []
    for name in (each for each in params.__struct_fields__ if not each.startswith("_")):
        usual, other = getattr(params, name), object()
        setattr(params, name, other)
        try:
            switch.refuse_what_is_not_honoured(params)
        except ValueError as error:
            refused.append(name)
            assert str(error).startswith(f"{name}=<object")
            assert str(error).endswith("generation.engine.fast_path=off honours it")
        setattr(params, name, usual)
    assert {"min_p", "presence_penalty", "bad_words", "min_tokens", "logit_bias", "n", "logprobs"} <= {*refused}
    assert {*refused, *switch.HONOURED} == {each for each in params.__struct_fields__ if not each.startswith("_")}


def test_requests_pass_on_every_sampling_key_of_the_config(tmp_path: Path) -> None:
    """With shortened steps and without: vLLM itself gets the same parameters."""
    made = SimpleNamespace(input_processor=SimpleNamespace(process_inputs=lambda *args, **named: args[2]))
    spec = replace(spec_for(tmp_path), top_p=0.9, top_k=20, stop_token_ids=(4,))
    off = replace(spec, options={**spec.options, "fast_path": False})
    request = turn(0, longest=7, temperature=0.7, seed=3)
    for own in (spec, off):
        params = vllm_request(made, own, request)
        assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.7, 0.9, 20, 3)
        assert (params.max_tokens, params.stop_token_ids) == (7, [4])
        whole = vllm_request(made, own, turn(0, temperature=0.7, purpose="parity"))
        assert (whole.temperature, whole.top_p, whole.top_k) == (0.7, 1.0, 0)
