"""Torch work-alikes of Transformer Engine's Adam and modules in megatron-core's TE layer spec.

Module tree, parameter names and distributed-checkpoint keys equal those of a GPU with Transformer
Engine, so the model, its checkpoints and the table to HF names need no CPU variant. Adam keeps its
state as Transformer Engine does, and updates in place.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.parallel_state import get_context_parallel_group, get_tensor_model_parallel_group
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, SequentialMLP, TEGroupedMLP
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from mcore_rl.cpu.kernels import usable
from mcore_rl.cpu.kernels.attention import causal_attention, takes_attention
from mcore_rl.cpu.kernels.layers import RmsNorm, rms_norm, zero_centered_norm
from mcore_rl.cpu.kernels.matmul import grouped_linear
from mcore_rl.device.attention import (
    BOTTOM_RIGHT,
    AttentionSpec,
    TorchFlash,
    attend_bottom_right,
    attend_context_parallel,
    attend_packed,
    fits_flash,
    flash_attention,
)

KINDS = ("weight", "bias")
MOMENTS = ("exp_avg", "exp_avg_sq")


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


class _ZeroCenteredNorm(RmsNorm):
    """RMSNorm times 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        return zero_centered_norm(x, self.weight, self.eps or 0.0)


class Norm:
    """TENorm: a torch norm whose parameters are marked for sequence parallelism."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
        kind: Any = {"RMSNorm": RmsNorm, "LayerNorm": torch.nn.LayerNorm}[config.normalization]
        if config.layernorm_zero_centered_gamma:
            assert kind is RmsNorm, "only RMSNorm is multiplied with 1 + weight"
            kind = _ZeroCenteredNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for p in norm.parameters():
            p.sequence_parallel = config.sequence_parallel
        return norm


class DotProductAttention(MegatronModule):
    """TEDotProductAttention for packed (THD) causal sequences.

    Supports grouped queries, sliding windows, sinks and context parallelism. On CUDA, half
    precision takes torch's flash attention where context is not cut.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        assert not config.attention_dropout, "attention dropout is not supported on CPU"
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.cp_group = getattr(pg_collection, "cp", None) or get_context_parallel_group()
        self.tp_group = getattr(pg_collection, "tp", None) or get_tensor_model_parallel_group()
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window = config.window_size[0] if windowed else None
        self.softmax_offset: Any = None
        if config.softmax_type == "learnable":
            num_heads = config.num_attention_heads // self.tp_group.size()
            self.softmax_offset = torch.nn.Parameter(
                torch.zeros(num_heads, dtype=config.params_dtype)
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query, key, value [T, h, d] of this context-parallel rank -> [T, h * d].

        With the mask type BOTTOM_RIGHT, sequences may have more keys than queries.
        """
        assert packed_seq_params is not None and packed_seq_params.qkv_format == "thd", (
            "only packed sequences"
        )
        assert attention_bias is None and attention_mask is None
        if self.cp_group.size() == 1 and fits_flash(query, value):
            kernel = TorchFlash.from_params(packed_seq_params, self.softmax_scale, self.window)
            return flash_attention(query, key, value, self.softmax_offset, kernel).flatten(1)
        lens_N = tuple(packed_seq_params.cu_seqlens_q.diff().tolist())
        spec = AttentionSpec(self.softmax_scale, self.window, self.softmax_offset)
        key_lens_N = lens_N
        if attn_mask_type is BOTTOM_RIGHT:
            key_lens_N = tuple(packed_seq_params.cu_seqlens_kv.diff().tolist())
        is_whole = self.cp_group.size() == 1
        if is_whole and spec.is_plain and takes_attention(query, key, value):
            return causal_attention(query, key, value, lens_N, spec.scale, key_lens_N)
        if attn_mask_type is BOTTOM_RIGHT:
            return attend_bottom_right(query, key, value, lens_N, key_lens_N, spec)
        if is_whole:
            return attend_packed(query, key, value, lens_N, spec)
        key = gather_from_sequence_parallel_region(key.contiguous(), group=self.cp_group)
        value = gather_from_sequence_parallel_region(value.contiguous(), group=self.cp_group)
        rank, size = self.cp_group.rank(), self.cp_group.size()
        return attend_context_parallel(query, key, value, lens_N, spec, rank, size)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the heads' sinks, if any, sharded over the tensor-parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            dict(self.named_parameters()),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """TELayerNormColumnParallelLinear: norm of the (sequence-sharded) input, then the linear."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = self._norm_parameter(
            torch.ones(input_size, dtype=config.params_dtype)
        )
        if config.normalization == "LayerNorm":
            self.layer_norm_bias = self._norm_parameter(
                torch.zeros(input_size, dtype=config.params_dtype)
            )

    def _norm_parameter(self, value: Tensor) -> torch.nn.Parameter:
        parameter: Any = torch.nn.Parameter(value)
        parameter.sequence_parallel = self.config.sequence_parallel
        return parameter

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        weight = self.layer_norm_weight
        eps = self.config.layernorm_epsilon
        if self.config.normalization == "LayerNorm":
            normed = F.layer_norm(input_, weight.shape, weight, self.layer_norm_bias, eps)
        elif self.config.layernorm_zero_centered_gamma:
            normed = zero_centered_norm(input_, weight, eps)
        else:
            normed = rms_norm(input_, weight, eps)
        return super().forward(normed, *args, **kwargs)


class DuplicatedLinear(Linear):
    """TELinear: of weights that every tensor-parallel rank has, one rank's are saved.

    megatron-core's `Linear` knows no group of them if it is told that they are duplicated, and all
    ranks would save theirs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.tp_group is None:
            self.tp_group = get_tensor_model_parallel_group()


class SpecProvider(BackendSpecProvider):
    """Megatron's TESpecProvider, answering with the torch modules of this file."""

    def linear(self) -> type:
        return DuplicatedLinear

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return LayerNormColumnParallelLinear

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> Any:
        return Norm

    def core_attention(self) -> type:
        return DotProductAttention

    def activation_func(self) -> Any:
        return None

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        if moe_use_grouped_gemm:
            return partial(
                TEGroupedMLP,
                submodules=GroupedMLPSubmodules(
                    linear_fc1=ColumnParallelGroupedLinear, linear_fc2=RowParallelGroupedLinear
                ),
            )
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        return partial(SequentialMLP, submodules=linears)


class FusedAdam(torch.optim.Optimizer):
    """Transformer Engine's FusedAdam, same interface and state layout, on torch's fused kernel.

    The state holds exp_avg and exp_avg_sq per parameter; 'step' is kept in the parameter group.
    torch.optim.AdamW keeps 'step' per parameter, and megatron-core cannot load a checkpoint of its
    distributed optimizer that was written with that layout.

    The last five arguments are those of megatron-core's precision-aware optimizer. Moments of
    another precision are computed with in float32 and then rounded, as Transformer Engine does.

    master_weights        keep a float32 main weight of each parameter in its state
    use_decoupled_grad    read gradients from `decoupled_grad`, which may have another dtype
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
    ) -> None:
        if not bias_correction:
            raise ValueError("bias_correction=False: torch's fused Adam always corrects the bias")
        if capturable:
            raise ValueError("capturable=True: there is no CUDA graph without CUDA")
        if store_param_remainders or master_weight_dtype != torch.float32:
            raise ValueError("main weights are whole, in float32; there is nothing else here")
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self._kernel: Callable[..., None] = getattr(
            torch, "_fused_adamw_" if adam_w_mode else "_fused_adam_"
        )
        self.exp_avg_dtype = exp_avg_dtype
        self.exp_avg_sq_dtype = exp_avg_sq_dtype
        self._master_weights = master_weights
        self._gradient = "decoupled_grad" if use_decoupled_grad else "grad"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if getattr(p, self._gradient, None) is not None]
            for p in params:
                if not self.state[p]:
                    self.initialize_state(p, False)
            if params:
                self._update(params, group)

    @torch.no_grad()
    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        """Make a parameter's moments, zero, and its main weight, which is always whole."""
        state = self.state[param]
        for name, dtype in self._dtypes.items():
            moment_dtype = dtype if self._is_precision_aware else param.dtype
            state[name] = torch.zeros_like(param, dtype=moment_dtype)
        if self._master_weights:
            state["master_param"] = param.detach().clone().float()

    def get_unscaled_state(self, param: Tensor, name: str) -> Tensor:
        """Return a moment or the main weight in float32."""
        return self.state[param][name].float()

    def set_scaled_state(self, param: Tensor, name: str, value: Tensor) -> None:
        """Set a moment or the main weight from float32 values."""
        if not self.state[param]:
            self.initialize_state(param, False)
        self.state[param][name].copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as every optimizer does, but keep the dtypes of the state, not the parameters'.

        As with Transformer Engine, the state lies in new memory afterwards.
        """
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        for number, state in state_dict["state"].items():
            for name, value in state.items():
                self.state[params[number]][name] = value.to(params[number].device, copy=True)

    @property
    def _dtypes(self) -> dict[str, torch.dtype]:
        return {"exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}

    @property
    def _is_precision_aware(self) -> bool:
        return self._master_weights or set(self._dtypes.values()) != {torch.float32}

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        step = torch.tensor(float(group["step"]), device=params[0].device)
        states = [self.state[p] for p in params]
        mains = [
            s["master_param"] if self._master_weights else p
            for p, s in zip(params, states, strict=True)
        ]
        moments = {
            name: [s[name].to(m.dtype) for s, m in zip(states, mains, strict=True)]
            for name in MOMENTS
        }
        self._kernel(
            mains,
            [getattr(p, self._gradient).to(m.dtype) for p, m in zip(params, mains, strict=True)],
            moments["exp_avg"],
            moments["exp_avg_sq"],
            [],
            [step] * len(params),
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
        for i, (param, state) in enumerate(zip(params, states, strict=True)):
            for name in MOMENTS:
                state[name].copy_(moments[name][i])
            if self._master_weights:
                param.copy_(mains[i])
