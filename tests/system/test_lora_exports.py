"""A trained adapter gives equal greedy tokens in PEFT, merged in transformers, in vLLM's own LoRA and in our engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlctl.evaluation.export import export
from rlctl.evaluation.target import Target
from rlctl.generation.vllm.kind import environment
from tests.system.adapters import engine_with, start_adapted
from tests.system.engines import greedy, sample
from tests.system.training.scenario import WeightedLoss, adapters_of, open_trainer, sequences, share, totals
from tests.zoo import make_family

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 3, 40]]
TOKENS = 12
# vLLM's own LoRA, in a second process: it compiles nothing, and samples greedily.
_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
base, adapter, prompts, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
llm = LLM(base, dtype="float32", enable_lora=True, max_lora_rank=8, enforce_eager=True, max_model_len=64,
          skip_tokenizer_init=True, kv_cache_memory_bytes=32 << 20)
params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
answers = llm.generate(inputs, params, lora_request=LoRARequest("a", 1, adapter))
print("\\n" + json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))
"""


def by_transformers(model: torch.nn.Module) -> list[list[int]]:
    answers = []
    for prompt in PROMPTS:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(TOKENS):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


@pytest.mark.long  # the files: tests/unit/models/test_adapter_folder.py
@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_an_export_gives_the_same_greedy_tokens_everywhere(family: str, ray_here: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is in the dev extra")
    from transformers import AutoModelForCausalLM

    base = make_family(tmp_path / "base", family)
    data = sequences(6)
    spec = adapters_of(base, rank=8)
    with open_trainer(base, tmp_path, adapters=spec) as trainer:
        for _ in range(6):
            trainer.train(share(data, 64), WeightedLoss(), totals(data))
        trainer.export_folder(tmp_path / "trained")
    adapter = export(Target(str(tmp_path / "trained")), tmp_path / "adapter", None, print)
    merged = export(Target(str(tmp_path / "trained")), tmp_path / "merged", None, print, merged=True)

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    untrained = by_transformers(plain)
    expected = by_transformers(peft.PeftModel.from_pretrained(plain, adapter))
    assert expected != untrained
    assert by_transformers(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)) == expected
    # transformers' own entrance: the folder of an adapter names its base.
    assert by_transformers(AutoModelForCausalLM.from_pretrained(adapter, dtype=torch.float32)) == expected

    engine = start_adapted(engine_with(base, spec, adapter_folder=str(adapter), version=1), ray_here, "exported")
    try:
        engine.built().wait(600.0)
        answers = sample(engine, greedy(PROMPTS, TOKENS)).unpack()
    finally:
        engine.kill()
    assert [answer.tokens.tolist() for answer in answers] == expected

    command = [sys.executable, "-c", _VLLM, str(base), str(adapter), json.dumps(PROMPTS), str(TOKENS)]
    env = {**environment("cpu", []), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    vllm = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **env}, timeout=600)
    assert vllm.returncode == 0, vllm.stderr[-3000:]
    assert json.loads(vllm.stdout.splitlines()[-1]) == expected
