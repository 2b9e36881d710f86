"""Checks of `lora`: its backend, dropout and targets; notes on its learning rate."""

from collections.abc import Iterator

from rlctl.config.errors import ModelError
from rlctl.config.run_weights import local_adapter
from rlctl.models.adapter_folder import read_config, read_spec
from rlctl.models.adapters import choose_targets
from rlctl.preflight.backend import Violation, Violations, backend_of
from rlctl.preflight.engine_rules import engine_rules
from rlctl.preflight.settled import Settled

# Adapters of any rank learn best at 10 times the learning rate of full fine-tuning (tinker-cookbook,
# hyperparam_utils.py; TRL, LoRA Without Regret). 1e-6 and 1e-5 are usual for full fine-tuning. A note tells of an
# adapter below the first rate, or full fine-tuning above the second.
LEAST_RATE = 5e-6
MOST_RATE_WITHOUT = 1e-4
# Models with fewer parameters get no note: they learn at a hundred times those rates.
_SMALL = 10_000_000


def check_adapters(settled: Settled) -> Violations:
    """Find conflicts between `lora` and other keys.

    They are: a backend or an engine without adapters, names that are no targets, and, in GRPO, dropout or refits
    without a full checksum.
    """
    config = settled.config
    adapter_section = config.lora
    yield from _check_start(settled)
    if adapter_section is None:
        return
    if not backend_of(config.trainer).trains_adapters:
        message = f"needs trainer.backend=fsdp: {config.trainer.backend} trains every weight; set lora=null"
        yield Violation("lora", message, ("trainer.backend",))
    if settled.grpo and adapter_section.dropout:
        message = "must be 0 in GRPO, whose engines sample without dropout: log-probs would be of another policy"
        yield Violation("lora.dropout", message)
    if settled.grpo and not engine_rules(settled.grpo.config.generation.engine).serves_adapters:
        message = f"needs generation.engine=vllm: {settled.grpo.config.generation.engine.name} serves no adapters"
        yield Violation("lora", message, ("generation.engine",))
    if settled.grpo and settled.grpo.config.refit.checksum in ("sampled", "off"):
        yield Violation("refit.checksum", "must be all or auto with lora: engines prove every live A and B")
    if settled.facts:
        _, problems = choose_targets(settled.facts.linears, adapter_section.targets)
        for problem in problems:
            yield Violation("lora.targets", problem, ("model.path",))


def _check_start(settled: Settled) -> Violations:
    """Find problems of an adapter in `model.path`: it is no plain LoRA, or differs from the adapter that `lora`
    describes.
    """
    model = settled.config.model
    adapter_section = settled.config.lora
    folder = local_adapter(model.path)
    linears = settled.facts.linears if settled.facts else None
    if folder is None:
        return
    try:
        saved = read_config(folder)
        saved_spec = read_spec(folder, linears) if linears is not None else None
    except ModelError as error:
        yield Violation("model.path", str(error))
        return
    if model.random_init:
        message = "must be false: model.path is an adapter of given weights"
        yield Violation("model.random_init", message, ("model.path",))
    if adapter_section is None:
        return
    saved_settings = {"rank": saved.rank, "alpha": saved.alpha, "rslora": saved.rslora}
    for key, setting in saved_settings.items():
        if getattr(adapter_section, key) != setting:
            text = str(setting).lower() if isinstance(setting, bool) else f"{setting:g}"
            message = (
                f"the adapter of model.path has {text}: set lora.{key}={text}, or start from its base {saved.base}"
            )
            yield Violation(f"lora.{key}", message, ("model.path",))
    if saved_spec is None or linears is None:
        return
    targets, problems = choose_targets(linears, adapter_section.targets)
    if not problems and targets != saved_spec.targets:
        names = ", ".join(dict.fromkeys(target.name.rpartition(".")[2] for target in saved_spec.targets))
        message = f"the adapter of model.path has others, {len(saved_spec.targets)} layers by the names {names}"
        yield Violation("lora.targets", message, ("model.path",))


def adapter_notes(settled: Settled) -> Iterator[str]:
    """Yield notes on an adapter that is merged into its base, and on an unusual learning rate."""
    if settled.config.lora is None and local_adapter(settled.config.model.path):
        yield "model.path is an adapter: without lora every weight of it merged with its base is trained"
    if settled.facts and settled.facts.parameters < _SMALL:
        return
    rate = settled.config.trainer.optimizer.lr
    has_adapters = settled.config.lora is not None
    key = f"trainer.optimizer.lr={rate:g}"
    if has_adapters and rate < LEAST_RATE:
        yield f"{key}: low for lora, which takes about 10 times the rate of full fine-tuning; 1e-5 to 1e-4 are usual"
    if not has_adapters and rate > MOST_RATE_WITHOUT:
        yield f"{key}: high without lora; 1e-6 to 1e-5 are usual where every weight is trained"
