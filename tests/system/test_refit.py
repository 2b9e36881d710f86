"""After a refit an engine samples what a fresh engine on the same weights samples, for every architecture,
and its log-probs are those of transformers."""

from pathlib import Path

import numpy as np
import pytest

from rlctl.generation.requests import SampleRequest
from rlctl.grpo.mismatch import mismatch
from rlctl.refit.plan import RefitError
from rlctl.refit.refit import EngineEnd, Refit
from rlctl.workers.errors import WorkerError
from rlctl.workers.group import WorkerGroup, WorkerSpec
from tests.system.engines import FolderSource, MakeSource, greedy, start_engine
from tests.tiny_models import KINDS, Kind, make_model

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12] * 20]
DEADLINE = 280.0
TEMPERATURE = 0.7


def log_probs(folder: Path, prompt: list[int], answer: list[int]) -> np.ndarray:
    """Of each answer token, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0] / TEMPERATURE
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return rows[torch.arange(len(answer)), torch.tensor(answer)].numpy()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_after_refit_equals_a_fresh_engine(kind: Kind, ray_here: Path, tmp_path: Path) -> None:
    old, new = make_model(tmp_path / "old", kind, seed=1), make_model(tmp_path / "new", kind, seed=2)
    engines = [start_engine(folder, ray_here, f"{kind}-{folder.name}") for folder in (old, new)]
    source = WorkerGroup([WorkerSpec("source", MakeSource(new, FolderSource))], DEADLINE)
    try:
        for engine in engines:
            engine.built().wait(DEADLINE)
        before = engines[0].start("generate", greedy(PROMPTS, 16)).wait(DEADLINE)[0]
        refit = Refit(source, "float32", "shm", str(tmp_path / "shm"), DEADLINE)
        end = EngineEnd(engines[0], 1)
        refit.open([end])
        refit.run([end], version=3, checksums=True)
        after, fresh = (engine.start("generate", greedy(PROMPTS, 16)).wait(DEADLINE)[0] for engine in engines)
        assert not np.array_equal(before.tokens, fresh.tokens)
        assert np.array_equal(after.tokens, fresh.tokens)
        assert np.array_equal(after.log_probs, fresh.log_probs)
        assert set(after.versions.tolist()) == {3}
        requests = [SampleRequest(f"s{i}", prompt, 2, 16, TEMPERATURE, i) for i, prompt in enumerate(PROMPTS)]
        sampled = engines[0].start("generate", requests).wait(DEADLINE)[0].split(requests)
        rollouts = [(request.prompt_tokens, one) for request, group in zip(requests, sampled) for one in group]
        theirs = [one.log_probs for _, one in rollouts]
        ours = [log_probs(new, prompt, one.tokens.tolist()) for prompt, one in rollouts]
        gap = mismatch(theirs, ours, [np.ones(len(row), np.bool_) for row in theirs])
        assert gap.token_mult_prob_error <= 1.001
        assert gap.max_abs_diff < 1e-3
    finally:
        source.kill()
        for engine in engines:
            engine.kill()


class BrokenSource(FolderSource):
    """Announces one checksum that is not that of what it sends."""

    def refit_send(self, header):  # type: ignore[no-untyped-def]
        sums = super().refit_send(header)
        return [sums[0], sums[1] + 1, *sums[2:]]


class ShortSource(FolderSource):
    """Loses a tensor on the way."""

    def _tensors(self):  # type: ignore[no-untyped-def]
        tensors = list(super()._tensors())
        return iter(tensors if not hasattr(self, "_sender") or self._sender is None else tensors[:-1])


@pytest.mark.slow
def test_what_goes_wrong_in_a_refit_is_named(ray_here: Path, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    engine = start_engine(folder, ray_here, "named")
    sources = [
        WorkerGroup([WorkerSpec("source", MakeSource(folder, s))], DEADLINE) for s in (BrokenSource, ShortSource)
    ]
    try:
        engine.built().wait(DEADLINE)
        end = EngineEnd(engine, 1)
        broken = Refit(sources[0], "float32", "shm", str(tmp_path / "a"), DEADLINE)
        broken.open([end])
        with pytest.raises(RefitError, match=f"{broken.plan.entries[1].name} reached named changed"):
            broken.run([end], version=1, checksums=True)
        short = Refit(sources[1], "float32", "shm", str(tmp_path / "b"), DEADLINE)
        short.open([end])
        with pytest.raises(WorkerError, match="refit_send on source"):
            short.run([end], version=2, checksums=False)
    finally:
        engine.kill()
        for source in sources:
            source.kill()


@pytest.mark.slow
def test_broadcast_brings_two_engines_to_one_version(ray_here: Path, tmp_path: Path) -> None:
    old, new = make_model(tmp_path / "old", seed=1), make_model(tmp_path / "new", seed=2)
    engines = [start_engine(folder, ray_here, f"b{index}") for index, folder in enumerate((old, old))]
    source = WorkerGroup([WorkerSpec("source", MakeSource(new, FolderSource))], DEADLINE)
    try:
        for engine in engines:
            engine.built().wait(DEADLINE)
        refit = Refit(source, "float32", "broadcast", "", DEADLINE)
        ends = [EngineEnd(engine, 1) for engine in engines]
        refit.open(ends)
        refit.run(ends, version=1, checksums=True)
        refit.run(ends, version=2, checksums=False)
        first, second = (engine.start("generate", greedy(PROMPTS, 8)).wait(DEADLINE)[0] for engine in engines)
        assert np.array_equal(first.tokens, second.tokens)
        assert set(first.versions.tolist()) == {2}
    finally:
        source.kill()
        for engine in engines:
            engine.kill()
