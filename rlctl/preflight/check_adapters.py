"""Checks of `lora`: its backend, dropout and targets; notes on its learning rate."""

from collections.abc import Iterator

from rlctl.config.errors import ModelError
from rlctl.config.run_weights import local_adapter
from rlctl.models.adapter_folder import read_config, read_spec
from rlctl.models.adapters import choose_targets
from rlctl.preflight.backend import Violation, Violations, backend_of
from rlctl.preflight.engine_rules import engine_rules
from rlctl.preflight.settled import Settled

# Adapters want 10 times the rate of full fine-tuning at any rank (tinker-cookbook, hyperparam_utils.py; TRL, LoRA
# Without Regret). 1e-6 and 1e-5 are usual without them.
LEAST_RATE, MOST_RATE_WITHOUT = 5e-6, 1e-4
# Parameters below which a model learns at a hundred times those rates.
_SMALL = 10_000_000


def check_adapters(settled: Settled) -> Violations:
    """Find a backend or an engine without adapters, dropout or unchecked refits in a run that samples, and names that
    are no targets.
    """
    config, own = settled.config, settled.config.lora
    yield from _check_start(settled)
    if own is None:
        return
    if not backend_of(config.trainer).trains_adapters:
        what = f"needs trainer.backend=fsdp: {config.trainer.backend} trains every weight; set lora=null"
        yield Violation("lora", what, ("trainer.backend",))
    if settled.grpo and own.dropout:
        what = "must be 0 in GRPO, whose engines sample without dropout: log-probs would be of another policy"
        yield Violation("lora.dropout", what)
    if settled.grpo and not engine_rules(settled.grpo.config.generation.engine).serves_adapters:
        what = f"needs generation.engine=vllm: {settled.grpo.config.generation.engine.name} serves no adapters"
        yield Violation("lora", what, ("generation.engine",))
    if settled.grpo and settled.grpo.config.refit.checksum in ("sampled", "off"):
        yield Violation("refit.checksum", "must be all or auto with lora: engines prove every live A and B")
    if settled.facts:
        for what in choose_targets(settled.facts.linears, own.targets)[1]:
            yield Violation("lora.targets", what, ("model.path",))


def _check_start(settled: Settled) -> Violations:
    """Find an adapter to start from that is no plain LoRA, or another one than `lora` trains."""
    model, own, folder = settled.config.model, settled.config.lora, local_adapter(settled.config.model.path)
    if folder is None:
        return
    try:
        given = read_config(folder)
        spec = read_spec(folder, settled.facts.linears) if settled.facts else None
    except ModelError as error:
        yield Violation("model.path", str(error))
        return
    if model.random_init:
        yield Violation(
            "model.random_init", "must be false: model.path is an adapter of given weights", ("model.path",)
        )
    if own is None:
        return
    theirs = {"rank": given.rank, "alpha": given.alpha, "rslora": given.rslora}
    for key, value in theirs.items():
        if getattr(own, key) != value:
            shown = str(value).lower() if isinstance(value, bool) else f"{value:g}"
            what = f"the adapter of model.path has {shown}: set lora.{key}={shown}, or start from its base {given.base}"
            yield Violation(f"lora.{key}", what, ("model.path",))
    chosen, wrong = choose_targets(settled.facts.linears, own.targets) if settled.facts else ((), [])
    if spec and not wrong and chosen != spec.targets:
        names = ", ".join(dict.fromkeys(each.name.rpartition(".")[2] for each in spec.targets))
        what = f"the adapter of model.path has others, {len(spec.targets)} layers by the names {names}"
        yield Violation("lora.targets", what, ("model.path",))


def adapter_notes(settled: Settled) -> Iterator[str]:
    """Yield notes on an adapter that is merged, and on a learning rate far from those in use."""
    if settled.config.lora is None and local_adapter(settled.config.model.path):
        yield "model.path is an adapter: without lora every weight of it merged with its base is trained"
    rate, adapters = settled.config.trainer.optimizer.lr, settled.config.lora is not None
    if settled.facts and settled.facts.parameters < _SMALL:
        return
    said = f"trainer.optimizer.lr={rate:g}"
    if adapters and rate < LEAST_RATE:
        yield f"{said}: low for lora, which takes about 10 times the rate of full fine-tuning; 1e-5 to 1e-4 are usual"
    if not adapters and rate > MOST_RATE_WITHOUT:
        yield f"{said}: high without lora; 1e-6 to 1e-5 are usual where every weight is trained"
