"""Proof that a model trains exactly, without a run (`rlctl model check`).

Each finding is measured. A pack of sequences has the log-probs of the sequences alone. The trainer's log-probs equal
transformers' and the engine's. An engine serves the weights that were sent. An export gives the engine's answers.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlctl.config.run_weights import is_adapter
from rlctl.data.load_data import load_chat
from rlctl.evaluation.checked_trainer import LENGTHS, CheckedTrainer, checked_trainer, random_sequences
from rlctl.evaluation.closeness import Closeness, Side, judge_sides
from rlctl.evaluation.engine_process import EngineProcess
from rlctl.evaluation.greedy_answers import GreedyAnswer, judge_greedy
from rlctl.evaluation.model_facts import Finding, describe, describe_tokens
from rlctl.evaluation.served_weights import (
    Served,
    have_same_answers,
    is_rounded,
    judge_served,
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
from rlctl.models.merge_adapter import write_merged
from rlctl.models.model_files import ModelFiles
from rlctl.preflight.placement import Placement
from rlctl.preflight.plan import require_served
from rlctl.preflight.settled import SettledGrpo
from rlctl.refit.protocol import Header, Mode, TransportSpec
from rlctl.refit.refit_plan import RefitPlan

PROMPTS = 8
PROMPT_TOKENS = 24
ANSWER_TOKENS = 16
# Sets of sequences with `LENGTHS` that are compared. In bfloat16 more, because the mean rounding needs more tokens.
_ROUNDS = {"float32": 1, "bfloat16": 4}
_CHUNK_BYTES = 64 << 20
_FAINTLY = "with weights so small that the epsilons of norms count"


class CheckedEngine:
    """An engine in its process, as the receiver of refits from a `CheckedTrainer`."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._num_requests = 0

    def answers(self, prompts: Sequence[NDArray[np.int32]], temperature: float) -> list[Completion]:
        """Sample an answer to each prompt without top-p and top-k. Each call uses the same seeds."""
        requests = []
        for seed, prompt in enumerate(prompts):
            self._num_requests += 1
            request_id = RequestId(RolloutId("parity", "check", self._num_requests, 0))
            requests.append(TurnRequest(request_id, prompt.tolist(), ANSWER_TOKENS, temperature, seed))
        self._process.call(Engine.submit, requests)
        completions: dict[RequestId, Completion] = {}
        while len(completions) < len(requests):
            turns = self._process.call(Engine.collect, 60.0)
            completions |= dict(zip(turns.ids, turns.columns.unpack(), strict=True))
        return [completions[request.id] for request in requests]

    def checksums(self) -> dict[str, int]:
        """Return the checksum of each live tensor of the engine, by the tensor's name."""
        return self._process.call(Engine.checksums)

    def open(self, trainer: CheckedTrainer, dtype: str, folder: Path, mode: Mode) -> LoadMode:
        """Connect trainer and engine for refits; return the mode in which the engine loads weights.

        dtype: dtype of the sent weights. folder: folder for the transport's files.
        """
        holding = trainer.sender.refit_holding(dtype, True)
        self._plan = RefitPlan.build(trainer.sender.refit_layout(dtype), [holding.boxes], _CHUNK_BYTES, _CHUNK_BYTES)
        spec = TransportSpec("shm", receivers=1, timeout_s=60.0, folder=str(folder))
        trainer.sender.refit_open(spec, self._plan)
        # The trainer has rank 0 and the engine rank 1. `in_flight` is False, because no request runs during a refit.
        return self._process.call(Engine.refit_open, spec, self._plan, 1, mode, False)

    @property
    def sent(self) -> list[str]:
        """Names of the tensors that a refit sends."""
        return [entry.name for entry in self._plan.entries]

    def refit(self, trainer: CheckedTrainer, version: int) -> None:
        """Send the trainer's weights to the engine, and compare the checksum of every tensor."""
        header = Header(version, self._plan.digest, "all", prove=trainer.adapts)
        trainer.sender.refit_send(header)
        self._process.call(Engine.refit_receive, header)


def checked_sequences(trainer: CheckedTrainer, vocab: int, longest: int) -> list[NDArray[np.int32]]:
    """Return the random sequences whose log-probs are compared, each of at most `longest` tokens."""
    lengths = [min(length, longest) for length in LENGTHS]
    rounds = [random_sequences(vocab, lengths, seed) for seed in range(_ROUNDS[trainer.dtype])]
    return list(chain.from_iterable(rounds))


def packed_alone(trainer: CheckedTrainer, sequences: Sequence[NDArray[np.int32]], scratch: Path) -> Iterator[Finding]:
    """Compare a pack with each of its sequences alone: first the log-probs, then the norm of a gradient.

    scratch: an empty folder. The weights are restored.
    """
    pack = Side("packed", trainer.log_probs(sequences), trainer.exact_log_probs(sequences))
    alone_rows = trainer.log_probs(sequences, packed=False)
    alone = Side("alone", alone_rows, trainer.exact_log_probs(sequences, packed=False))
    closeness = judge_sides(trainer.dtype, pack, alone)
    text = _closeness_text(closeness, trainer, "in padded rows" if trainer.padded else "in the pack")
    subject = "padded = alone" if trainer.padded else "packed = alone"
    yield Finding(subject, text, closeness.holds, {"max_abs_diff": closeness.worst})
    trainer.rank.save(scratch)
    packed_norm = trainer.train(sequences, packed=True)
    trainer.rank.load(scratch)
    alone_norm = trainer.train(sequences, packed=False)
    trainer.rank.load(scratch)
    if not (packed_norm and alone_norm):
        yield Finding("", "norm of the gradient 0: nothing would be trained; are the weights all zero?", False)
        return
    gap = abs(packed_norm - alone_norm) / alone_norm
    text = f"norm of the gradient {packed_norm:.6g}, alone {alone_norm:.6g}"
    text += f"; allowed: a share of {closeness.gradient:.2g}"
    yield Finding("", text, gap <= closeness.gradient, {"grad_norm_gap": gap})


def sample_answers(engine: CheckedEngine, vocab: int) -> list[tuple[NDArray[np.int32], Completion]]:
    """Return (prompt, the engine's answer) pairs. Equal weights give equal pairs."""
    prompts = random_sequences(vocab, [PROMPT_TOKENS - index % 8 for index in range(PROMPTS)], 1)
    return list(zip(prompts, engine.answers(prompts, 1.0)))


def _closeness_text(closeness: Closeness, trainer: CheckedTrainer, where: str) -> str:
    """Return the text of a comparison. If the sides differ, the text names the parts of the model to look at first."""
    return closeness.text if closeness.holds else f"{closeness.text}. {trainer.rank.suspects(where)}"


def agreement(
    trainer: CheckedTrainer, pairs: list[tuple[NDArray[np.int32], Completion]], bound: float, when: str, where: str
) -> Finding:
    """Compare the engine's log-probs of the tokens that it sampled with the trainer's log-probs.

    bound: from `parity_check.bound_of`. when: state of the weights in words. where: side to look at first if the
    log-probs differ, in words.
    """
    sequences = [np.concatenate([prompt, answer.tokens]) for prompt, answer in pairs]
    engine_rows = [np.concatenate([np.zeros(len(prompt), np.float32), answer.log_probs]) for prompt, answer in pairs]
    masks = [np.arange(len(prompt) + len(answer.tokens)) >= len(prompt) for prompt, answer in pairs]
    trainer_rows = trainer.log_probs(sequences)
    gap = mismatch(engine_rows, trainer_rows, masks)

    def rounding() -> Rounding | OwnRounding | None:
        if trainer.dtype != "float32":
            return rounding_of(engine_rows, trainer_rows, trainer.exact_log_probs(sequences), masks)
        alone_rows = trainer.log_probs(sequences, packed=False)
        return OwnRounding(mismatch(alone_rows, trainer_rows, masks).token_mult_prob_error, gap.token_mult_prob_error)

    verdict = judge(gap, trainer.dtype, rounding, bound)
    error = gap.token_mult_prob_error
    text = f"token_mult_prob_error {error:.6f} over {gap.tokens} tokens, {when}; allowed: {bound:.6g}"
    text += f", or rounding: {verdict.explanation}" if verdict.explanation else ""
    text += "" if verdict.agree else f". {trainer.rank.suspects(where)}"
    return Finding("trainer = engine", text, verdict.agree, {"token_mult_prob_error": error})


def as_transformers(
    trainer: CheckedTrainer, folder: str, device: str, sequences: Sequence[NDArray[np.int32]]
) -> Finding:
    """Compare the trainer's log-probs with those of transformers' own model of a folder, one sequence at a time.

    With adapters there is no exact pass in float32, because adapter and base are rounded separately.
    """
    exact = None if trainer.adapts else trainer.exact_log_probs(sequences)
    model = own_log_probs(folder, device, sequences, trainer.dtype, trainer.keeps_float32)
    trainer_side = Side("trainer", trainer.log_probs(sequences), exact)
    closeness = judge_sides(trainer.dtype, trainer_side, Side("for its own model", model.rows, model.exact))
    text = _closeness_text(closeness, trainer, "in the trainer")
    return Finding("transformers", text, closeness.holds, {"transformers_diff": closeness.worst})


def faintly_as_transformers(
    trainer: CheckedTrainer, device: str, sequences: Sequence[NDArray[np.int32]], scratch: Path
) -> Finding:
    """Compare trainer and transformers with tiny weights, which show a wrong epsilon. scratch: an empty folder."""
    with trainer.faint_weights(scratch / "faint-before"):
        trainer.rank.export_folder(scratch / "faint", trainer.dtype)
        finding = as_transformers(trainer, str(scratch / "faint"), device, sequences)
    shutil.rmtree(scratch / "faint")
    difference = finding.figures["transformers_diff"]
    return Finding("", f"{finding.text}, {_FAINTLY}", finding.holds, {"faint_diff": difference})


def _whole_model(folder: Path) -> str:
    """Return the folder of a whole model. For an adapter, write its sum with the base in float32 to a new folder."""
    if not is_adapter(folder):
        return str(folder)
    merged = folder.with_name(f"{folder.name}-merged")
    write_merged(Path(read_config(folder).base), folder, merged, "float32")
    return str(merged)


def greedy(trainer: CheckedTrainer, engine: CheckedEngine, device: str, vocab: int, scratch: Path) -> Finding:
    """Export the trainer's weights, and compare the engine's greedy tokens with transformers' model of this export.

    scratch: an empty folder.
    """
    trainer.rank.export_folder(scratch, trainer.dtype)
    prompts = random_sequences(vocab, [PROMPT_TOKENS] * PROMPTS, 2)
    completions = engine.answers(prompts, 0.0)
    answers = [GreedyAnswer(prompt, completion.tokens) for prompt, completion in zip(prompts, completions)]
    return judge_greedy(answers, _whole_model(scratch), device, trainer.dtype)


def engine_findings(
    trainer: CheckedTrainer,
    spec: EngineSpec,
    vocab: int,
    scratch: Path,
    is_right: bool,
    bound: float,
    imports: Sequence[str] = (),
) -> Iterator[Finding]:
    """Start the engine, and compare it with the trainer: with weights from disk, after a refit with changed weights,
    and after a refit with the first weights. Raises EngineProcessError.

    An engine that can receive into its live weights is tried in this mode, and then with shadow weights. is_right: True
    if the trainer has transformers' log-probs. bound: see `agreement`. imports: see `EngineProcess`.
    """
    device = spec.device
    # Side to look at first if trainer and engine differ, in words.
    side = "in the engine, for the trainer is as transformers" if is_right else "in the trainer"
    environment = engine_kind(spec.kind).environment(device, ["0"] if device != "cpu" else [], [])
    with EngineProcess(spec, environment, scratch / "engine.log", imports) as process:
        engine = CheckedEngine(process)
        first = sample_answers(engine, vocab)
        disk_finding = agreement(trainer, first, bound, "both from disk", side)
        yield disk_finding
        if disk_finding.holds:
            side = "in a refit, for both agreed from disk"
        before = engine.checksums()
        modes: tuple[Mode, ...] = ("auto", "staged")
        # Every refit needs a new version: a mode uses up to four, from 4 * number + 1 on.
        for number, mode in enumerate(modes):
            chosen = engine.open(trainer, spec.dtype, scratch / f"refit-{number}", mode)
            if is_rounded(trainer.rank.layout(spec.dtype), Path(spec.model_path)):
                # An engine that loaded the folder's unrounded weights may have computed other tensors from these, or
                # keep some in float32. So it starts again from the rounded weights.
                engine.refit(trainer, 4 * number + 1)
                first = sample_answers(engine, vocab)
                before = engine.checksums()
            with trainer.other_weights(spec.dtype, scratch / f"state-{number}"):
                engine.refit(trainer, 4 * number + 2)
                when = f"after an update and a {chosen.mode} refit"
                answers = sample_answers(engine, vocab)
                yield replace(agreement(trainer, answers, bound, when, side), subject="")
                between = engine.checksums()
            if number == 0 and trainer.shows_epsilons:
                with trainer.faint_weights(scratch / "faint-state"):
                    engine.refit(trainer, 4 * number + 3)
                    answers = sample_answers(engine, vocab)
                    yield replace(agreement(trainer, answers, bound, _FAINTLY, side), subject="")
            engine.refit(trainer, 4 * number + 4)
            has_same_answers = have_same_answers(first, sample_answers(engine, vocab))
            served = Served(
                before=before,
                between=between,
                after=engine.checksums(),
                sent=engine.sent,
                required=trainer.refit_names,
                has_same_answers=has_same_answers,
                adapts=trainer.adapts,
            )
            yield judge_served(served, chosen)
            if chosen.mode != "direct" or trainer.adapts:
                # "auto" already used shadow weights, or the engine received adapters.
                break
        yield greedy(trainer, engine, device, vocab, scratch / "export")


def check_model(
    settled: SettledGrpo,
    files: ModelFiles,
    placement: Placement,
    with_engine: bool,
    scratch: Path,
    imports: Sequence[str] = (),
) -> Iterator[Finding]:
    """Check a model, and yield each finding as soon as it is measured.

    scratch: an empty folder. imports: see `EngineProcess`. Raises ModelError, DataError, EngineProcessError, and
    ValueError for a model that cannot train.
    """
    device = "cpu" if placement.device == "cpu" else "cuda:0"
    longest = min(files.max_length, settled.max_length)
    yield from describe(files.facts, files.adapters)
    yield from describe_tokens(load_chat(settled.config, files.chat), files.facts.sizes.vocab)
    if (lacking := refuse_too_large(files.facts.sizes.parameters, device)) is not None:
        yield lacking
        return
    settings = replace(settled.trainer, adapters=files.adapters)
    merged = files.folder
    if files.adapter:
        merged = str(scratch / "merged")
        write_merged(Path(files.folder), Path(files.adapter), Path(merged), "float32")
    with checked_trainer(settings, files.folder, device, scratch, files.adapter) as trainer:
        vocab = int(trainer.rank.info()["vocab_size"])
        sequences = checked_sequences(trainer, vocab, longest)
        if (damaged := not_finite(trainer.rank.shards())) is not None:
            text = f"{damaged} has a number that is not finite: copy or download the weights again"
            yield Finding("weights", text, False)
            return
        yield from packed_alone(trainer, sequences, scratch / "before")
        finding = as_transformers(trainer, merged, device, sequences)
        yield finding
        if trainer.shows_epsilons:
            yield faintly_as_transformers(trainer, device, sequences, scratch)
        if with_engine:
            require_served(settled)
            spec = engine_spec(settled, files, (), placement)
            spec = replace(spec, version=0, kv_cache_mib=settled.config.generation.kv_cache_mib)
            bound = bound_of(settled, placement.device, trainer.dtype)
            yield from engine_findings(trainer, spec, vocab, scratch, bool(finding.holds), bound, imports)
