"""Tokens valued per second, and forward MFU, of a random reward model on one GPU: resident, and on a vLLM engine.

    python -m tests.gpu.reward_model_rate [--shape qwen3-1.7b] [--sequences 512] [--tokens 1024] [--compile] [--eager]

Needs no Ray. Prints one line of JSON a pass. `resident` is a trainer rank's reward model with the copies of its weights
to the device, `vllm` an engine with `EngineSpec.values`. MFU: 2 FLOPs a parameter of the layers and token, and the
attention's, over the GPU's peak in bfloat16.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlctl.bench.workload import SHAPES, model_folder

PASSES = 3
PARTS = ("resident", "vllm")


def main() -> None:
    """Write a random reward model, and measure both parts, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-1.7b")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--compile", action="store_true", help="compile the layers of the resident model")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs and no compilation in vLLM")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.part:
        measure = measure_resident if arguments.part == "resident" else measure_engine
        measure(arguments.folder, arguments)
        # vLLM's threads need not end.
        sys.stdout.flush()
        os._exit(0)
    with tempfile.TemporaryDirectory() as folder:
        model = write_reward_model(arguments.shape, Path(folder), arguments.device)
        for part in PARTS:
            command = [sys.executable, "-m", "tests.gpu.reward_model_rate", *sys.argv[1:]]
            subprocess.run([*command, "--part", part, "--folder", str(model)], check=False)


def write_reward_model(shape: str, folder: Path, device: str) -> Path:
    """Write a random sequence classifier with one label, and return its folder."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model_folder(shape, folder), num_labels=1)
    with torch.device(device):
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "reward-model")
    return folder / "reward-model"


def draw_sequences(number: int, arguments: argparse.Namespace) -> list[list[int]]:
    """Return the random sequences of a pass."""
    draws = np.random.default_rng(number)
    vocab = SHAPES[arguments.shape]["vocab_size"]
    return [draws.integers(0, vocab, arguments.tokens).tolist() for _ in range(arguments.sequences)]


def measure_resident(folder: Path, arguments: argparse.Namespace) -> None:
    """Value every sequence `PASSES` times in this process, as a trainer rank does."""
    import torch
    import torch.distributed as dist

    from rlctl.training.fsdp.columns import compute_values
    from rlctl.training.fsdp.mesh import make_meshes
    from rlctl.training.fsdp.resident import ResidentModel
    from rlctl.training.micro_batching import TrainingSample, plan_micro_batches
    from rlctl.utils.ports import free_port
    from tests.system.training.scenario import CONFIG

    device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
    backend = "cpu:gloo,cuda:nccl" if arguments.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    mesh, _ = make_meshes(device.type, 1, 1)
    settings = replace(
        CONFIG, dtype="bfloat16", micro_batch_tokens=arguments.micro_batch_tokens, compile=arguments.compile
    )
    began = time.perf_counter()
    resident = ResidentModel(folder, settings, device, torch.bfloat16, mesh, temperature=1.0)
    print(json.dumps({"part": "resident", "build_s": round(time.perf_counter() - began, 1)}), flush=True)
    for number in range(PASSES):
        samples = []
        for tokens in draw_sequences(number, arguments):
            samples.append(TrainingSample(np.array(tokens, np.int32), np.arange(len(tokens)) == len(tokens) - 1))
        (plan,) = plan_micro_batches([len(sample) for sample in samples], 1, arguments.micro_batch_tokens)
        micro_batches = [[samples[index] for index in indices] for indices in plan]
        began = time.perf_counter()
        with resident.on_device(), torch.no_grad():
            loaded = time.perf_counter()
            rows = compute_values(resident.model, micro_batches, device)
            seconds = time.perf_counter() - loaded
        whole_seconds = time.perf_counter() - began
        assert all(np.isfinite(row[-1]) for batch in rows for row in batch)
        peak = torch.cuda.max_memory_allocated() if arguments.device == "cuda" else 0
        figures = figures_of(arguments, whole_seconds)
        print(
            json.dumps({"part": "resident", **figures, "copies_s": round(whole_seconds - seconds, 3), **peak_of(peak)}),
            flush=True,
        )


def measure_engine(folder: Path, arguments: argparse.Namespace) -> None:
    """Value every sequence `PASSES` times by an engine in this process."""
    from rlctl.generation.vllm.kind import environment

    os.environ |= environment(arguments.device, ["0"])
    from rlctl.generation.requests import VALUE, RequestId, RolloutId, ScoreRequest
    from rlctl.generation.spec import build_engine

    began = time.perf_counter()
    engine = build_engine(engine_spec(folder, arguments))
    print(json.dumps({"part": "vllm", "build_s": round(time.perf_counter() - began, 1)}), flush=True)
    for number in range(PASSES):
        requests = []
        for index, tokens in enumerate(draw_sequences(number, arguments)):
            request_id = RequestId(RolloutId("train", "t", number, index))
            requests.append(ScoreRequest(request_id, tokens, len(tokens) - 1))
        began = time.perf_counter()
        engine.score(requests)
        answers = 0
        while answers < len(requests):
            finished = engine.collect(60.0)
            assert finished.ids, "nothing was valued for a minute"
            for completion in finished.columns.unpack():
                assert np.isfinite(completion.columns[VALUE]).all()
            answers += len(finished.ids)
        seconds = time.perf_counter() - began
        peak = int(engine.memory()["device_peak"])
        print(json.dumps({"part": "vllm", **figures_of(arguments, seconds), **peak_of(peak)}), flush=True)


def engine_spec(folder: Path, arguments: argparse.Namespace) -> Any:
    """Return the spec of an engine that values tokens."""
    from rlctl.generation.spec import EngineSpec

    return EngineSpec(
        kind="vllm",
        options={"fast_path": True, "enforce_eager": arguments.eager or arguments.device == "cpu"},
        model_path=str(folder),
        dtype="bfloat16",
        device=arguments.device,
        max_model_len=arguments.tokens,
        tensor_parallel_size=1,
        max_num_seqs=64,
        gpu_memory_utilization=0.9,
        kv_cache_mib=8192 if arguments.device == "cuda" else 64,
        top_p=1.0,
        top_k=0,
        stop_token_ids=(),
        sleeps=False,
        seed=0,
        load_format="auto",
        prefix_caching=False,
        reset_prefix_cache=True,
        recompute_kv_cache=False,
        forced_lengths=None,
        version=0,
        values=True,
    )


def figures_of(arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Return the figures of one pass."""
    from rlctl.telemetry.throughput import peak_flops

    shape = SHAPES[arguments.shape]
    heads = shape["num_attention_heads"] * shape["head_dim"]
    kv_heads = shape["num_key_value_heads"] * shape["head_dim"]
    layer = shape["hidden_size"] * (2 * heads + 2 * kv_heads + 3 * shape["intermediate_size"])
    # A token attends to half of the sequence on average: two products of 2 FLOPs each.
    attention = 2 * heads * arguments.tokens
    tokens = arguments.sequences * arguments.tokens
    flops = tokens * shape["num_hidden_layers"] * (2 * layer + attention)
    device = arguments.device
    if device == "cuda":
        import torch

        device = torch.cuda.get_device_name()
    peak = peak_flops(device)
    return {
        "device": device,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds),
        "forward_mfu": round(flops / seconds / peak, 3) if peak else None,
    }


def peak_of(count: int) -> dict[str, float]:
    """Return the peak of device memory in GiB, given in bytes."""
    return {"peak_gib": round(count / 2**30, 2)}


if __name__ == "__main__":
    main()
