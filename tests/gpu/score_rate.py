"""Tokens scored per second, and forward MFU, of one engine with random weights on one GPU.

    python -m tests.gpu.score_rate [--shape qwen3-4b] [--sequences 512] [--tokens 1024] [--eager]

Needs no Ray and no weights on disk. Prints one line of JSON a pass. MFU: 2 FLOPs a parameter and token, the head's
included, and the attention's, over the GPU's peak in bfloat16.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from rlctl.bench.workload import SHAPES, model_folder
from rlctl.generation.engine import Engine
from rlctl.generation.requests import RequestId, RolloutId, ScoreRequest
from rlctl.generation.spec import EngineSpec, build_engine
from rlctl.generation.vllm.kind import environment

PASSES = 3


def main() -> None:
    """Build the engine, and score every sequence `PASSES` times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    os.environ |= environment(arguments.device, ["0"])
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(arguments.shape, Path(folder))
        begin = time.perf_counter()
        engine = build_engine(_engine_spec(model, arguments))
        print(json.dumps({"build_s": round(time.perf_counter() - begin, 1)}), flush=True)
        shape = SHAPES[arguments.shape]
        draws = np.random.default_rng(0)
        for number in range(PASSES):
            seconds = _score_all(engine, draws, number, arguments)
            print(json.dumps(_figures(shape, arguments, seconds, engine)), flush=True)
    # vLLM's threads need not end.
    os._exit(0)


def _engine_spec(model: Path, arguments: argparse.Namespace) -> EngineSpec:
    return EngineSpec(
        kind="vllm",
        options={"fast_path": True, "enforce_eager": arguments.eager},
        model_path=str(model),
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
        load_format="dummy",
        prefix_caching=False,
        reset_prefix_cache=True,
        recompute_kv_cache=False,
        forced_lengths=None,
        version=0,
        scores=True,
    )


def _score_all(engine: Engine, draws: np.random.Generator, number: int, arguments: argparse.Namespace) -> float:
    """Score new random sequences; return the seconds until the last answer."""
    vocab = SHAPES[arguments.shape]["vocab_size"]
    requests = []
    for index in range(arguments.sequences):
        tokens = draws.integers(0, vocab, arguments.tokens).tolist()
        requests.append(ScoreRequest(RequestId(RolloutId("train", "t", number, index)), tokens, 1))
    begin = time.perf_counter()
    engine.score(requests)
    answers = 0
    while answers < len(requests):
        finished = engine.collect(60.0)
        assert finished.ids, "nothing was scored for a minute"
        assert np.isfinite(finished.columns.log_probs).all()
        answers += len(finished.ids)
    return time.perf_counter() - begin


def forward_flops(shape: dict[str, int], tokens: int) -> float:
    """Return the FLOPs of a forward pass for one token of a sequence of `tokens` tokens, with the head's."""
    heads = shape["num_attention_heads"] * shape["head_dim"]
    kv_heads = shape["num_key_value_heads"] * shape["head_dim"]
    layer = shape["hidden_size"] * (2 * heads + 2 * kv_heads + 3 * shape["intermediate_size"])
    matrices = shape["num_hidden_layers"] * layer + shape["vocab_size"] * shape["hidden_size"]
    # A token attends to half of the sequence on average: two products of 2 FLOPs each.
    attention = shape["num_hidden_layers"] * 2 * heads * tokens
    return float(2 * matrices + attention)


def _figures(
    shape: dict[str, int], arguments: argparse.Namespace, seconds: float, engine: Engine
) -> dict[str, float | str | None]:
    """Return the figures of one pass."""
    from rlctl.telemetry.throughput import peak_flops

    tokens = arguments.sequences * arguments.tokens
    flops = tokens * forward_flops(shape, arguments.tokens)
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
        "peak_gib": round(engine.memory()["device_peak"] / 2**30, 2),
    }


if __name__ == "__main__":
    main()
