"""Patches that let megatron-core 0.19.2 run without CUDA; each is applied once per process.

torch.cpu implements the interface of torch.cuda (streams, events, synchronize) as no-ops. Every
torch.cuda entry point that megatron-core reaches is replaced by its torch.cpu or default-generator
counterpart. Collectives are changed so that gloo can run them, without needless copies.
tests/cpu/test_megatron_patches.py has a test per patch that fails once megatron-core works without
it, and docs/patches.md lists them.
"""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from mcore_rl.device import leave_compiler_out


def uneven_collectives() -> None:
    """All-gather and reduce-scatter uneven parts with all-to-all; gloo only takes even ones.

    Expert tensor parallelism needs them: each rank has another number of tokens.
    """
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_uneven(
        x: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(x, group, None, use_global_buffer)
        sizes = [int(n) for n in output_split_sizes]
        out = x.new_empty([sum(sizes), *x.shape[1:]])
        dist.all_to_all_single(
            out, torch.cat([x] * len(sizes)), sizes, [len(x)] * len(sizes), group=group
        )
        return out

    def scatter_uneven(
        x: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return scatter(x, group, None, use_global_buffer)
        sizes = [int(n) for n in input_split_sizes]
        num_ranks = len(sizes)
        num_rows = sizes[group.rank()]
        out = x.new_empty([num_ranks * num_rows, *x.shape[1:]])
        dist.all_to_all_single(out, x.contiguous(), [num_rows] * num_ranks, sizes, group=group)
        return out.view(num_ranks, num_rows, *x.shape[1:]).sum(0)

    mappings._gather_along_first_dim = gather_uneven
    mappings._reduce_scatter_along_first_dim = scatter_uneven


def contiguous_collectives() -> None:
    """Hand gloo's scatter and broadcast contiguous tensors; gloo silently ignores strides."""
    scatter, broadcast = dist.scatter, dist.broadcast

    def scatter_contiguous(tensor: Any, scatter_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        parts = scatter_list and [t.contiguous() for t in scatter_list]
        return scatter(tensor, parts, *args, **kwargs)

    def broadcast_contiguous(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_contiguous():
            return broadcast(tensor, *args, **kwargs)
        assert not kwargs.get("async_op"), (
            "an asynchronous broadcast of a strided tensor is not supported"
        )
        packed = tensor.contiguous()
        broadcast(packed, *args, **kwargs)
        tensor.copy_(packed)

    dist.scatter, dist.broadcast = scatter_contiguous, broadcast_contiguous


def buckets_in_place() -> None:
    """Reduce a bucket's gradients and gather its weights in the buffer in which they lie.

    gloo copies all that it gathers or reduces together to fresh memory and back, even where a group
    is a single rank: 0.6 s of a training step of 55 M parameters.
    """
    from megatron.core.distributed import param_and_grad_buffer

    coalesced = param_and_grad_buffer._coalescing_manager
    works: list[Any] = []

    @contextlib.contextmanager
    def collect(group: Any, async_ops: bool = False) -> Iterator[Any]:
        """Yield what waits for the collectives of the block."""
        works.clear()
        with coalesced(group, async_ops=async_ops) as all_works:
            yield all_works
        all_works.works += works
        if not async_ops:
            all_works.wait()

    def gather(whole: torch.Tensor, own: torch.Tensor, group: Any, async_op: bool) -> None:
        """Take each rank's shard of `whole` from that rank. `own` lies in `whole`."""
        if group.size() == 1:
            return
        for rank, shard in enumerate(whole.chunk(group.size())):
            works.append(dist.broadcast(shard, group=group, group_src=rank, async_op=True))

    def reduce(own: torch.Tensor, whole: torch.Tensor, op: Any, group: Any, async_op: bool) -> None:
        """Sum `whole` over ranks. `own`, a shard of it, is all that its caller reads."""
        if group.size() > 1:
            options = dist.AllreduceOptions()
            options.reduceOp = op
            works.append(group.allreduce([whole], options))

    param_and_grad_buffer._coalescing_manager = collect
    param_and_grad_buffer.dist_all_gather_func = gather
    param_and_grad_buffer.dist_reduce_scatter_func = reduce


class _Stream(torch.cpu.Stream):
    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        super().__init__()

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None:
        pass


class _Event(torch.cpu.Event):
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def elapsed_time(self, end: Any) -> float:
        return 0.0


def alias_streams() -> None:
    """Replace torch.cuda's streams, events and devices by torch.cpu's no-ops."""
    cuda: Any = torch.cuda
    stream = _Stream()
    cuda.current_device = lambda: "cpu"  # valid wherever a device is expected
    cuda.set_device = lambda device: None
    cuda.device_count = lambda: 1
    cuda.synchronize = lambda device=None: None
    cuda.current_stream = cuda.default_stream = lambda device=None: stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.Stream, cuda.Event = _Stream, _Event


def alias_rng() -> None:
    """Replace CUDA's random generator by the default one.

    Without CUDA torch defers calls on the CUDA generator until an initialization that never comes.
    """
    from megatron.core.tensor_parallel import random as tp_random

    cuda: Any = torch.cuda
    generator = torch.default_generator
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: generator.manual_seed(seed) and None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: generator.get_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: (
        generator.set_state(state) and None
    )
    tp_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: (
        generator.set_state(state) and None
    )
    # megatron-core warns when the CPU generator changes with the CUDA one; here they are the same.
    logger = logging.getLogger(tp_random.__name__)
    logger.addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _redirect_to_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make_on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        target = kwargs.get("device")
        if isinstance(target, int) or (target is not None and str(target).startswith("cuda")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make_on_cpu


def alias_factories() -> None:
    """Make tensor factories read device="cuda" as the CPU, and .cuda() the identity.

    `with torch.device(...)` acts on the factories that torch lists at its first use. The list is
    made here, before they are replaced: otherwise such a block would do nothing, and transformers,
    which makes models on the meta device, would leave their rotary frequencies uninitialized.
    """
    _device_constructors()
    names = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn")
    for name in (*names, "empty_like", "zeros_like"):
        setattr(torch, name, _redirect_to_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self


def alias_tensor_type() -> None:
    """Report CPU tensors as torch.cuda.*Tensor, the types megatron-core's optimizers accept."""
    original = torch.Tensor.type

    def tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = tensor_type


def know_linear_in_latent_attention() -> None:
    """Let latent attention take the linear of te_workalike.SpecProvider for what is not sharded.

    megatron-core imports that class there only together with Transformer Engine.
    """
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla

    from mcore_rl.cpu.te_workalike import DuplicatedLinear

    multi_latent_attention.Linear = DuplicatedLinear
    absorbed_mla.Linear = DuplicatedLinear


def recompute_without_fp8() -> None:
    """Hand CheckpointWithoutOutput fp8=None where fp8 is off.

    It tests `fp8 is not None`, so its own default, False, asks for Transformer Engine's fp8
    context.
    """
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    original = CheckpointWithoutOutput.__init__
    CheckpointWithoutOutput.__init__ = lambda self, fp8=False: original(self, fp8 or None)


def recompute_by_copy() -> None:
    """Copy what a recomputation computed into the outputs whose memory had been released.

    megatron-core compiles C++ code that shares the memory instead. That takes half a minute, and a
    lock that a killed rank left behind would let all later ranks wait for ever.
    """
    from megatron.core.tensor_parallel import random as tp_random

    def copy_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
        target, source = output.untyped_storage(), recomputed.untyped_storage()
        target.resize_(source.nbytes())
        target.copy_(source)

    tp_random._get_share_storage = lambda: copy_storage


def convert_alltoall_splits() -> None:
    """Convert the all-to-all dispatcher's split sizes to numpy on the CPU, too.

    megatron-core converts them only when it moves them from a GPU to the host. On CPU they would
    stay tensors, which all_to_all_single rejects.
    """
    from megatron.core.transformer.moe import token_dispatcher

    def keep_on_host(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return value.numpy() if as_numpy and torch.is_tensor(value) else value

    token_dispatcher.maybe_move_tensor_to_cpu = keep_on_host


def use_fused_adam() -> None:
    """Give the distributed optimizer an Adam with Transformer Engine's state layout."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    from mcore_rl.cpu.te_workalike import FusedAdam
    from mcore_rl.device.training_patches import step_in_parts

    optimizer.Adam = distrib_optimizer.Adam = step_in_parts(FusedAdam)
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


def allow_precision_aware_adam() -> None:
    """Let OptimizerConfig have the precision-aware optimizer without Transformer Engine.

    The last that it asks for is Transformer Engine's FusedAdam.
    """
    from megatron.core.optimizer import OptimizerConfig

    check = OptimizerConfig.__post_init__

    def check_but_te(self: Any) -> None:
        try:
            check(self)
        except RuntimeError:
            if not self.use_precision_aware_optimizer:
                raise

    OptimizerConfig.__post_init__ = check_but_te


def use_te_workalike() -> None:
    """Build layers from torch modules with the tree and names of Transformer Engine's."""
    from megatron.core.extensions import transformer_engine_spec_provider as providers
    from megatron.core.models.gpt import gpt_layer_specs, moe_module_specs
    from megatron.core.transformer import transformer_block

    from mcore_rl.cpu import te_workalike

    for module in (providers, gpt_layer_specs, moe_module_specs):
        module.TESpecProvider = te_workalike.SpecProvider
    gpt_layer_specs.TENorm = transformer_block.LayerNormImpl = te_workalike.Norm


def use_torch_delta_net() -> None:
    """Give gated delta nets torch's operations for the kernels of flash-linear-attention."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.ssm.gated_delta_net import common, gdn

    from mcore_rl.cpu import delta_net, te_workalike

    common.HAVE_FLA = True
    common.l2norm = delta_net.l2norm
    gdn.causal_conv1d = delta_net.causal_conv1d
    gdn.chunk_gated_delta_rule = delta_net.chunk_gated_delta_rule
    specs.TESpecProvider = te_workalike.SpecProvider


def use_torch_mamba() -> None:
    """Give Mamba-2 layers torch's operations for mamba_ssm's kernels, and a hybrid model norms.

    Under context parallelism a layer asks Transformer Engine which tokens a rank has.
    """
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer

    from mcore_rl.cpu import mamba, te_workalike
    from mcore_rl.cpu.gated_norm import GatedNorm

    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer.ExtendedRMSNorm = GatedNorm
    mamba_mixer.mamba_split_conv1d_scan_combined = mamba.mamba_split_conv1d_scan_combined
    mamba_mixer._check_mamba_sequence_packing_support = lambda **_: (True, None)
    mamba_context_parallel.tex = mamba.PartitionedIndices
    mamba_context_parallel.is_te_min_version = lambda version: True
    hybrid_block.TENorm = te_workalike.Norm


def know_linear_in_latent_experts() -> None:
    """Let experts of a smaller width than the model take te_workalike.SpecProvider's linear.

    megatron-core imports that class there only together with Transformer Engine.
    """
    from megatron.core.transformer.moe import moe_layer

    from mcore_rl.cpu.te_workalike import DuplicatedLinear

    moe_layer.HAVE_TE, moe_layer.TELinear = True, DuplicatedLinear


def run_eagerly() -> None:
    """Run functions decorated with megatron-core's jit_fuser uncompiled.

    jit_fuser is torch.compile, which needs a C++ compiler and minutes of compilation on CPU.
    """
    leave_compiler_out()
    if "torch._dynamo" in sys.modules:  # something was decorated before that
        torch.compiler.set_stance("force_eager")


WITHOUT_TRANSFORMER_ENGINE: tuple[Callable[[], None], ...] = (
    know_linear_in_latent_attention,
    recompute_without_fp8,
    use_fused_adam,
    allow_precision_aware_adam,
    use_te_workalike,
    use_torch_delta_net,
    use_torch_mamba,
    know_linear_in_latent_experts,
)
"""Patches that have to do with Transformer Engine alone, not with the CPU."""

PATCHES: tuple[Callable[[], None], ...] = (
    alias_streams,
    alias_rng,
    alias_factories,
    alias_tensor_type,
    recompute_by_copy,
    convert_alltoall_splits,
    uneven_collectives,
    contiguous_collectives,
    buckets_in_place,
    *WITHOUT_TRANSFORMER_ENGINE,
    run_eagerly,
)
