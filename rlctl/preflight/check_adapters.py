"""Checks of `lora`: its backend, dropout and targets; notes on its learning rate."""

from collections.abc import Iterator

from rlctl.models.adapters import choose_targets
from rlctl.preflight.backend import Violation, Violations, backend_of
from rlctl.preflight.engine import engine_rules
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


def rate_notes(settled: Settled) -> Iterator[str]:
    """Yield a note on a learning rate that is far from those in use, with adapters and without."""
    rate, adapters = settled.config.trainer.optimizer.lr, settled.config.lora is not None
    if settled.facts and settled.facts.parameters < _SMALL:
        return
    said = f"trainer.optimizer.lr={rate:g}"
    if adapters and rate < LEAST_RATE:
        yield f"{said}: low for lora, which takes about 10 times the rate of full fine-tuning; 1e-5 to 1e-4 are usual"
    if not adapters and rate > MOST_RATE_WITHOUT:
        yield f"{said}: high without lora; 1e-6 to 1e-5 are usual where every weight is trained"
