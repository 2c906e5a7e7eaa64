"""Model families by the architecture that `config.json` names."""

from mcore_rl.slices.families.qwen3_moe import FAMILY as QWEN3_MOE
from mcore_rl.slices.families.table import Family, HfConfig, Shape

FAMILIES = {family.architecture: family for family in (QWEN3_MOE,)}


def family_of(hf_config: HfConfig) -> Family:
    """The table for a model; ValueError names the architecture if there is none."""
    for architecture in hf_config.get("architectures") or ():
        if architecture in FAMILIES:
            return FAMILIES[architecture]
    raise ValueError(
        f"architectures = {hf_config.get('architectures')} in config.json is not supported; "
        f"supported: {', '.join(sorted(FAMILIES))}"
    )


def hf_tensor_shapes(hf_config: HfConfig) -> dict[str, Shape]:
    """HF name -> shape of every tensor of the model, from `config.json` alone."""
    return family_of(hf_config).shapes(hf_config)
