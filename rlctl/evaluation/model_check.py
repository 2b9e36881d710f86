"""Proof that a model trains exactly, without a run (`rlctl model check`).

Each finding is measured: a pack equals its sequences alone, the engine equals the trainer, an engine serves the weights
that were sent, and an export answers as the engine does.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from rlctl.config.run_weights import is_adapter
from rlctl.data.load_data import load_chat
from rlctl.evaluation.closeness import Closeness, Side, compare
from rlctl.evaluation.engine_process import EngineProcess
from rlctl.evaluation.greedy_answers import GreedyAnswer, judge_greedy
from rlctl.evaluation.model_facts import Finding, describe, describe_tokens
from rlctl.evaluation.served_weights import (
    OtherValues,
    Served,
    have_same_answers,
    is_rounded,
    judge_served,
    make_faint,
    names_to_send,
    not_finite,
    refuse_too_large,
)
from rlctl.evaluation.transformers_model import own_log_probs
from rlctl.generation.engine import Engine, LoadMode
from rlctl.generation.requests import Completion, RequestId, RolloutId, TurnRequest
from rlctl.generation.spec import EngineSpec, engine_kind
from rlctl.grpo.logprob_mismatch import mismatch
from rlctl.grpo.parity_check import OwnRounding, Rounding, bound_of, judge, rounding_of
from rlctl.launch.worker_specs import engine_spec
from rlctl.models.adapter_folder import read_config
from rlctl.models.facts import find_facts
from rlctl.models.merge_adapter import write_merged
from rlctl.models.model_files import ModelFiles
from rlctl.preflight.placement import Placement
from rlctl.preflight.plan import require_served
from rlctl.preflight.settled import SettledGrpo
from rlctl.preflight.trainer_settings import TrainerSettings
from rlctl.refit.protocol import Header, Mode, TransportSpec
from rlctl.refit.refit_plan import RefitPlan
from rlctl.refit.sender import SendsWeights
from rlctl.training.interface import LossNeeds, LossOutput, TokenBatch, Totals
from rlctl.training.metric_rows import GRAD_NORM
from rlctl.training.micro_batching import TrainingSample
from rlctl.training.rank import TrainerRank, make_trainer
from rlctl.training.spec import TrainerSpec

# Tokens of the sequences that are packed: one of a single prediction, one longer than the others together.
LENGTHS = (5, 2, 72, 17)
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 24, 16
# Rounds of `LENGTHS` that are compared: the mean of a rounding takes more tokens than a difference.
_ROUNDS = {"float32": 1, "bfloat16": 4}
# Rate of the update that makes other weights.
_RATE = 1e-3
_CHUNK_BYTES = 64 << 20
_FAINTLY = "with weights so small that the epsilons of norms count"


@dataclass(frozen=True)
class PlainLoss:
    """-sum(log p) over tokens: any gradient would do."""

    needs = LossNeeds()

    def __call__(self, batch: TokenBatch) -> LossOutput:
        return LossOutput(-torch.where(batch.mask, batch.log_probs, 0).sum(), {})

    def normalizer(self, totals: Totals) -> float:
        return totals.tokens


class CheckedTrainer:
    """A trainer of one rank in this process, asked by sequences of tokens."""

    def __init__(
        self, trainer: TrainerSettings, folder: str, device: str, scratch: Path, adapter: str | None = None
    ) -> None:
        """scratch: an empty folder. adapter: PEFT's folder. Raises ValueError for a model that cannot train."""
        optimizer = replace(trainer.optimizer, lr=_RATE, weight_decay=0.1, warmup_steps=0, schedule="constant")
        self.dtype = trainer.dtype
        own = replace(trainer, num_ranks=1, optimizer=optimizer, threads=None, compile=False)
        spec = TrainerSpec(
            config=own,
            model_path=folder,
            tokenizer_path=folder,
            rank=0,
            world=1,
            init_method=f"file://{scratch}/meeting",
            device=device,
            temperature=1.0,
            total_updates=100,
            seed=0,
            profile=None,
            roles={},
            adapter_folder=adapter,
        )
        self.adapts = adapter is not None
        self.rank: TrainerRank = make_trainer(spec)
        facts = find_facts(Path(folder))
        # True for the name of a parameter or buffer that no pass rounds. Adapters are rounded apart from their base.
        self.keeps_float32 = (lambda name: True) if self.adapts else facts.keeps_float32
        # Tensors that a refit must bring to engines.
        self.needed = (
            {each.name for each in own.adapters.tensors} if own.adapters else names_to_send(Path(folder), facts)
        )
        # True for a model whose sequences have a row each.
        self.padded = trainer.is_padded
        # Tensors that training leaves alone, and the embedding.
        self._buffers = facts.buffers
        self._embedding = f"{facts.embedding}.weight"
        self.sender = SendsWeights(self.rank, 0, torch.device(device))

    def log_probs(self, sequences: Sequence[NDArray[np.int32]], *, packed: bool = True) -> list[NDArray[np.float32]]:
        """Return the log-probs of every token given those before it, 0 at the first."""
        batches = self.rank.log_probs(self._batches(sequences, packed))
        return [row for batch in batches for row in batch]

    def exact_log_probs(
        self, sequences: Sequence[NDArray[np.int32]], *, packed: bool = True
    ) -> list[NDArray[np.float32]] | None:
        """Return `log_probs` in float32 of the weights as they are rounded; None for a backend that cannot, and where
        nothing is rounded.
        """
        if self.dtype == "float32":
            return None
        batches = self.rank.exact_log_probs(self._batches(sequences, packed))
        return None if batches is None else [row for batch in batches for row in batch]

    def train(self, sequences: Sequence[NDArray[np.int32]], *, packed: bool = True) -> float:
        """Make one update; return the norm of its gradient."""
        totals = Totals(sum(len(each) - 1 for each in sequences), len(sequences), len(sequences))
        return self.rank.train(self._batches(sequences, packed), PlainLoss(), totals)[GRAD_NORM.name]

    @contextmanager
    def other_weights(self, dtype: str, scratch: Path) -> Iterator[None]:
        """Have other values, in `dtype`, of every tensor that is sent; the first ones are back after the block.

        scratch: an empty folder.
        """
        values = OtherValues(self.rank.shards())
        self.rank.save(scratch)
        self.train(random_sequences(int(self.rank.info()["vocab_size"]), LENGTHS, 3))
        values.put(dtype)
        yield
        values.undo()
        self.rank.load(scratch)

    @contextmanager
    def faint_weights(self, scratch: Path) -> Iterator[None]:
        """Have weights so small that the epsilon of every norm decides; the first ones are back after the block.

        Weights of norms stay. scratch: an empty folder.
        """
        self.rank.save(scratch)
        make_faint(self.rank.shards(), self._embedding, self._buffers)
        yield
        self.rank.load(scratch)

    def _batches(self, sequences: Sequence[NDArray[np.int32]], packed: bool) -> list[list[TrainingSample]]:
        samples = [TrainingSample(each, np.arange(len(each)) > 0) for each in sequences]
        return [samples] if packed else [[sample] for sample in samples]

    @property
    def shows_epsilons(self) -> bool:
        """True where `faint_weights` shows them: rounding to bfloat16 is larger, and adapters leave their base."""
        return self.dtype == "float32" and not self.adapts

    def close(self) -> None:
        """Leave the process group."""
        self.sender.refit_close()
        self.rank.close()


class CheckedEngine:
    """An engine in its process, and its end of a refit from a `CheckedTrainer`."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._asked = 0

    def answers(self, prompts: Sequence[NDArray[np.int32]], temperature: float) -> list[Completion]:
        """Sample an answer to each prompt, from the whole distribution, with the same seeds at each call."""
        requests = []
        for seed, prompt in enumerate(prompts):
            self._asked += 1
            name = RequestId(RolloutId("parity", "check", self._asked, 0))
            requests.append(TurnRequest(name, prompt.tolist(), ANSWER_TOKENS, temperature, seed))
        self._process.call(Engine.submit, requests)
        found: dict[RequestId, Completion] = {}
        while len(found) < len(requests):
            turns = self._process.call(Engine.collect, 60.0)
            found |= dict(zip(turns.ids, turns.columns.unpack(), strict=True))
        return [found[request.id] for request in requests]

    def checksums(self) -> dict[str, int]:
        """Return checksums of the live tensors."""
        return self._process.call(Engine.checksums)

    def open(self, trainer: CheckedTrainer, dtype: str, folder: Path, mode: Mode) -> LoadMode:
        """Connect both ends; return the way in which the engine takes weights in."""
        holding = trainer.sender.refit_holding(dtype, True)
        self._plan = RefitPlan.build(trainer.sender.refit_layout(dtype), [holding.boxes], _CHUNK_BYTES, _CHUNK_BYTES)
        spec = TransportSpec("shm", 1, 60.0, folder=str(folder))
        trainer.sender.refit_open(spec, self._plan)
        return self._process.call(Engine.refit_open, spec, self._plan, 1, mode, False)

    @property
    def sent(self) -> list[str]:
        """Tensors of a refit."""
        return [entry.name for entry in self._plan.entries]

    def refit(self, trainer: CheckedTrainer, version: int) -> None:
        """Bring the engine to the trainer's weights; every tensor's checksum is compared."""
        header = Header(version, self._plan.digest, "all", prove=trainer.adapts)
        trainer.sender.refit_send(header)
        self._process.call(Engine.refit_receive, header)


def random_sequences(vocab: int, lengths: Sequence[int], seed: int) -> list[NDArray[np.int32]]:
    """Return sequences of random tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, vocab, length).astype(np.int32) for length in lengths]


def checked_sequences(trainer: CheckedTrainer, vocab: int, longest: int) -> list[NDArray[np.int32]]:
    """Return the sequences whose log-probs are compared."""
    lengths = [min(each, longest) for each in LENGTHS]
    return [each for seed in range(_ROUNDS[trainer.dtype]) for each in random_sequences(vocab, lengths, seed)]


def packed_alone(trainer: CheckedTrainer, sequences: Sequence[NDArray[np.int32]], scratch: Path) -> Iterator[Finding]:
    """Compare a pack with each of its sequences alone: log-probs, and the norm of a gradient.

    scratch: an empty folder. The weights stay as they were.
    """
    pack, alone = (
        Side("alone", trainer.log_probs(sequences, packed=packed), trainer.exact_log_probs(sequences, packed=packed))
        for packed in (True, False)
    )
    found = compare(trainer.dtype, pack, alone)
    padded = "padded = alone", "in padded rows"
    subject, where = padded if trainer.padded else ("packed = alone", "in the pack")
    yield Finding(subject, _name_parts(found, trainer, where), found.holds, {"max_abs_diff": found.worst})
    trainer.rank.save(scratch)
    norms = []
    for packed in (True, False):
        norms.append(trainer.train(sequences, packed=packed))
        trainer.rank.load(scratch)
    if not all(norms):
        yield Finding("", "norm of the gradient 0: nothing would be trained; are the weights all zero?", False)
        return
    gap = abs(norms[0] - norms[1]) / norms[1]
    text = f"norm of the gradient {norms[0]:.6g}, alone {norms[1]:.6g}; allowed: a share of {found.gradient:.2g}"
    yield Finding("", text, gap <= found.gradient, {"grad_norm_gap": gap})


def sampled(engine: CheckedEngine, vocab: int) -> list[tuple[NDArray[np.int32], Completion]]:
    """Return prompts and the engine's answers, the same for equal weights."""
    prompts = random_sequences(vocab, [PROMPT_TOKENS - index % 8 for index in range(PROMPTS)], 1)
    return list(zip(prompts, engine.answers(prompts, 1.0)))


def _name_parts(found: Closeness, trainer: CheckedTrainer, where: str) -> str:
    """Return the text of two sides that were compared; of two that differ, with the parts to look at first."""
    return found.text if found.holds else f"{found.text}. {trainer.rank.suspects(where)}"


def agreement(
    trainer: CheckedTrainer, pairs: list[tuple[NDArray[np.int32], Completion]], bound: float, when: str, where: str
) -> Finding:
    """Compare log-probs of tokens that the engine sampled with the trainer's.

    bound: see `parity_check.bound_of`. where: the side to look at first if they differ.
    """
    sequences = [np.concatenate([prompt, answer.tokens]) for prompt, answer in pairs]
    theirs = [np.concatenate([np.zeros(len(prompt), np.float32), answer.log_probs]) for prompt, answer in pairs]
    masks = [np.arange(len(each)) >= len(prompt) for each, (prompt, _) in zip(sequences, pairs)]
    own = trainer.log_probs(sequences)
    gap = mismatch(theirs, own, masks)

    def rounding() -> Rounding | OwnRounding | None:
        if trainer.dtype != "float32":
            return rounding_of(theirs, own, trainer.exact_log_probs(sequences), masks)
        alone = trainer.log_probs(sequences, packed=False)
        return OwnRounding(mismatch(alone, own, masks).token_mult_prob_error, gap.token_mult_prob_error)

    found = judge(gap, trainer.dtype, rounding, bound)
    error = gap.token_mult_prob_error
    text = f"token_mult_prob_error {error:.6f} over {gap.tokens} tokens, {when}; allowed: {bound:.6g}"
    text += f", or rounding: {found.explanation}" if found.explanation else ""
    text += "" if found.agree else f". {trainer.rank.suspects(where)}"
    return Finding("trainer = engine", text, found.agree, {"token_mult_prob_error": error})


def as_transformers(
    trainer: CheckedTrainer, folder: str, device: str, sequences: Sequence[NDArray[np.int32]]
) -> Finding:
    """Compare the trainer with transformers' own model, a sequence at a time.

    Weights of adapters are rounded apart from their base's: no float32 pass of the two together has the same.
    """
    exact = None if trainer.adapts else trainer.exact_log_probs(sequences)
    theirs = own_log_probs(folder, device, sequences, trainer.dtype, trainer.keeps_float32)
    own = Side("trainer", trainer.log_probs(sequences), exact)
    found = compare(trainer.dtype, own, Side("for its own model", theirs.own, theirs.exact))
    text = _name_parts(found, trainer, "in the trainer")
    return Finding("transformers", text, found.holds, {"transformers_diff": found.worst})


def faintly_as_transformers(
    trainer: CheckedTrainer, device: str, sequences: Sequence[NDArray[np.int32]], scratch: Path
) -> Finding:
    """Compare both with small weights: an epsilon of a norm that differs shows. scratch: an empty folder."""
    with trainer.faint_weights(scratch / "faint-before"):
        trainer.rank.export_folder(scratch / "faint", trainer.dtype)
        found = as_transformers(trainer, str(scratch / "faint"), device, sequences)
    shutil.rmtree(scratch / "faint")
    return Finding("", f"{found.text}, {_FAINTLY}", found.holds, {"faint_diff": found.figures["transformers_diff"]})


def _whole_model(folder: Path) -> str:
    """Return the folder of a whole model: an adapter's is added to its base, in float32."""
    if not is_adapter(folder):
        return str(folder)
    merged = folder.with_name(f"{folder.name}-merged")
    write_merged(Path(read_config(folder).base), folder, merged, "float32")
    return str(merged)


def greedy(trainer: CheckedTrainer, engine: CheckedEngine, device: str, vocab: int, scratch: Path) -> Finding:
    """Compare the engine's greedy tokens with transformers' model of the trainer's export. scratch: an empty folder."""
    trainer.rank.export_folder(scratch, trainer.dtype)
    prompts = random_sequences(vocab, [PROMPT_TOKENS] * PROMPTS, 2)
    answers = [GreedyAnswer(prompt, each.tokens) for prompt, each in zip(prompts, engine.answers(prompts, 0.0))]
    return judge_greedy(answers, _whole_model(scratch), device, trainer.dtype)


def engine_findings(
    trainer: CheckedTrainer,
    spec: EngineSpec,
    vocab: int,
    scratch: Path,
    right: bool,
    bound: float,
    imports: Sequence[str] = (),
) -> Iterator[Finding]:
    """Start the engine, and compare it with the trainer: from disk, after other weights came, and after the first ones
    came back. An engine that can receive into its live weights does so, then also into shadow weights.
    Raises EngineProcessError.

    right: True if the trainer has transformers' log-probs. bound: see `agreement`. imports: see `EngineProcess`.
    """
    device, side = spec.device, "in the engine, for the trainer is as transformers" if right else "in the trainer"
    environment = engine_kind(spec.kind).environment(device, ["0"] if device != "cpu" else [], [])
    with EngineProcess(spec, environment, scratch / "engine.log", imports) as process:
        engine = CheckedEngine(process)
        first = sampled(engine, vocab)
        found = agreement(trainer, first, bound, "both from disk", side)
        yield found
        if found.holds:
            side = "in a refit, for both agreed from disk"
        before = engine.checksums()
        modes: tuple[Mode, ...] = ("auto", "staged")
        for number, mode in enumerate(modes):
            chosen = engine.open(trainer, spec.dtype, scratch / f"refit-{number}", mode)
            if is_rounded(trainer.rank.layout(spec.dtype), Path(spec.model_path)):
                # An engine keeps some tensors in float32, or computes others from them, before it rounds.
                engine.refit(trainer, 4 * number + 1)
                first, before = sampled(engine, vocab), engine.checksums()
            with trainer.other_weights(spec.dtype, scratch / f"state-{number}"):
                engine.refit(trainer, 4 * number + 2)
                when = f"after an update and a {chosen.mode} refit"
                yield replace(agreement(trainer, sampled(engine, vocab), bound, when, side), subject="")
                between = engine.checksums()
            if number == 0 and trainer.shows_epsilons:
                with trainer.faint_weights(scratch / "faint-state"):
                    engine.refit(trainer, 4 * number + 3)
                    yield replace(agreement(trainer, sampled(engine, vocab), bound, _FAINTLY, side), subject="")
            engine.refit(trainer, 4 * number + 4)
            same = have_same_answers(first, sampled(engine, vocab))
            served = Served(before, between, engine.checksums(), engine.sent, trainer.needed, same)
            yield judge_served(served, chosen)
            if chosen.mode != "direct" or trainer.adapts:
                break
        yield greedy(trainer, engine, device, vocab, scratch / "export")


@contextmanager
def checked_trainer(
    settings: TrainerSettings, folder: str, device: str, scratch: Path, adapter: str | None = None
) -> Iterator[CheckedTrainer]:
    """Run a `CheckedTrainer` until the block is left."""
    with ExitStack() as stack:
        trainer = CheckedTrainer(settings, folder, device, scratch, adapter)
        stack.callback(trainer.close)
        yield trainer


def check_model(
    settled: SettledGrpo,
    files: ModelFiles,
    placement: Placement,
    with_engine: bool,
    scratch: Path,
    imports: Sequence[str] = (),
) -> Iterator[Finding]:
    """Check a model; each finding comes as soon as it is measured.

    imports: see `EngineProcess`. Raises ModelError, DataError, EngineProcessError, and
    ValueError for a model that cannot train.
    """
    device = "cpu" if placement.device == "cpu" else "cuda:0"
    longest = min(files.max_length, settled.max_length)
    yield from describe(files.facts, files.adapters)
    yield from describe_tokens(load_chat(settled.config, files.chat), files.facts.sizes.vocab)
    if (lacking := refuse_too_large(files.facts.sizes.parameters, device)) is not None:
        yield lacking
        return
    settings, whole = replace(settled.trainer, adapters=files.adapters), files.folder
    if files.adapter:
        whole = str(scratch / "merged")
        write_merged(Path(files.folder), Path(files.adapter), Path(whole), "float32")
    with checked_trainer(settings, files.folder, device, scratch, files.adapter) as trainer:
        vocab = int(trainer.rank.info()["vocab_size"])
        sequences = checked_sequences(trainer, vocab, longest)
        if (damaged := not_finite(trainer.rank.shards())) is not None:
            text = f"{damaged} has a number that is not finite: copy or download the weights again"
            yield Finding("weights", text, False)
            return
        yield from packed_alone(trainer, sequences, scratch / "before")
        found = as_transformers(trainer, whole, device, sequences)
        yield found
        if trainer.shows_epsilons:
            yield faintly_as_transformers(trainer, device, sequences, scratch)
        if with_engine:
            require_served(settled)
            spec = engine_spec(settled, files, (), placement)
            spec = replace(spec, version=0, kv_cache_mib=settled.config.generation.kv_cache_mib)
            bound = bound_of(settled, placement.device, trainer.dtype)
            yield from engine_findings(trainer, spec, vocab, scratch, bool(found.holds), bound, imports)
