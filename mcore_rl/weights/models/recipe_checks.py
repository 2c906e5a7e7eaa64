"""Checks that a model can be trained as a recipe says; errors name the options.

    parallel.tp  divides num_attention_heads         parallel.ep   divides the number of experts
    parallel.pp  divides num_hidden_layers           parallel.etp  divides an expert's width

Pipeline stages that are given one by one must have all of the model's layers. Options of routing
need a model with experts.
"""

from itertools import accumulate

from mcore_rl.config import ParallelConfig, TrainConfig
from mcore_rl.weights.hf.config import find_mtp_problem, moe_layers
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.table import HfConfig


def check_routing(train: TrainConfig, config: HfConfig) -> None:
    """Raises ValueError naming the first option of `train` that the model has no use for."""
    architecture = config["architectures"][0]
    unused = {
        "router_replay": "none",
        "router_aux_loss_coef": 0.0,
        "router_sequence_aux_loss_coef": 0.0,
        "router_bias_rate": 0.0,
        "freeze_router": False,
    }
    for name, off in unused.items():
        if getattr(train, name) != off and not any(moe_layers(config)):
            raise ValueError(
                f"train.{name}={getattr(train, name)}, but {architecture} has no experts:"
                f" set train.{name}={str(off).lower()}"
            )
    for name, value, off in (
        ("indexer_replay", train.indexer_replay, "none"),
        ("indexer_loss", train.indexer_loss, 0.0),
    ):
        if value != off and "index_topk" not in family_of(config).sizes(config):
            raise ValueError(
                f"train.{name}={value}, but {architecture} has no indexers: set train.{name}={off}"
            )
    _check_mtp(train, config)
    has_bias = family_of(config).options(config).get("moe_router_enable_expert_bias")
    if train.router_bias_rate and not has_bias:
        raise ValueError(
            f"train.router_bias_rate={train.router_bias_rate}, but routers of {architecture} have"
            " no bias that engines would know of: set train.router_bias_rate=0;"
            " train.router_sequence_aux_loss_coef balances, too"
        )


def _check_mtp(train: TrainConfig, config: HfConfig) -> None:
    """Raise ValueError if layers for multi-token prediction are to learn and cannot."""
    if not train.mtp_loss:
        return
    if problem := find_mtp_problem(config):
        raise ValueError(
            f"train.mtp_loss={train.mtp_loss}, but {config['architectures'][0]} {problem}: set"
            " train.mtp_loss=0.0"
        )
    if train.share_prefixes:
        raise ValueError(
            f"train.mtp_loss={train.mtp_loss} with train.share_prefixes=true: a token that"
            " sequences share has one hidden state, and another token ahead in each; set"
            " train.share_prefixes=false or train.mtp_loss=0.0"
        )


def check_layout(config: HfConfig, parallel: ParallelConfig, name: str = "parallel") -> None:
    """Raise ValueError naming the first size of the model that `parallel` does not divide.

    `name` is the group of options that `parallel` comes from, for the error.
    """
    sizes = family_of(config).sizes(config)
    _check_stages(parallel, name, sizes["layers"])
    sized = [
        (f"{name}.tp", parallel.tp, "num_attention_heads", config["num_attention_heads"]),
        (f"{name}.ep", parallel.ep, "the number of experts", sizes["experts"]),
        (f"{name}.etp", parallel.etp, "an expert's intermediate size", sizes["expert_ffn"]),
    ]
    _check_shared_indexers(config, parallel, name)
    if "mamba_heads" in sizes:
        option = f"{name}.tp * {name}.cp"
        heads, groups = sizes["mamba_heads"], sizes["mamba_groups"]
        sized.append((option, parallel.tp * parallel.cp, "mamba_num_heads", heads))
        sized.append((f"{name}.tp", parallel.tp, "n_groups", groups))
    if "delta_key_heads" in sizes:  # context parallelism deals their heads out
        option = f"{name}.tp * {name}.cp"
        heads = sizes["delta_key_heads"]
        sized.append((option, parallel.tp * parallel.cp, "linear_num_key_heads", heads))
    biased = any(
        rule.has_expert_axis and rule.key.endswith(".bias") for rule in family_of(config).rules
    )
    if biased and parallel.etp > 1:
        raise ValueError(
            f"{name}.etp={parallel.etp}, but the experts have biases, which Megatron does not cut: "
            f"set {name}.etp=1 and raise {name}.ep"
        )
    if parallel.ep > 1 and not sizes["experts"]:
        raise ValueError(f"{name}.ep={parallel.ep}, but the model has no experts: set {name}.ep=1")
    for option, divisor, key, size in sized:
        if size % divisor:
            raise ValueError(f"{option}={divisor} does not divide {key}={size} of config.json")
    groups = sizes.get("kv_heads", parallel.tp)
    if groups % parallel.tp and parallel.tp % groups:
        raise ValueError(
            f"{name}.tp={parallel.tp} neither divides num_key_value_heads={groups} of config.json"
            " nor is a multiple of it"
        )


def _check_stages(parallel: ParallelConfig, name: str, num_layers: int) -> None:
    """Raise ValueError if the pipeline stages have other layers together than the model."""
    if parallel.stage_layers:
        if sum(parallel.stage_layers) != num_layers:
            raise ValueError(
                f"{name}.stage_layers={parallel.stage_layers} are {sum(parallel.stage_layers)}"
                f" layers together, but num_hidden_layers={num_layers} in config.json"
            )
        return
    stages = parallel.pp * (parallel.vpp or 1)
    each, more = divmod(num_layers, stages)
    if more:
        listed = ",".join(map(str, [each + 1] * more + [each] * (stages - more)))
        remedy = f"set {name}.stage_layers=[{listed}]" if each else f"lower {name}.pp"
        raise ValueError(
            f"{name}.pp * {name}.vpp={stages} does not divide num_hidden_layers={num_layers} of"
            f" config.json; {remedy}"
        )


def _check_shared_indexers(config: HfConfig, parallel: ParallelConfig, name: str) -> None:
    """Raise ValueError if a stage begins with a layer that takes the choice of one before it."""
    family = family_of(config)
    num_layers = family.sizes(config)["layers"]
    stages = parallel.pp * (parallel.vpp or 1)
    lens = parallel.stage_layers or [num_layers // stages] * stages
    if "index_topk" not in family.sizes(config):
        return
    for first in accumulate(lens[:-1]):
        if "indexed" not in family.list_kinds(config, first):
            option = f"{name}.stage_layers={lens}"
            raise ValueError(
                f"{option}: a pipeline stage, or a chunk of one, would begin with layer {first},"
                " which reads the keys that a layer before it chose; set"
                f" {name}.stage_layers so that each begins with a layer that has an indexer"
            )


def check_sharing(config: HfConfig, parallel: ParallelConfig, name: str = "parallel") -> None:
    """Raise ValueError where sequences cannot take over the keys and values of others.

    `name` is the option that `parallel` comes from.
    """
    if parallel.cp > 1:
        raise ValueError(
            f"train.share_prefixes=true with {name}.cp={parallel.cp}: context parallelism cuts each"
            f" sequence; set train.share_prefixes=false or {name}.cp=1"
        )
    options = family_of(config).options(config)
    kinds = {
        "multi_latent_attention": "latent attention",
        "mrope_section": "images",
        "experimental_attention_variant": "linear attention",
        "is_hybrid_model": "Mamba-2 layers",
    }
    for option, kind in kinds.items():
        if options.get(option):
            raise ValueError(
                f"train.share_prefixes=true with {config['model_type']}: a model with {kind} does"
                " not share the beginnings of sequences; set train.share_prefixes=false"
            )
