"""Torch work-alike of Transformer Engine's TEGroupedLinear: the products of a rank's experts.

Parameter names and distributed-checkpoint keys equal those of a GPU with Transformer Engine.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from mcore_rl.cpu.kernels import usable
from mcore_rl.cpu.kernels.experts import grouped_linear

KINDS = ("weight", "bias")


class _GroupedLinear(torch.nn.Module):
    """One linear layer per local expert, as in TEGroupedLinear.

    Its parameters are weight0 .. weightN-1, and bias0 .. biasN-1 if `bias`.
    """

    tp_axis: int

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool,
        skip_bias_add: bool,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__()
        assert not bias or pg_collection.expt_tp.size() == 1, (
            "expert biases need expert tensor parallelism 1"
        )
        self.config = config
        self.num_gemms = num_gemms
        self.groups = pg_collection
        self.has_bias = bias
        self.skip_bias_add = skip_bias_add
        shape = [output_size, input_size]
        shape[self.tp_axis] //= pg_collection.expt_tp.size()
        for i in range(num_gemms):
            weight: Any = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            if config.perform_initialization:
                with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                    init_method(weight)
            weight.tensor_model_parallel = True
            weight.partition_dim = self.tp_axis
            weight.partition_stride = 1
            self.register_parameter(f"weight{i}", weight)
            if bias:
                zeros = torch.zeros(output_size, dtype=config.params_dtype)
                self.register_parameter(f"bias{i}", torch.nn.Parameter(zeros))

    def forward(self, x: Tensor, counts: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        """Apply each expert to its `counts[i]` rows of `x`, which are sorted by expert.

        With skip_bias_add the biases are returned for the caller to add.
        """
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        if not self.has_bias and usable(x):
            return grouped_linear(x, weights, counts), None
        biases = None
        if self.has_bias:
            biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
        added = [None] * self.num_gemms if biases is None or self.skip_bias_add else biases
        parts = zip(torch.split(x, list(counts)), weights, added, strict=True)
        out = torch.cat([F.linear(rows, weight, bias) for rows, weight, bias in parts])
        return out, biases if self.skip_bias_add else None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the experts' shards with the expert as one more axis in front.

        As in TEGroupedLinear, the key is `prefix`weight and the offset the global expert number.
        """
        metadata = metadata or {}
        single = metadata.get("singleton_local_shards", False)
        num_experts = self.groups.ep.size() * self.num_gemms
        shards: dict[str, Any] = {}
        for i in range(self.num_gemms):
            expert = self.groups.ep.rank() * self.num_gemms + i
            axis = (len(sharded_offsets), expert, num_experts)
            kinds = KINDS if self.has_bias else KINDS[:1]
            sub = make_sharded_tensors_for_checkpoint(
                {f"{i}.{kind}": getattr(self, f"{kind}{i}") for kind in kinds},
                "",
                {f"{i}.weight": self.tp_axis},
                sharded_offsets if single else (*sharded_offsets, axis),
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(sub, f"{i}.", f"{expert}.{prefix}" if single else prefix)
            for kind in kinds:
                shard = shards[f"{prefix}{kind}{i}"] = sub[f"{i}.{kind}"]
                shard.replica_id = (*shard.replica_id[:2], self.groups.expt_dp.rank())
        return shards


class ColumnParallelGroupedLinear(_GroupedLinear):
    tp_axis = 0


class RowParallelGroupedLinear(_GroupedLinear):
    tp_axis = 1
