"""Has SGLang keep routed experts in INT4 as files and weight syncs have them.

    file, sync    up_proj.weight_packed  int32 [N, K / 8]     up_proj.weight_scale  [N, K / 32]
    SGLang        experts.w13_weight_packed  int32 [E, K / 8, 2 N] while it loads;
                                             uint8 [E, 2 N, K / 2] afterwards
    here          experts.w13_weight_packed  int32 [E, 2 N, K / 8] always, with the same bytes

SGLang's loaders can then place slices at any time, and a sync's bytes are those that its kernel
reads. The kernel is that of its Triton runner; the others have words in an order of their own.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from mcore_rl.weights.hf.int4 import GROUP, PER_WORD

RUNNER_ARGUMENTS = ("--moe-runner-backend", "triton")
"""SGLang's arguments for the kernel that reads such experts."""
_SCHEMES = "sglang.srt.layers.quantization.compressed_tensors.compressed_tensors"


def keep_words_in_order() -> None:
    """Change how SGLang's schedulers hold INT4 experts, in this process, which is to be one's."""
    schemes: Any = import_module(_SCHEMES)
    set_attributes: Any = import_module("sglang.srt.utils").set_weight_attrs
    base = schemes.CompressedTensorsWNA16TritonMoE

    # SGLang's loaders transpose what goes into layers whose scheme has the name of the base class.
    class PackedExperts(base):
        def create_weights(
            self,
            layer: Any,
            num_experts: int,
            hidden_size: int,
            intermediate_size_per_partition: int,
            params_dtype: torch.dtype,
            **attributes: Any,
        ) -> None:
            attributes["quant_method"] = self.strategy
            sizes = find_sizes(hidden_size, intermediate_size_per_partition)
            for name, (rows, columns) in sizes.items():
                words = torch.empty(num_experts, rows, columns // PER_WORD, dtype=torch.int32)
                scales = torch.empty(num_experts, rows, columns // GROUP, dtype=params_dtype)
                for suffix, tensor in (("weight_packed", words), ("weight_scale", scales)):
                    parameter = torch.nn.Parameter(tensor, requires_grad=False)
                    layer.register_parameter(f"{name}_{suffix}", parameter)
                    set_attributes(parameter, attributes)

        def process_weights_after_loading(self, layer: Any) -> None:
            """Leave the weights as they are."""

        def restore_weights_before_loading(self, layer: Any) -> None:
            """Leave them here, too."""

        def get_triton_quant_info(self, layer: Any) -> Any:
            runner: Any = import_module("sglang.srt.layers.moe.moe_runner.triton")
            return runner.TritonMoeQuantInfo(
                w13_weight=layer.w13_weight_packed.view(torch.uint8),
                w2_weight=layer.w2_weight_packed.view(torch.uint8),
                use_int4_w4a16=True,
                w13_scale=layer.w13_weight_scale,
                w2_scale=layer.w2_weight_scale,
                block_shape=[0, GROUP],
            )

    schemes.CompressedTensorsWNA16TritonMoE = PackedExperts


def find_sizes(hidden_size: int, intermediate_size: int) -> Mapping[str, tuple[int, int]]:
    """Return rows and columns of an expert's matrices on a rank, by SGLang's names.

    Raises ValueError if a matrix does not consist of whole groups.
    """
    sizes = {"w13": (2 * intermediate_size, hidden_size), "w2": (hidden_size, intermediate_size)}
    for name, (_, columns) in sizes.items():
        if columns % GROUP:
            raise ValueError(
                f"{name} of an expert has {columns} columns on a rank, and INT4 groups have"
                f" {GROUP}: choose a smaller rollout.tp, or a larger rollout.ep"
            )
    return sizes
