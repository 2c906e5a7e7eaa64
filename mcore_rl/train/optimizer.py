"""Wraps model chunks in Megatron's DDP, and makes the optimizer and its learning-rate schedule.

A checkpoint holds the optimizer's state parameter by parameter: one of the ranks that update a
parameter writes its whole state, and each of them reads it. This replaces megatron-core's
`DistributedOptimizer.sharded_param_state_fully_reshardable`, which gathers the states of all
data-parallel ranks on each of them and reads all of them on each. It also takes the states of
parameters behind a padded bucket from the wrong place; tied embeddings over pipeline stages have
such buckets. Names and shapes are megatron-core's, and so is the code that puts loaded states in
place.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import cos, pi
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    MegatronOptimizer,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from mcore_rl.config import OptimizerConfig
from mcore_rl.device import device
from mcore_rl.train.guarded_optimizer import GuardedOptimizer
from mcore_rl.train.muon import MUON_DEFAULTS, forget_buffers, lay_out_matrices, use_muon
from mcore_rl.weights.models.tower import PREFIX

STATE = "optimizer.state."
READABLE = "readable"
Readable = Callable[[Tensor], Tensor]
_PIECE_NUMEL = 1 << 24
"""Elements sent at once: what a gather takes of the device memory, 64 MiB."""
DDP_DEFAULTS: Mapping[str, Any] = {
    "grad_reduce_in_fp32": True,
    "use_distributed_optimizer": True,
    # It would read all gradients and wait for the device; a norm that is not finite is refused.
    "check_for_nan_in_grad": False,
}
OPTIONS = ("max_lr", "min_lr", "weight_decay", "betas", "eps")
"""Options of a group that the recipe has; megatron-core's checkpoints have them, too."""
_DTYPE_FIELDS = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype")


@dataclass(frozen=True)
class Part:
    """Elements [start, end) of a flat parameter, which one data-parallel rank updates."""

    rank: int
    start: int
    end: int


@dataclass(frozen=True)
class _Updated:
    """A parameter and the ranks of `group` that update it; the one that updates most owns it."""

    parameter: torch.nn.Parameter
    parts: Sequence[Part]
    group: dist.ProcessGroup

    @property
    def owner(self) -> Part:
        return max(self.parts, key=lambda part: part.end - part.start)

    @property
    def mine(self) -> Part | None:
        return next((part for part in self.parts if part.rank == self.group.rank()), None)


def write_whole_parameters(optimizer: DistributedOptimizer) -> None:
    """Replace the function behind `optimizer.sharded_state_dict` by this module's.

    A patch of megatron-core 0.19.2; see the module's docstring for the reasons.
    """
    optimizer.sharded_param_state_fully_reshardable = partial(_make_sharded_state, optimizer)


def split(start: int, end: int, shard_size: int) -> list[Part]:
    """Return who updates a parameter at [start, end) of a bucket.

    Each rank updates `shard_size` elements of the bucket.
    """
    first_rank = start // shard_size
    last_rank = (end - 1) // shard_size
    parts: list[Part] = []
    for rank in range(first_rank, last_rank + 1):
        shard_start = max(rank * shard_size, start)
        shard_end = min((rank + 1) * shard_size, end)
        parts.append(Part(rank, shard_start - start, shard_end - start))
    return parts


def _make_sharded_state(
    optimizer: DistributedOptimizer,
    model_state: Mapping[str, Any],
    is_loading: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> dict[int, dict[str, ShardedTensor | ShardedTensorFactory]]:
    """Return {number of the parameter in the optimizer: {kind: tensor of the parameter's shape}}.

    To save, with the parameters that this rank owns; to load, with those that it updates.
    Collective over the optimizer's ranks. `metadata[READABLE]` is a function that returns, for a
    tensor whose memory is moved out, its copy in host memory.
    """
    tensors, _ = extract_sharded_tensors_and_factories(model_state)
    model_entries = {sharded.data: sharded for sharded in nested_values(tensors)}
    readable = (metadata or {}).get(READABLE, as_it_is)
    state = {}
    for number, updated in enumerate(_parameters(optimizer)):
        mine = updated.mine
        if mine is None:
            continue
        sharded = model_entries[updated.parameter]
        states = _states(optimizer, updated.parameter)
        values = _empty(updated, states) if is_loading else _gather(states, updated, mine, readable)
        if values:
            replica = 0 if mine == updated.owner else 1 + mine.rank
            state[number] = {
                kind: _like(sharded, kind, value, replica) for kind, value in values.items()
            }
    return state


def _parameters(optimizer: DistributedOptimizer) -> Iterator[_Updated]:
    """Yield parameters in the order of `load_parameter_state_from_fully_reshardable`."""
    for buffer in optimizer.buffers:
        group = buffer.data_parallel_group
        for parameter, (start, end, bucket_id) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_id]
            shard_size = bucket.grad_data.numel() // group.size()
            parts = split(start - bucket.offset, end - bucket.offset, shard_size)
            yield _Updated(parameter, parts, group)


def list_own_states(
    optimizer: DistributedOptimizer,
) -> Iterator[tuple[torch.nn.Parameter, int, Mapping[str, Tensor]]]:
    """Yield (parameter, first element, {kind: state}) of what this rank updates of parameters.

    A state is flat, and holds the parameter's elements from that one on. Where main weights lie
    apart from what the optimizer is given, the latter is the kind "given".
    """
    for updated in _parameters(optimizer):
        if updated.mine is not None:
            parameter = updated.parameter
            group, place = optimizer.model_param_group_index_map[parameter]
            states = dict(_states(optimizer, parameter))
            given = optimizer.optimizer.param_groups[group]["params"][place]
            if given is not states["param"]:
                states["given"] = given
            yield parameter, updated.mine.start, states


def _empty(updated: _Updated, kinds: Iterable[str]) -> dict[str, Tensor]:
    return {kind: torch.empty(updated.parameter.shape, dtype=torch.float32) for kind in kinds}


def as_it_is(tensor: Tensor) -> Tensor:
    """Return `tensor`: a `readable` for memory that never moves."""
    return tensor


def _gather(
    states: Mapping[str, Tensor], updated: _Updated, mine: Part, readable: Readable
) -> dict[str, Tensor]:
    """Return the whole state of a parameter on its owner, {} elsewhere.

    The state is not copied if one rank updates the whole parameter.
    """
    owned = {kind: state.detach() for kind, state in states.items()}
    for kind, part in owned.items():
        if part.dtype != torch.float32:
            owned[kind] = readable(part).to("cpu", torch.float32)
    if len(updated.parts) > 1:
        owned = {kind: _gather_one(readable(part), updated, mine) for kind, part in owned.items()}
    if mine != updated.owner:
        return {}
    return {kind: whole.view(updated.parameter.shape) for kind, whole in owned.items()}


def _states(optimizer: DistributedOptimizer, parameter: torch.nn.Parameter) -> Mapping[str, Tensor]:
    """Return this rank's main weight ("param") and moments of a parameter where they lie.

    megatron-core copies those of the precision-aware optimizer to float32, but they may have been
    moved to host memory meanwhile.
    """
    if not optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        return optimizer._get_main_param_and_optimizer_states(parameter)
    group, place = optimizer.model_param_group_index_map[parameter]
    shard = optimizer.optimizer.param_groups[group]["params"][place]
    state = optimizer.optimizer.state[shard]
    return {
        "param": state["master_param"],
        "exp_avg": state["exp_avg"],
        "exp_avg_sq": state["exp_avg_sq"],
    }


def _gather_one(part: Tensor, updated: _Updated, mine: Part) -> Tensor:
    """Return the whole of one kind of state on the owner; other ranks send their part.

    All ranks go through the parameters in the same order, so that no two wait for each other.
    """
    group = updated.group
    owner = updated.owner
    if mine != owner:
        for piece in part.split(_PIECE_NUMEL):
            dist.send(piece.to(device()), group=group, group_dst=owner.rank)
        return part
    whole = torch.empty(updated.parameter.numel(), dtype=part.dtype)
    for other in updated.parts:
        place = whole[other.start : other.end]
        if other == mine:
            place.copy_(part)
            continue
        for piece in place.split(_PIECE_NUMEL):
            received = torch.empty_like(piece, device=device())
            dist.recv(received, group=group, group_src=other.rank)
            piece.copy_(received)
    return whole


def _like(
    sharded: ShardedTensor | ShardedTensorFactory, kind: str, value: Tensor, replica: int
) -> ShardedTensor | ShardedTensorFactory:
    """Return the model's sharded entry with a state of its parameter in place of the parameter."""
    model_replica = sharded.replica_id[:-1]  # type: ignore[index]
    changes: dict[str, Any] = {
        "key": f"{STATE}{kind}.{sharded.key}",
        "data": value,
        "replica_id": (*model_replica, replica),
    }
    if isinstance(sharded, ShardedTensor):
        changes["dtype"] = value.dtype
    return replace(sharded, **changes)


class ModelPrecision(Float16Module):
    """A Float16Module whose logits keep the model's precision: float32 ones take twice the memory.

    train/logprobs.py makes float32 copies of a few tokens at a time.
    """

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the model's output as it is."""
        return super().forward(*inputs, fp32_output=False, **kwargs)


def wrap_chunks(
    config: TransformerConfig,
    chunks: Sequence[torch.nn.Module],
    ddp: Mapping[str, Any],
    optimizer: str = "adam",
    finalize: Callable[..., None] = finalize_model_grads,
) -> list[DistributedDataParallel]:
    """Wrap each chunk in Megatron's DDP; its parameters become views of DDP's buffers.

    `ddp`: further fields of DistributedDataParallelConfig. With overlap_grad_reduce, a bucket of
    gradients is reduced while the last micro-batch's backward pass still computes others.
    `optimizer`: OptimizerConfig.name, since Muon needs whole matrices. `finalize` is called with
    all chunks after the last backward pass of a step.
    """
    ddp_config = DistributedDataParallelConfig(**{**DDP_DEFAULTS, **ddp})
    config.finalize_model_grads_func = finalize
    inner = [ModelPrecision(config, c) for c in chunks] if config.bf16 else chunks
    wrapped = []
    for i, chunk in enumerate(inner):
        layout = None
        if optimizer == "muon":
            layout = lay_out_matrices(chunk, ddp_config, in_buckets=i == 0)
        wrapped.append(
            DistributedDataParallel(
                config,
                ddp_config,
                chunk,  # type: ignore[arg-type]
                disable_bucketing=i > 0,
                full_param_layout=layout,
            )
        )
        forget_buffers(chunk)
    if ddp_config.overlap_grad_reduce:
        waits = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = waits if len(waits) > 1 else waits[0]  # type: ignore[assignment]
    return wrapped


def make_optimizer(
    config: OptimizerConfig, dtype: torch.dtype, chunks: Sequence[DistributedDataParallel]
) -> GuardedOptimizer:
    """Return a distributed optimizer: float32 main weights, decoupled decay, global norm clipping.

    Its moments are allocated at once, so a checkpoint can be saved before the first step.
    `config.megatron` holds further fields of megatron-core's OptimizerConfig.
    """
    dtypes = {
        name: getattr(torch, config.megatron[name])
        for name in _DTYPE_FIELDS
        if name in config.megatron
    }
    options = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        # The remainders of float32 weights would be all that a checkpoint holds of them.
        store_param_remainders=False,
        **{**MUON_DEFAULTS, **config.megatron, **dtypes},
    )
    made = get_megatron_optimizer(options, list(chunks), _overrides(config, options))
    optimizer = GuardedOptimizer(parts_of(made))
    for part in parts_of(optimizer):
        if config.name == "muon":
            use_muon(part, options, chunks)
        elif config.name == "lion":
            _use_lion(part)
        part.init_state_fn(part.optimizer, options)
        for group in part.optimizer.param_groups:
            group.setdefault("step", 0)
            # megatron-core's own scheduler would: norms and biases do not decay.
            group["weight_decay"] = config.weight_decay * group.get("wd_mult", 1.0)
        write_whole_parameters(part)
    if config.name == "lion":
        options.optimizer = "lion"  # names the moments that a checkpoint has
    return optimizer


def _use_lion(part: DistributedOptimizer) -> None:
    """Put Lion in the place of Adam, over the same groups, with its one moment.

    megatron-core itself has Lion without its distributed optimizer only.
    """
    from emerging_optimizers.scalar_optimizers.lion import Lion

    # The parameters of a distributed optimizer are views, which an Optimizer would refuse.
    lion = Lion([torch.nn.Parameter(torch.empty(0))])
    lion.param_groups = part.optimizer.param_groups
    for group in lion.param_groups:
        for parameter in group["params"]:
            lion.state[parameter]["exp_avg"] = torch.zeros_like(parameter.data)
    part.optimizer = lion


def _overrides(config: OptimizerConfig, options: MegatronOptimizerConfig) -> Any:
    """Return megatron-core's settings of groups of parameters; None for its standard ones.

    It tells the groups of a checkpoint apart by `lr_mult`, among others.
    """
    if config.vision_lr is None:
        return None
    tower: Any = {"lr_mult": config.vision_lr / config.lr}
    return {**get_standard_config_overrides(options), ParamKey(name=f"*{PREFIX}*"): tower}


def load_optimizer(optimizer: MegatronOptimizer, state: Any) -> None:
    """Load a saved state; the groups keep the options of this run's recipe.

    megatron-core finds the saved group of a group by its rates, among others, and takes all of the
    saved group's options.
    """
    own = [{k: group[k] for k in OPTIONS if k in group} for group in optimizer.param_groups]
    for saved in _list_saved_groups(state):
        saved.update({k: own[0][k] for k in ("max_lr", "min_lr")})
    optimizer.load_state_dict(state)
    for group, options in zip(optimizer.param_groups, own, strict=True):
        group.update(options)


def _list_saved_groups(state: Any) -> list[dict[str, Any]]:
    """Return the groups of all parts of a saved state."""
    if isinstance(state, list):
        return [group for part in state for group in _list_saved_groups(part)]
    if not isinstance(state, dict):
        return []
    groups = state.get("param_groups", [])
    return [*groups, *(g for part in state.values() for g in _list_saved_groups(part))]


def parts_of(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the chained optimizers: one for dense and one for expert parameters, or just one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def compute_learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the rate of optimizer step `step`, counted from 0.

    It rises linearly to lr during the warm-up, then follows the schedule down to min_lr.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    decay_steps = max(total_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / decay_steps, 1.0)
    share = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + cos(pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * share


def set_learning_rate(optimizer: MegatronOptimizer, rate: float) -> None:
    """Set the rate of every parameter group, times the group's own factor."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    for group in groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)
