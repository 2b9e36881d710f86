"""In every model family weight decay applies to the matrices that transformers decays, and to no norm or bias."""

import torch

from rlctl.training.update import decayed_names
from tests.zoo import FAMILIES, family_config

# Vectors that are neither norm weights nor biases. transformers decays these parameters, rlctl does not.
VECTORS = ("A_log", "D", "sinks", "alpha_p", "alpha_n", "scale", "per_expert_scale")


def test_the_matrices_of_every_family_decay_as_transformers_groups_them() -> None:
    from transformers import AutoModelForCausalLM, Trainer

    configs = {name: family_config(name) for name in FAMILIES}
    # In this family the norms of queries and keys have matrices as weights.
    configs["cohere with norms"] = family_config("cohere", use_qk_norm=True)
    for family, config in configs.items():
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(config)
        parameters = dict(lm.named_parameters())
        grouped = set(Trainer.get_decay_parameter_names(None, lm)) & parameters.keys()
        decayed = decayed_names(lm) & parameters.keys()
        assert decayed == {name for name in grouped if parameters[name].ndim > 1}, family
        for name in parameters.keys() - decayed:
            leaf = name.rpartition(".")[2]
            assert leaf.endswith("bias") or leaf in VECTORS or "norm" in name or ".ln_" in name, (family, name)
        assert not [name for name in decayed if "bias" in name or "norm" in name], family
