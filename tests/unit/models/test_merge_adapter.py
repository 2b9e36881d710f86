"""A merged model is its base, with the product of the adapter's matrices added in float32."""

from pathlib import Path

import pytest
import torch

from rlctl.models.hf_folder import WeightFiles
from rlctl.models.merge_adapter import write_merged
from tests.system.training.scenario import adapters_of
from tests.unit.models.test_adapter_folder import make_adapter
from tests.zoo import make_family


@pytest.mark.parametrize("family", ["qwen3", "phi3", "qwen2_moe"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_merged_model_is_added_in_float32_and_cast_once(family: str, dtype: str | None, tmp_path: Path) -> None:
    model = make_family(tmp_path / "model", family)
    spec = adapters_of(model)
    values = make_adapter(tmp_path / "adapter", model, spec)
    assert write_merged(model, tmp_path / "adapter", tmp_path / "merged", dtype) == [dtype or "float32"]
    base = WeightFiles(model)
    merged = WeightFiles(tmp_path / "merged")
    assert base.names() == merged.names()
    for name in base.names():
        expected = base.tensor(name).float()
        module = name.removesuffix(".weight")
        if f"{module}.lora_A.weight" in values:
            product = values[f"{module}.lora_B.weight"] @ values[f"{module}.lora_A.weight"]
            expected = expected + product * 2.0
        torch.testing.assert_close(merged.tensor(name), expected.to(merged.dtype(name)), atol=0, rtol=0)
