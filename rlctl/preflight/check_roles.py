"""Facts and checks of the models besides the policy: the reference, teachers, and the loss's distillation term."""

import os
from contextlib import suppress
from pathlib import Path

from rlctl.config.errors import BrokenValueError, ModelError
from rlctl.config.role_schema import DistillationSection
from rlctl.config.run_weights import chat_folder, is_adapter, local_adapter, local_folder
from rlctl.config.schema import GrpoConfig, RunConfig
from rlctl.models.adapter_folder import read_config
from rlctl.models.facts import head_problem
from rlctl.models.model_sizes import check_config, config_file, sizes_of
from rlctl.models.vocabulary import count_tokens, vocabulary_problem
from rlctl.models.weight_headers import check_weights
from rlctl.preflight.backend import Violation, Violations, backend_of
from rlctl.preflight.declared_columns import (
    COLUMNS,
    FURTHER_ROLES,
    TEACHER_LOG_PROB,
    is_teacher,
    name_further_column,
    read_columns,
)
from rlctl.preflight.derived import NotKnownError
from rlctl.preflight.engine_rules import engine_rules
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.roles import RoleFacts, read_role_facts
from rlctl.preflight.settled import Settled, SettledGrpo, settle
from rlctl.preflight.written_roles import WrittenRole, written_roles


def settle_here(config: RunConfig) -> Settled:
    """Return the config settled without a device, with the facts of all its models that are on this machine."""
    facts = None
    # `check_model` reports a wrong config.json.
    with suppress(BrokenValueError, ModelError):
        facts = sizes_of(config.model.path)
    settled = settle(config, RunMachine(), facts)
    adapters = None
    # Without the model's facts its linear layers are not known.
    with suppress(BrokenValueError, NotKnownError):
        adapters = settled.adapters
    role_facts = {}
    with suppress(BrokenValueError):
        for name, role in written_roles(config).items():
            role_facts[name] = read_role_facts(role, config.model.path, facts, adapters)
    return settled.settle_on(settled.machine, facts, role_facts)


def check_roles(settled: Settled) -> Violations:
    """Find roles without a model, models that cannot be used, and places that a model cannot have."""
    if settled.grpo:
        yield from _check_several_teachers(settled.grpo.config)
        yield from _check_further_roles(settled.grpo.config)
    yield from _check_teachers(settled)
    with suppress(BrokenValueError):
        for role in written_roles(settled.config).values():
            yield from _check_place(settled, role)
            if role.weights is not None:
                yield from _check_model(settled, role)


def _check_several_teachers(config: GrpoConfig) -> Violations:
    """Find contradictions between `teacher`, `teachers` and `teacher_key`."""
    if config.teacher is not None and config.teachers:
        yield Violation("teachers", "there is a teacher already: give either teacher or teachers", ("teacher",))
    if config.teachers and config.teacher_key is None:
        names = ", ".join(config.teachers)
        yield Violation("teacher_key", f"not set; needed: the column in which rows name one of {names}", ("teachers",))
    if config.teacher_key is not None and not config.teachers:
        yield Violation("teacher_key", "needs teachers, one for each value of the column", ("teachers",))
    for name in config.teachers:
        if not name or "." in name:
            yield Violation(f"teachers.{name}", "a teacher's name must be without dots, and not empty")


def _check_further_roles(config: GrpoConfig) -> Violations:
    """Find entries of `roles` with a name that means another column, without a model, or without a reader."""
    for name, section in config.roles.items():
        key = f"{FURTHER_ROLES}.{name}"
        column = name_further_column(name)
        if not name.isidentifier() or column in COLUMNS:
            reason = f"{column} is another column" if column in COLUMNS else "its column needs letters, digits and _"
            yield Violation(key, f"must have another name: {reason}")
        elif section.path is None:
            yield Violation(f"{key}.path", "not set; needed: the model")
        elif column not in read_columns(config):
            yield Violation(key, f"nothing reads it: name {column!r} in the columns of a loss or an advantage of yours")


def _check_teachers(settled: Settled) -> Violations:
    """Find teachers without a model or without a reader, and a distillation term without a teacher."""
    config = settled.config
    for name, role in written_roles(config).items():
        if is_teacher(name) and role.weights is None:
            yield Violation(f"{name}.path", "not set; needed: the teacher's model, or lora, an adapter with its base")
    has_teacher = config.teacher is not None or bool(config.teachers)
    term = config.distillation
    key = f"{config.kind}.loss.distillation"
    if term is not None and not has_teacher:
        yield Violation(key, "needs a teacher: set teacher.path, or null", ("teacher",))
    if term is not None and term.over != "sampled":
        yield from _check_divergence(settled, term, f"{key}.over")
    elif term is not None and settled.sft:
        message = "must be vocabulary or top_k, not sampled: the policy did not sample the tokens of given text"
        yield Violation(f"{key}.over", message)
    if settled.sft and term is None and settled.sft.config.sft.loss.nll_coef == 0:
        yield Violation("sft.loss.nll_coef", f"must be above 0 without {key}: nothing would be learnt", (key,))
    if has_teacher and term is None and TEACHER_LOG_PROB.name not in read_columns(config):
        section = "teachers" if config.teachers else "teacher"
        yield Violation(section, f"nothing reads it: set {key}={{}}, or null", (key,))


def _check_divergence(settled: Settled, term: DistillationSection, key: str) -> Violations:
    """Find runs whose ranks cannot compute a divergence over more than the sampled token. key: of `term.over`."""
    config = settled.config
    if not backend_of(config.trainer).measures_divergences:
        backend = config.trainer.backend
        if settled.sft:
            message = f"must be null with trainer.backend={backend}, which computes no divergence from a teacher"
            yield Violation(key.removesuffix(".over"), message, ("trainer.backend",))
        else:
            message = f"must be sampled with trainer.backend={backend}, which computes no other divergence"
            yield Violation(key, message, ("trainer.backend",))
    on_engines = {name: role.place == "engines" for name, role in written_roles(config).items() if is_teacher(name)}
    if settled.grpo and term.over == "top_k" and any(on_engines.values()):
        for name in (name for name, is_there in on_engines.items() if not is_there):
            yield Violation(f"{name}.place", "must be engines over top_k, as of another teacher", (key,))
    elif config.teachers:
        message = "must be sampled with teachers, or top_k with all of them on engines"
        yield Violation(key, f"{message}: {term.over} in the ranks is for one teacher", ("teachers",))
    elif any(on_engines.values()):
        message = "must be auto, swapped or resident: a divergence needs the teacher's hidden states in the ranks"
        yield Violation("teacher.place", message, (key,))
    policy = _policy_tokenizer(settled)
    tokens = count_tokens(policy) if policy else None
    if term.over == "top_k" and tokens and term.num_top_tokens >= tokens:
        message = f"must be below {tokens}, the tokens of the tokenizer, not {term.num_top_tokens}; or over=vocabulary"
        yield Violation(f"{config.kind}.loss.distillation.num_top_tokens", message, (key,))


def _check_place(settled: Settled, role: WrittenRole) -> Violations:
    """Find a place that the role's model, or the trainer's backend, does not have."""
    trainer = settled.config.trainer
    key = f"{role.name}.place"
    facts = settled.role_facts.get(role.name, RoleFacts())
    if role.place == "engines":
        if settled.grpo:
            yield from _check_engines(settled.grpo, role, facts)
        return
    holds_residents = backend_of(trainer).holds_residents
    if role.has_value_head:
        if not holds_residents:
            message = f"must be engines with trainer.backend={trainer.backend}, which holds no further model"
            yield Violation(key, message, ("trainer.backend",))
        return
    if role.place == "resident" and not holds_residents:
        message = f"must be auto or swapped with trainer.backend={trainer.backend}, which holds no further model"
        yield Violation(key, message, ("trainer.backend",))
    if role.place == "resident" and role.weights is None and settled.config.lora is not None:
        message = "must be auto or swapped: the policy's first weights are those below its adapters"
        yield Violation(key, message, ("lora",))
    if facts.difference is None:
        return
    if role.place == "swapped":
        message = f"swapped needs the policy's architecture, and {role.path or role.lora} has {facts.difference}"
        yield Violation(key, f"{message}; set auto or resident", (f"{role.name}.path", "model.path"))
    elif not holds_residents:
        message = f"has {facts.difference}, and trainer.backend={trainer.backend} holds no other architecture"
        yield Violation(f"{role.name}.path", f"{message}; set trainer.backend=fsdp", ("trainer.backend",))


def _check_engines(settled: SettledGrpo, role: WrittenRole, facts: RoleFacts) -> Violations:
    """Find a role that engines cannot score."""
    key = f"{role.name}.place"
    engine = settled.config.generation.engine
    if not (is_teacher(role.name) or role.has_value_head or role.is_judge):
        yield Violation(key, f"must be auto, swapped or resident: engines do not score with the {role.name}")
    elif not role.is_judge and settled.machine.device is not None and facts.sizes is not None and role.path is not None:
        refusal = engine_rules(engine).find_refusal(settled.machine.device, role.path, facts.sizes)
        if refusal is not None:
            yield Violation(key, f"generation.engine={engine.name} cannot score it: {refusal}", (f"{role.name}.path",))


def _check_model(settled: Settled, role: WrittenRole) -> Violations:
    """Find a model that is no causal language model with the policy's vocabulary, or is an adapter that cannot be read.

    Models that are not on this machine are checked once the run has fetched them.
    """
    key = f"{role.name}.path" if role.path else f"{role.name}.lora"
    base = role.path or role.lora or ""
    if role.has_value_head and local_adapter(base):
        yield Violation(key, f"{base} is an adapter; needed: a whole model, such as one that it was merged into")
        return
    if role.lora and (folder := local_folder(role.lora)) and not is_adapter(folder):
        yield Violation(f"{role.name}.lora", f"{role.lora} is no PEFT folder of an adapter; give a model as path")
        return
    if role.lora and role.path and local_adapter(role.path):
        yield Violation(f"{role.name}.path", "is an adapter itself: give the adapter as lora and its base as path")
        return
    file = config_file(base)
    if file is None and os.path.isdir(base) and not is_adapter(Path(base)):
        yield Violation(key, f"{base} has no config.json; needed: a Hugging Face model folder")
    try:
        if role.weights and (adapter := local_adapter(role.weights)):
            read_config(adapter)
        if file is None:
            return
        check_config(file)
        if os.path.isdir(base):
            check_weights(file.parent)
        if role.has_value_head:
            if problem := head_problem(file.parent, "value"):
                yield Violation(key, problem)
        elif not role.is_judge and (problem := role_vocabulary_problem(settled, role)):
            yield Violation(key, problem, ("model.path",))
    except ModelError as error:
        yield Violation(key, str(error))


def _policy_tokenizer(settled: Settled) -> Path | None:
    """Return the folder of the policy's tokenizer; None if it is not on this machine."""
    model = settled.config.model
    return local_folder(model.tokenizer or chat_folder(model.path))


def role_vocabulary_problem(settled: Settled, role: WrittenRole) -> str | None:
    """Return why a role's model cannot score the policy's tokens; None if it can, or a tokenizer is not here."""
    policy = _policy_tokenizer(settled)
    file = config_file(role.path or role.lora or "")
    if policy is None or file is None:
        return None
    sizes = settled.role_facts.get(role.name, RoleFacts()).sizes
    return vocabulary_problem(policy, file.parent, sizes.vocab if sizes else None)
