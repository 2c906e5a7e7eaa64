"""Lets Muon update the weight matrices of a model, and Adam the rest of its parameters.

Muon needs whole matrices: it makes a matrix's mean gradient orthogonal before it adds it
(https://kellerjordan.github.io/posts/muon/; scaled for Adam's learning rates as in
https://arxiv.org/abs/2502.16982, section 2.2). megatron-core's distributed optimizer gives each
data-parallel rank a range of flat parameters, and here is what lets both go together:

1. `lay_out_matrices` places parameters in DDP's buffers so that a rank updates whole matrices,
   by the layout of megatron-core's layer-wise optimizer;
2. `MuonBesideAdam` takes the place of Adam inside the distributed optimizer, which goes on reducing
   gradients, clipping, gathering weights and giving its state to checkpoints.

megatron-core's own way, LayerWiseDistributedOptimizer, is for one layout (its checkpoints do not
reshard), and for weights in bfloat16.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.param_layout import FullParamLayout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from mcore_rl.weights.models.tower import PREFIX

MOMENTUM = "momentum_buffer"
MUON_DEFAULTS: Mapping[str, Any] = {
    # Each matrix is made orthogonal as a whole, so that the step does not depend on parallel.tp.
    "muon_tp_mode": "duplicated",
    # An update has the root mean square of Adam's, so that Adam's learning rates are right for it.
    "muon_extra_scale_factor": 0.2,
}
_IN_BUFFERS_OF_MATRICES = "is_managed_by_layer_wise_optimizer"
_NO_MATRICES = ("router", "gate_weight", PREFIX)
"""Parts of the names of parameters that choose experts, or belong to a vision tower."""


def is_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    """Return whether Muon updates a parameter: a matrix from features to features.

    Embeddings, the output layer, a critic's head, routers, norms, biases and vision towers are
    Adam's.
    """
    return (
        parameter.dim() == 2
        and min(parameter.shape) > 1
        and not getattr(parameter, "is_embedding_or_output_parameter", False)
        and not any(part in name for part in _NO_MATRICES)
    )


def lay_out_matrices(
    chunk: torch.nn.Module, ddp: DistributedDataParallelConfig, *, in_buckets: bool
) -> FullParamLayout:
    """Return places for a chunk's trained parameters in the buffers of DDP.

    A matrix lies in the range of one data-parallel rank; the others may be split, as without Muon.
    `in_buckets`: whether DDP may divide the chunk's buffers into buckets.
    """
    bucket_size = None
    if in_buckets and ddp.overlap_grad_reduce and ps.get_pipeline_model_parallel_rank() == 0:
        bucket_size = ddp.bucket_size or max(
            40_000_000, 1_000_000 * ps.get_data_parallel_world_size()
        )
    named = [(n, p) for n, p in chunk.named_parameters() if p.requires_grad]
    for name, parameter in named:
        vars(parameter)[_IN_BUFFERS_OF_MATRICES] = is_matrix(name, parameter)
    return LayerWiseDistributedOptimizer.compute_full_param_layout(
        [parameter for _, parameter in named],
        bucket_size,
        ps.get_data_parallel_world_size(with_context_parallel=True),
        ddp,
        ps.get_expert_data_parallel_world_size(),
    )


def forget_buffers(chunk: torch.nn.Module) -> None:
    """Take the marks of `lay_out_matrices` away once DDP has its buffers.

    By them the distributed optimizer would leave the matrices to megatron-core's layer-wise one.
    """
    for parameter in chunk.parameters():
        vars(parameter).pop(_IN_BUFFERS_OF_MATRICES, None)


class WholeMatrices(TensorParallelMuon):
    """Muon on flat parameters, whose state is flat as well, and their model's matrices."""

    matrices: Mapping[Tensor, torch.nn.Parameter]

    def orthogonalize(self, p: Tensor, grad: Tensor, **kwargs: Any) -> Tensor:
        """Return the update of the flat parameter `p` from its flat momentum."""
        matrix = self.matrices[p]
        return super().orthogonalize(matrix, grad.view(matrix.shape), **kwargs).flatten()


class MuonBesideAdam(torch.optim.Optimizer):
    """Takes Muon's step of the parameters that are whole matrices and Adam's of the rest.

    A parameter's state is {"momentum_buffer"} or that of `adam`, as flat as the parameter.
    """

    def __init__(
        self, adam: Any, muon: WholeMatrices, matrices: Mapping[Tensor, torch.nn.Parameter]
    ) -> None:
        # The parameters of a distributed optimizer are views, which an Optimizer would refuse.
        super().__init__([torch.nn.Parameter(torch.empty(0))], dict(adam.defaults))
        self.param_groups = adam.param_groups
        self._adam = adam
        self._muon = muon
        self._muon.matrices = matrices

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None, "a closure is not taken"
        for inner, groups in ((self._adam, self._split(False)), (self._muon, self._split(True))):
            inner.state = self.state
            inner.param_groups = groups
            if any(group["params"] for group in groups):
                inner.step()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1

    def make_momentum(self) -> None:
        """Allocate the state of all matrices."""
        for parameter in self._muon.matrices:
            self.state[parameter][MOMENTUM] = torch.zeros_like(parameter.data)

    def _split(self, matrices: bool) -> list[dict[str, Any]]:
        """Return the groups with only those of their parameters that are matrices, or are not."""
        defaults = self._muon.defaults if matrices else {}
        return [
            {
                **defaults,
                **group,
                "params": [p for p in group["params"] if (p in self._muon.matrices) == matrices],
            }
            for group in self.param_groups
        ]


def use_muon(
    part: DistributedOptimizer,
    options: MegatronOptimizerConfig,
    chunks: Sequence[DistributedDataParallel],
) -> None:
    """Put Muon beside the Adam of a distributed optimizer over the layout of `lay_out_matrices`."""
    for chunk in chunks:
        _mark_fused(chunk, chunk.config)
    both = MuonBesideAdam(part.optimizer, _make_muon(options), dict(_find_matrices(part, chunks)))
    both.make_momentum()
    part.optimizer = both


def _find_matrices(
    part: DistributedOptimizer, chunks: Sequence[DistributedDataParallel]
) -> Iterator[tuple[Tensor, torch.nn.Parameter]]:
    """Yield (flat parameter that this rank updates, the model's matrix)."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            place = part.model_param_group_index_map.get(parameter)
            if place is None or not is_matrix(name, parameter):
                continue
            group, index = place
            flat = part.optimizer.param_groups[group]["params"][index]
            assert flat.numel() == parameter.numel(), f"{name} is divided over ranks"
            yield flat, parameter


def _make_muon(options: MegatronOptimizerConfig) -> WholeMatrices:
    return WholeMatrices(
        [torch.nn.Parameter(torch.empty(0))],
        lr=options.lr,
        momentum=options.muon_momentum,
        nesterov=options.muon_nesterov,
        weight_decay=options.weight_decay,
        split_qkv=options.muon_split_qkv,
        is_qkv_fn=lambda parameter: getattr(parameter, "is_qkv", False),
        fp32_matmul_prec=options.muon_fp32_matmul_prec,
        coefficient_type=options.muon_coefficient_type,
        num_ns_steps=options.muon_num_ns_steps,
        scale_mode=options.muon_scale_mode,
        extra_scale_factor=options.muon_extra_scale_factor,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        tp_mode=options.muon_tp_mode,
    )


def _mark_fused(chunk: torch.nn.Module, config: TransformerConfig) -> None:
    """Tell Muon which matrices belong to experts, and which hold queries, keys and values.

    As megatron-core's `_get_megatron_emerging_optimizer` does.
    """
    head = config.kv_channels
    queries = config.num_attention_heads // config.num_query_groups * head
    gates = [queries] if config.attention_output_gate else []
    shapes = [queries, *gates, head, head]
    for name, parameter in chunk.named_parameters():
        marks = vars(parameter)
        if "experts" in name and "shared" not in name:
            marks["expert_tp"] = True
        if name.endswith("linear_qkv.weight") and parameter.shape[0] % sum(shapes) == 0:
            marks |= {"is_qkv": True, "qkv_split_shapes": shapes}
