"""Counts what low-rank factors (train.lora, critic.lora) take of a rank's and its host's memory.

GPU    W = W0 + s B A, factors, gradients and optimizer of factors, one layer's gradient of W
host   W0 of the adapted matrices, pinned

Engines that merge factors themselves have factors on their GPUs, and W0 there or in host memory;
those that serve adapters have SGLang's buffers for them on their GPUs.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.config import CriticLoraConfig, LoraConfig, ParallelConfig
from mcore_rl.planning.deployment import make_deployment
from mcore_rl.planning.recipe_models import PlannedRun, shares_frozen
from mcore_rl.weights.box import Box, itemsize
from mcore_rl.weights.hf.low_precision import Precision, is_rounded
from mcore_rl.weights.hf.packing import Packing, count_packed_bytes
from mcore_rl.weights.layouts.layout import Layout, list_boxes
from mcore_rl.weights.layouts.megatron import MegatronLayout, MegatronSizes
from mcore_rl.weights.lora.facts import is_of_expert, sends_factors, serves_adapter
from mcore_rl.weights.lora.served import list_served_modules, module_of_name
from mcore_rl.weights.lora.targets import is_adapted, list_linears, list_matrices
from mcore_rl.weights.models import family_of, hf_tensor_shapes
from mcore_rl.weights.models.table import HfConfig, HfTensor, Rule
from mcore_rl.weights.models.value_head import add_value_head, has_value_head

GIB = 2**30


@dataclass(frozen=True)
class AdapterSize:
    """Numbers of one rank.

    dense, expert   of factors; those of experts have another optimizer share
    frozen          of the weights whose W0 lies in host memory
    layer           of the largest gradient of weights that autograd hands over at once
    head            of a critic's value head, which is trained as a whole
    """

    dense: int
    expert: int
    frozen: int
    layer: int
    head: int = 0

    @property
    def num_trained(self) -> int:
        """Return how many have gradients and moments."""
        return self.dense + self.expert + self.head


def count_adapter(
    hf_config: HfConfig,
    layout: MegatronLayout,
    sizes: MegatronSizes,
    stage: int,
    lora: LoraConfig | CriticLoraConfig,
) -> AdapterSize:
    """Return what a rank of a pipeline stage holds because of the recipe's factors."""
    axes = family_of(hf_config).sizes(hf_config)
    linears = list(list_linears(hf_config))
    layers = {rule.key: _count_layers(rule, hf_config, layout, stage) for rule, _ in linears}
    factors = {False: 0, True: 0}
    held = _count_held(layout, sizes, stage)
    touched = {key for key in _list_adapted_keys(hf_config, lora) if layers[key]}
    for rule, tensor in linears:
        if is_adapted(rule, tensor, lora.targets, lora.experts) and layers[rule.key]:
            experts = axes["experts"] // sizes.ep if rule.numbers_experts else 1
            matrices = layers[rule.key] * experts
            factors[rule.numbers_experts] += matrices * _count_factor(tensor, axes, lora.total_rank)
    frozen = sum(held[key] for key in touched)
    layer = max((held[key] // layers[key] for key in touched), default=0)
    has_head = has_value_head(hf_config) and stage == sizes.pp - 1
    head = axes["hidden"] if has_head else 0
    return AdapterSize(factors[False], factors[True], frozen, layer, head)


def _list_adapted_keys(hf_config: HfConfig, lora: LoraConfig | CriticLoraConfig) -> set[str]:
    """Return the keys of the rules some of whose tensors have factors."""
    return {
        rule.key
        for rule, tensor in list_linears(hf_config)
        if is_adapted(rule, tensor, lora.targets, lora.experts)
    }


def _count_layers(rule: Rule, hf_config: HfConfig, layout: MegatronLayout, stage: int) -> int:
    """Return the number of layers of a stage that have a rule's tensors."""
    family = family_of(hf_config)
    own = (layer for run in layout.stage_layers(stage) for layer in run)
    return sum(family.has_rule(rule, hf_config, layer) for layer in own)


def _count_held(layout: MegatronLayout, sizes: MegatronSizes, stage: int) -> dict[str, int]:
    """Return the numbers that a rank of a stage holds, by the key of their rule."""
    held: dict[str, int] = {}
    for entry, numel in layout.count_held(stage * sizes.stage_ranks):
        held[entry.rule.key] = held.get(entry.rule.key, 0) + numel
    return held


def _count_factor(tensor: HfTensor, axes: Mapping[str, int], rank: int) -> int:
    return rank * sum(axes[axis] for axis in tensor.axes)


def list_frozen_bytes(run: PlannedRun) -> list[int]:
    """Return the bytes of W0 in host memory, the most of a trainer rank of each pipeline stage.

    [] if the policy has no factors.
    """
    policy, critic = run.models.policy, run.critic
    is_lent = critic is not None and shares_frozen(run.train.lora, run.parallel, critic)
    packing: Packing = "plain" if is_lent else policy.packing
    return _list_frozen(policy.config, run.dtype, run.parallel, run.train.lora, packing)


def list_frozen_critic_bytes(run: PlannedRun) -> list[int]:
    """Return the same of critic ranks, without what they share with trainer ranks.

    [] if there is no critic, or it has no factors.
    """
    critic, model = run.critic, run.models.critic
    if critic is None or model is None:
        return []
    config = add_value_head(model.config)
    is_shared = shares_frozen(run.train.lora, run.parallel, critic)
    packing: Packing = "plain" if is_shared else model.packing
    sizes = _list_frozen(config, run.dtype, critic.parallel, critic.lora, packing)
    if not is_shared:
        return sizes
    shared = _list_adapted_keys(config, run.train.lora) & _list_adapted_keys(config, critic.lora)
    layout_sizes = MegatronSizes.from_config(critic.parallel, config)
    layout = MegatronLayout(family_of(config), config, layout_sizes, run.dtype)
    held = [_count_held(layout, layout_sizes, stage) for stage in range(len(sizes))]
    saved = [sum(of_stage[key] for key in shared if key in of_stage) for of_stage in held]
    pairs = zip(sizes, saved, strict=True)
    return [size - numel * itemsize(run.dtype) for size, numel in pairs]


def _list_frozen(
    hf_config: HfConfig,
    dtype: str,
    parallel: ParallelConfig,
    lora: LoraConfig | CriticLoraConfig,
    packing: Packing,
) -> list[int]:
    """Return the bytes of W0 by stage. Ranks keep the matrices packed that the files have packed.

    Those that engines would serve in that precision are taken for packed: files are not read.
    """
    if not lora.rank:
        return []
    sizes = MegatronSizes.from_config(parallel, hf_config)
    layout = MegatronLayout(family_of(hf_config), hf_config, sizes, dtype)
    counts = [count_adapter(hf_config, layout, sizes, stage, lora) for stage in range(parallel.pp)]
    plain = [count.frozen * itemsize(dtype) for count in counts]
    if packing == "plain":
        return plain
    keys = _list_adapted_keys(hf_config, lora)
    most = []
    for stage, num_bytes in enumerate(plain):
        first = stage * sizes.stage_ranks
        # Ranks whose parts begin within blocks keep a few more scales than others.
        ranks = range(first, first + sizes.stage_ranks)
        most.append(num_bytes - min(_count_saved(layout, rank, keys, packing) for rank in ranks))
    return most


def _count_saved(
    layout: MegatronLayout, rank: int, keys: Collection[str], packing: Precision
) -> int:
    """Return the bytes that a rank saves by keeping matrices of these rules packed."""
    saved = 0
    for entry, num_tensors, placement in layout.list_held(rank):
        if entry.rule.key in keys and is_rounded(packing, entry.tensor.name):
            for piece in placement.pieces:
                if rank in piece.ranks:
                    box = Box(entry.tensor.name, piece.start, piece.stop)
                    plain = box.numel * itemsize(entry.dtype)
                    saved += num_tensors * (plain - count_packed_bytes(packing, box))
    return saved


@dataclass(frozen=True)
class MergedSize:
    """Bytes of an engine rank that merges factors.

    base      W0 of its parts of the adapted matrices
    factors   their parts of A and B, which each sync after the first brings
    """

    base: int
    factors: int


def count_merged(
    run: PlannedRun, target: Layout, rank: int, names: Collection[str] | None = None
) -> MergedSize:
    """Return what engine rank `rank` by the layout `target` has; zeros if it gets all weights.

    names   the adapted matrices, if the caller knows them
    """
    lora = run.train.lora
    if not sends_factors(lora, run.rollout.stage_weights):
        return MergedSize(0, 0)
    adapted = list_adapted(run) if names is None else names
    base = factors = 0
    for box, _ in list_boxes(target, rank):
        if box.name in adapted:
            base += box.numel
            factors += lora.rank * sum(box.shape)
    return MergedSize(base * itemsize(run.dtype), factors * itemsize(run.dtype))


def count_buffers(
    target: Layout, rank: int, names: Collection[str], lora_rank: int, num_slots: int
) -> int:
    """Return the numbers of SGLang's buffers for adapters on engine rank `rank`.

    Each slot has room for factors of the largest rank, of all projections that SGLang keeps in one
    matrix with those that are adapted (srt/lora/mem_pool.py of 0.5.23).

    names   matrices with factors
    """
    modules = list_served_modules(names)
    sides = sum(
        sum(box.shape)
        for box, _ in list_boxes(target, rank)
        if module_of_name(box.name) in modules and not is_of_expert(box.name)
    )
    return num_slots * lora_rank * sides


def count_on_engine(run: PlannedRun, target: Layout, rank: int) -> dict[str, int]:
    """Return what factors take of an engine rank's GPU, by purpose; {} if it gets all weights."""
    lora = run.train.lora
    if serves_adapter(lora):
        num_slots = len(lora.list_adapters()) + 1  # and the weights alone
        numel = count_buffers(target, rank, list_adapted(run), lora.most_rank, num_slots)
        return {"buffers of adapters": numel * itemsize(run.dtype)}
    merged = count_merged(run, target, rank)
    if not merged.factors:
        return {}
    on_gpu = lora.engine_base == "gpu"
    return {"factors": merged.factors + (merged.base if on_gpu else 0)}


def list_adapted(run: PlannedRun) -> frozenset[str]:
    """Return the names of the matrices that the recipe adapts."""
    lora = run.train.lora
    return frozenset(list_matrices(run.models.policy.config, lora.targets, lora.experts))


def explain_engines(run: PlannedRun) -> str:
    """Return a sentence about what engines keep for factors; "" if they get all weights."""
    lora = run.train.lora
    if serves_adapter(lora):
        shapes = hf_tensor_shapes(run.models.policy.config)
        numel = lora.most_rank * sum(sum(shapes[name]) for name in list_adapted(run))
        what, at_most = "factors as an adapter (train.lora.sync)", ""
        if lora.adapters:
            what, at_most = f"{len(lora.adapters)} adapters (train.lora.adapters)", "at most "
        return (
            f"Engines serve {what}. Each sync after the first one brings"
            f" {at_most}{numel * itemsize(run.dtype) / 2**20:.1f} MiB to each engine rank."
        )
    if not sends_factors(lora, run.rollout.stage_weights):
        return ""
    names = list_adapted(run)
    deployment = make_deployment(run)
    ranks = range(deployment.engine_ranks)
    sizes = [count_merged(run, deployment.target, rank, names) for rank in ranks]
    where = "host memory" if lora.engine_base == "host" else "GPU memory"
    moved = sum(size.factors for size in sizes) / 2**20
    return (
        f"Engines merge factors (train.lora.sync) into weights that they keep in {where}: at most"
        f" {max(size.base for size in sizes) / GIB:.1f} GiB for each engine rank. Each sync after"
        f" the first one brings {moved:.0f} MiB to an engine."
    )


def explain_frozen(run: PlannedRun) -> str:
    """Return a sentence about W0 in host memory; "" without LoRA."""
    said = []
    if frozen := list_frozen_bytes(run):
        option = f"train.lora.rank={run.train.lora.rank}"
        said.append(_explain_ranks(run, "trainer", option, frozen, run.parallel))
    critic = run.critic
    if frozen := list_frozen_critic_bytes(run):
        assert critic is not None
        if shares_frozen(run.train.lora, run.parallel, critic):
            said.append("Critic ranks share those of matrices that both adapt.")
        if any(frozen):
            option = f"critic.lora.rank={critic.lora.rank}"
            said.append(_explain_ranks(run, "critic", option, frozen, critic.parallel))
    return " ".join(said)


def _explain_ranks(
    run: PlannedRun, role: str, option: str, frozen: Sequence[int], parallel: ParallelConfig
) -> str:
    num_ranks = min(run.plan.ranks_per_host, parallel.world_size)
    each = max(frozen) / GIB
    return (
        f"Frozen weights below the factors ({option}), in host memory: at most {each:.1f} GiB for"
        f" each {role} rank, {num_ranks * each:.1f} GiB for the {num_ranks} of a host."
    )
