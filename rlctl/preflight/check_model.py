"""Checks of a config's model: its files, its sequence lengths, its chat template."""

import os
import socket
from pathlib import Path

from rlctl.config.errors import ModelError
from rlctl.config.run_weights import is_adapter, is_checkpoint, is_run
from rlctl.config.schema import RunConfig
from rlctl.data.templates import templates_of, unknown_arguments
from rlctl.models.facts import ModelSizes, has_weights, head_problem
from rlctl.models.layer_kinds import has_kernels
from rlctl.models.model_sizes import check_config, config_file
from rlctl.models.weight_headers import check_weights
from rlctl.preflight.backend import Violation, Violations
from rlctl.preflight.machine import Device
from rlctl.preflight.settled import Settled, SettledSft
from rlctl.telemetry.jsonl import Record, read_records
from rlctl.utils.process import driver_lives

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def check_model(config: RunConfig) -> Violations:
    """Find model and tokenizer files that are missing or cannot be used."""
    model = config.model
    path = model.path
    file = config_file(path)
    if file is None and is_adapter(Path(path)):
        # The adapter's base is on the hub, and the run fetches it. `check_adapters` reports other problems.
        return
    if file is None:
        if os.path.isdir(path):
            yield Violation("model.path", f"{path} has no config.json; needed: a Hugging Face model folder")
        elif os.path.exists(path):
            yield Violation("model.path", f"{path} is a file; needed: a Hugging Face model folder")
        return
    try:
        check_config(file)
        problem = head_problem(file.parent, "causal")
    except ModelError as error:
        yield Violation("model.path", str(error))
        return
    if problem:
        yield Violation("model.path", problem)
        return
    # The hub's cache may have only some files of a model. The run fetches and checks the others.
    if not model.random_init and os.path.isdir(path):
        try:
            check_weights(file.parent)
        except ModelError as error:
            if has_weights(file.parent):
                yield Violation("model.path", str(error))
            else:
                message = f"{error}; model.random_init=true starts from random weights"
                yield Violation("model.path", message, ("model.random_init",))
    tokenizer = Path(model.tokenizer or file.parent)
    if os.path.isfile(tokenizer):
        yield Violation("model.tokenizer", f"{tokenizer} is a file; needed: a folder that has a tokenizer.json")
    elif os.path.isdir(tokenizer) and not any((tokenizer / name).is_file() for name in _TOKENIZER_FILES):
        key = "model.path" if model.tokenizer is None else "model.tokenizer"
        yield Violation(key, f"{tokenizer} has no tokenizer.json; set model.tokenizer to a folder that has one")


def live_run_note(model: str) -> str | None:
    """Return a note if the model is a checkpoint of a live run, because that run deletes it later; else None.

    A driver on this machine keeps such a checkpoint while another run uses it, see `hold`. A run with a killed driver
    or unreadable files does not count.
    """
    checkpoint = Path(model).parent
    run = checkpoint.parent.parent
    if Path(model).name != "hf" or not is_checkpoint(checkpoint) or not is_run(run):
        return None
    started: Record = {}
    for event in read_records(run / "events.jsonl"):
        if event.get("kind") == "run_started":
            started = event
        elif event.get("kind") == "run_ended":
            started = {}
    if not started or not driver_lives(started):
        return None
    name = checkpoint.name
    later = "once it has newer ones (its checkpoint.keep_last)"
    beginning = f"model.path={model}: that run still trains"
    if started.get("host") in (None, socket.gethostname()):
        remedy = "a later resume with a reference policy or adapters needs it: copy the folder first"
        return f"{beginning}: it keeps {name} while this run lasts, then deletes it {later}; {remedy}"
    return f"{beginning} on {started['host']}, and deletes {name} {later}: wait for its end, or copy the folder first"


def model_notes(sizes: ModelSizes, device: Device) -> list[str]:
    """Return notes on slow features of a model, and on dropout, which training ignores."""
    notes = []
    if sizes.one_sequence_a_row:
        cost = "rows are padded by up to their own length (train/padding) and have no kernels for packs"
        pair_bytes = max((row_bytes.pair for row_bytes in sizes.row_bytes), default=0)
        if pair_bytes:
            cost += f", and attention keeps scores: {pair_bytes:,} bytes for each pair of a row's tokens"
        notes.append(f"the model trains one sequence a row, not packs: {sizes.one_sequence_a_row}; {cost}")
    if sizes.dropout:
        notes.append(f"dropout is off in training, since engines have none: {', '.join(sizes.dropout)} of config.json")
    if sizes.state_layers and device == "cuda" and not has_kernels():
        message = f"{sizes.state_layers} layers carry a state, and flash-linear-attention (fla-core) is not installed"
        notes.append(f"{message}: torch computes them many times slower; pip install 'rlctl[linear-attention]'")
    return notes


def check_lengths(settled: Settled) -> Violations:
    """Find token limits of prompts and answers above the longest sequence."""
    config = settled.config
    max_length = config.model.max_length
    max_positions = settled.facts.max_positions if settled.facts else None
    if max_length is not None and max_positions is not None and max_length > max_positions:
        message = f"must be at most {max_positions}, the model's max_position_embeddings, not {max_length}"
        yield Violation("model.max_length", message)
    longest = min((limit for limit in (max_length, max_positions) if limit is not None), default=None)
    if longest is None:
        return
    requirement = f"must be below the longest sequence, {longest}"
    prompt_tokens = config.data.max_prompt_length
    if settled.grpo is None:
        if prompt_tokens is not None and prompt_tokens >= longest:
            yield Violation("data.max_prompt_length", f"{requirement}, not {prompt_tokens}", ("model.max_length",))
        return
    answer_tokens = settled.grpo.config.generation.max_new_tokens
    if answer_tokens >= longest:
        yield Violation("generation.max_new_tokens", f"{requirement}, not {answer_tokens}", ("model.max_length",))
    elif prompt_tokens is not None and prompt_tokens + answer_tokens > longest:
        arithmetic = f"{prompt_tokens} + generation.max_new_tokens {answer_tokens} = {prompt_tokens + answer_tokens}"
        message = f"{arithmetic} is above the longest sequence, {longest}; try {longest - answer_tokens}"
        yield Violation("data.max_prompt_length", message, ("generation.max_new_tokens", "model.max_length"))


def check_micro_batch(settled: Settled) -> Violations:
    """Find a `micro_batch_tokens` below the longest sequence, or below all rows of a rollout if the loss needs them
    together.
    """
    tokens = settled.config.trainer.micro_batch_tokens
    longest = settled.longest_sequence
    grpo = settled.grpo
    if longest is None or tokens == "auto":
        return
    if tokens < longest:
        length_keys = ["model.max_length"]
        if grpo is not None:
            length_keys.append("data.max_prompt_length")
        advice = f"raise it, or lower {' or '.join(length_keys)}"
        message = f"must hold the longest sequence, {longest} tokens, not {tokens}; {advice}"
        yield Violation("trainer.micro_batch_tokens", message, (*length_keys, "generation.max_new_tokens"))
        return
    rollout_tokens = settled.longest_rollout
    if grpo and rollout_tokens is not None and tokens < rollout_tokens:
        turns = grpo.config.environment.max_turns
        message = f"must hold whole rollouts, which grpo.loss needs: with environment.history=strip {turns} turns may "
        message += f"be {turns} rows of up to {longest} tokens, {rollout_tokens} together, not {tokens}; raise it, or "
        message += f"set environment.max_turns={tokens // longest} or environment.history=keep"
        other_keys = ("environment.history", "environment.max_turns", "grpo.loss.name")
        yield Violation("trainer.micro_batch_tokens", message, other_keys)


def check_graph(settled: SettledSft) -> Violations:
    """Find a warm-up of compiled graphs with more tokens than the longest sequence."""
    warmup_tokens = settled.config.ray_compiled_graph.warmup_seq_len
    longest = settled.longest_sequence
    if warmup_tokens and longest is not None and warmup_tokens > longest:
        message = f"must be at most the longest sequence, {longest}, not {warmup_tokens}"
        yield Violation("ray_compiled_graph.warmup_seq_len", message, ("model.max_length",))


def check_chat(config: RunConfig) -> Violations:
    """Find a system prompt or template arguments without a chat template, and arguments that the template does not
    read.
    """
    data = config.data
    if data.chat_template == "none":
        message = "needs a chat template, but data.chat_template is none"
        for key in ("system_prompt", "chat_template_kwargs"):
            if getattr(data, key) not in (None, {}):
                yield Violation(f"data.{key}", message, ("data.chat_template",))
    elif data.chat_template_kwargs and (templates := templates_of(config)):
        for name, reason in unknown_arguments(data.chat_template_kwargs, templates).items():
            yield Violation(f"data.chat_template_kwargs.{name}", reason, ("data.chat_template",))
