"""vLLM's registry is asked while an engine is built; its refusal is one line, and is kept."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from rlctl.config.errors import ModelError
from rlctl.generation.vllm.build import build_llm, inspect_classes_here
from rlctl.generation.vllm.registry_answer import refusal
from rlctl.models.model_sizes import read_sizes
from rlctl.preflight.engines.vllm import ENGINE, lora_options
from tests.system.engines import spec_for
from tests.unit.folders import MODEL


def test_an_architecture_that_vllm_lacks_is_one_line_now_and_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "known").mkdir()
    (tmp_path / "known" / "config.json").write_text(json.dumps(MODEL))
    sizes = read_sizes(tmp_path / "known" / "config.json")
    folder = str(tmp_path)
    config = {"model_type": "codegen", "architectures": ["CodeGenForCausalLM"], "n_positions": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ENGINE.find_refusal("cuda", folder, sizes) is None
    with pytest.raises(ModelError) as caught:
        build_llm(
            replace(spec_for(tmp_path), load_format="dummy"), "rlctl.generation.vllm.worker_extension.RefitWorker"
        )
    import vllm

    lacks = f"vLLM {vllm.__version__} does not serve CodeGenForCausalLM"
    assert str(caught.value) == f"{tmp_path}: {lacks}, nor does its Transformers backend; a newer vLLM may"
    assert ENGINE.find_refusal("cuda", folder, sizes) == str(caught.value)


def test_an_error_in_vllms_class_of_the_model_is_one_line_with_the_key_that_it_reads(tmp_path: Path) -> None:
    """The family mimo_v2_flash of the zoo shows it with the engine."""
    import vllm
    from transformers import MiMoV2FlashConfig

    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MiMoV2FlashForCausalLM"]}))
    place = Path(vllm.__file__).parent / "model_executor/models/mimo_v2.py"
    with pytest.raises(AttributeError) as raised:
        exec(compile("config.hybrid_layer_pattern", place, "exec"), {"config": MiMoV2FlashConfig()})
    message = str(refusal(raised.value, str(tmp_path)))
    assert message.startswith(
        f"{tmp_path}: vLLM {vllm.__version__} does not build MiMoV2FlashForCausalLM: AttributeError: "
    )
    assert message.endswith("; it reads hybrid_layer_pattern from config.json")


def test_another_error_is_vllms_own(tmp_path: Path) -> None:
    assert refusal(ValueError("the cache has no room"), str(tmp_path)) is None
    assert refusal(AttributeError("raised by no class of a model"), str(tmp_path)) is None


def test_an_adapter_of_any_rank_is_served_by_a_rank_that_vllm_takes() -> None:
    from vllm.config.lora import LoRAConfig, MaxLoRARanks

    vllm_ranks = get_args(MaxLoRARanks)
    for rank in range(1, max(vllm_ranks) + 1):
        _, *rank_option = lora_options(rank).split()
        max_rank = int(rank_option[1]) if rank_option else LoRAConfig.max_lora_rank
        assert max_rank in vllm_ranks and max_rank >= rank


def test_a_models_class_is_looked_at_in_the_engines_own_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start on a CPU therefore imports vLLM only once. The answer kept by an earlier start is not read."""
    from vllm.model_executor.models import registry

    def start_another(*arguments: Any, **options: Any) -> None:
        raise AssertionError("another process")

    model = registry.ModelRegistry.models["Gemma2ForCausalLM"]
    monkeypatch.setattr(registry, "_run_in_subprocess", start_another)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    with pytest.raises(AssertionError, match="another process"):
        model.inspect_model_cls()
    inspect_classes_here()
    assert model.inspect_model_cls().is_text_generation_model
