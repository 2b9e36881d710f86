"""Weight decay reaches the matrices of transformers' own grouping in every family, and no norm and no bias."""

import torch

from rlctl.training.update import decayed_names
from tests.zoo import FAMILIES, family_config

# Parameters without decay that are neither a norm's nor a bias: vectors, which transformers' grouping decays.
VECTORS = ("A_log", "D", "sinks", "alpha_p", "alpha_n", "scale", "per_expert_scale")


def test_the_matrices_of_every_family_decay_as_transformers_groups_them() -> None:
    from transformers import AutoModelForCausalLM, Trainer

    configs = {name: family_config(name) for name in FAMILIES}
    # Queries and keys have matrices of norms.
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
