"""The recorded SGLang layouts against SGLang's own models and loaders, rank by rank in one process.

SGLang builds a model for any rank before there are process groups, so no rank needs a process of
its own. The argument is a JSON list of cases {"hf_dir": ..., "dtype": ..., "loader": "cpu" or
"gpu", "sizes": {"tp": 2, ...}}. "gpu" takes the branch of SGLang's linear layers that pads weights
on GPUs. The last line of output is JSON.
"""

# pyright: reportMissingImports=false

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_rl.device.sglang_setup import use_cpu
from mcore_rl.rollout.mamba_decay import keep_logarithms
from mcore_rl.rollout.packed_experts import RUNNER_ARGUMENTS
from mcore_rl.rollout.server import use_our_classes
from mcore_rl.weight_sync.draft_model import list_loaded_parameters
from mcore_rl.weight_sync.receiver import keep_on_calling_thread
from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.hf.int4 import is_int4
from mcore_rl.weights.layouts.engine_trace import trace_load_weights
from mcore_rl.weights.layouts.layout import check_rank
from mcore_rl.weights.layouts.sglang import SGLangLayout
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from mcore_rl.weights.models import family_of, hf_tensor_shapes


@dataclass(frozen=True)
class ProcessGroupStub:
    """The part of a process group that a model reads while it is built."""

    rank_in_group: int
    world_size: int
    cpu_group: None = None

    @property
    def device_group(self) -> "ProcessGroupStub":
        return self

    def rank(self) -> int:
        return self.rank_in_group

    def size(self) -> int:
        return self.world_size

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1


def main(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of ranks checked and the errors found."""
    for case in cases:
        use_our_classes(["--model-path", case["hf_dir"]])
    use_cpu([])
    keep_logarithms()
    from sglang.srt.layers import linear
    from sglang.srt.layers.moe.fused_moe_triton import layer as moe_layer

    # DeepEP's sends tokens between GPUs; it holds no weights.
    moe_layer.create_moe_dispatcher = lambda *_, **__: None
    errors, num_ranks = [], 0
    for case in cases:
        sizes, dtype = SGLangSizes(**case["sizes"]), case["dtype"]
        torch.set_default_dtype(getattr(torch, dtype))
        linear._is_cpu = case["loader"] == "cpu"
        build_indexers(on_gpus=not linear._is_cpu)
        hf_config = read_hf_config(case["hf_dir"])
        layout = SGLangLayout(family_of(hf_config), hf_config, sizes, dtype)
        for rank in range(sizes.engine_ranks):
            num_ranks += 1
            try:
                check_rank(layout, rank, trace_rank(case["hf_dir"], dtype, hf_config, sizes, rank))
            except ValueError as error:
                errors.append(f"{case}: {error}")
    return {"num_ranks": num_ranks, "errors": errors}


def build_indexers(*, on_gpus: bool) -> None:
    """Have SGLang build indexers as on GPUs, where those of GLM-5 hold two projections as one."""
    from sglang.srt.layers.attention.dsa import dsa_indexer

    dsa_indexer._is_cuda = on_gpus
    dsa_indexer.resolve_num_sms = lambda: 1  # which it asks CUDA, and needs to compute alone
    in_own_dtype = _INDEXERS.setdefault("build", dsa_indexer.Indexer.__init__)
    dsa_indexer.Indexer.__init__ = in_own_dtype.__wrapped__ if on_gpus else in_own_dtype


_INDEXERS: dict[str, Any] = {}
"""How engines without CUDA build them."""


def trace_rank(hf_dir: str, dtype: str, hf_config: Any, sizes: SGLangSizes, rank: int) -> Any:
    """Return what this engine rank's loader puts into its parameters."""
    with engine_model(hf_dir, dtype, sizes, rank) as model:
        dtypes = family_of(hf_config).dtypes(hf_config, dtype)
        shapes = {
            name: (shape, getattr(torch, dtypes[name]))
            for name, shape in hf_tensor_shapes(hf_config).items()
        }
        return trace_load_weights(
            keep_on_calling_thread(model.load_weights), shapes, list_loaded_parameters(model)
        ).shards


def list_arguments(hf_dir: str, dtype: str, sizes: SGLangSizes) -> list[str]:
    """SGLang's arguments for an engine of the model."""
    options = {
        "--model-path": hf_dir,
        "--dtype": dtype,
        "--tp-size": sizes.tp,
        "--ep-size": sizes.ep,
    }
    options |= {"--pp-size": sizes.pp, "--attn-dp-size": sizes.dp}
    arguments = [str(part) for item in options.items() for part in item]
    if sizes.head_by_dp:
        arguments.append("--enable-dp-lm-head")
    if sizes.whole_tower:
        arguments.append("--mm-enable-dp-encoder")
    if sizes.whole_dense_layers:
        arguments += ["--moe-dense-tp-size", "1"]
    if sizes.whole_shared_experts:
        arguments += ["--moe-a2a-backend", "deepep"]
    if is_int4(json.loads((Path(hf_dir) / "config.json").read_text())):
        arguments += RUNNER_ARGUMENTS
    return arguments


@contextmanager
def engine_model(hf_dir: str, dtype: str, sizes: SGLangSizes, rank: int) -> Iterator[Any]:
    """Build SGLang's model of this engine rank, quantized as config.json says, without weights."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_tp_num_heads_if_necessary
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.runtime_context import (
        SpawnRanks,
        get_flags,
        get_parallel,
        publish,
        reset_context,
    )
    from sglang.srt.server_args import prepare_server_args

    arguments = list_arguments(hf_dir, dtype, sizes)
    server_args = prepare_server_args([*use_cpu(arguments), "--skip-tokenizer-init"])
    reset_context()
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=rank))
    initialize_moe_config()
    parallel = get_parallel()
    names = ("pp", "tp", "attn_tp", "moe_ep", "moe_tp")
    groups = {
        f"{name}_group": ProcessGroupStub(
            getattr(parallel, f"{name}_rank"), getattr(parallel, f"{name}_size")
        )
        for name in names
    }
    with parallel.override(**groups), get_flags().dp.override(enabled=sizes.dp > 1):
        model_config, load_config = ModelConfig.from_server_args(server_args), LoadConfig()
        adjust_tp_num_heads_if_necessary(model_config.hf_text_config, parallel.attn_tp_size, True)
        quantization = _get_quantization_config(model_config, load_config)
        yield _initialize_model(model_config, load_config, quantization)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
