"""DeepSeek's sparse attention in torch: an indexer chooses the keys that each token attends to.

    hidden states -> wk, norm, rotation --> index key of each token, kept beside the latent KV cache
    queries' latents -> wq_b, rotation ---> index queries of a token, one per index head
                                             |
    scores of the token's own and all earlier keys -> the `index_topk` highest -> attention

SGLang keeps index keys in FP8, after a Hadamard transform that spreads their outliers. Here they
have the dtype of the model; without FP8 the transform, which is orthogonal, changes no score.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from sglang_on_cpu.attention import Group, share_groups


def leave_sparse_defaults_out() -> None:
    """Take a model with sparse attention for one without while options get their defaults.

    SGLang asks CUDA for its version there, to choose pages, the dtype of the KV cache and kernels.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.configs import model_config

    @register_resolution_hook("handle_model_specific_adjustments")
    def adjust_as_dense(server_args: Any, adjust: Callable[[Any], None]) -> None:
        model_config_of(server_args)  # which SGLang keeps, and makes of what the model is
        is_sparse = model_config.is_deepseek_dsa
        model_config.is_deepseek_dsa = lambda config: False
        try:
            adjust(server_args)
        finally:
            model_config.is_deepseek_dsa = is_sparse


def keep_index_keys() -> None:
    """Keep index keys in the dtype of the KV cache, a row for each of its slots.

    SGLang's pool has pages of 64 keys of 128 values in FP8.
    """
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    class IndexKeyPool(MLATokenToKVPool):
        def __init__(
            self,
            size: int,
            *,
            page_size: int,
            dtype: torch.dtype,
            layer_num: int,
            index_head_dim: int,
            skip_topk_layers: list[bool] | None = None,
            **options: Any,
        ) -> None:
            shared = skip_topk_layers or [False] * layer_num
            for name in _OPTIONS_OF_FP8:
                options.pop(name, None)
            super().__init__(size, page_size=page_size, dtype=dtype, layer_num=layer_num, **options)
            num_slots = size + page_size
            self.index_keys = [
                torch.zeros(0 if is_shared else num_slots, index_head_dim, dtype=dtype)
                for is_shared in shared
            ]

        def index_keys_of(self, layer_id: int) -> Tensor:
            """Return the index keys of a layer, [slots, index_head_dim]."""
            return self.index_keys[layer_id - self.start_layer]

    resolve = KVCacheConfigurator._resolve_kv_pool_class

    def resolve_kv_pool_class(self: Any, *, kind: str, default: type) -> type:
        if kind == "dsa":
            return IndexKeyPool
        return resolve(self, kind=kind, default=default)

    KVCacheConfigurator._resolve_kv_pool_class = resolve_kv_pool_class


_OPTIONS_OF_FP8 = (
    *("kv_cache_dim", "index_kpool", "index_kpool_compress", "tail_extra_slots"),
    "max_running_requests",
)
"""Options that SGLang's pool of a sparse model takes and its pool of a dense one does not."""


def choose_keys() -> None:
    """Choose keys in torch, and hold the weights of index heads in the model's dtype.

    SGLang's indexer runs on accelerators only. It holds these weights in bfloat16 always.
    """
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool
    from sglang.srt.state_capturer.indexer_topk import maybe_capture_indexer_topk

    build = Indexer.__init__

    @wraps(build)
    def build_in_own_dtype(self: Any, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        weight = self.weights_proj.weight
        weight.data = weight.data.to(torch.get_default_dtype())

    def choose(
        self: Any,
        x: Tensor,
        q_lora: Tensor,
        positions: Tensor,
        forward_batch: Any,
        layer_id: int,
        return_indices: bool = True,
    ) -> Tensor:
        queries, keys = project(self, x, q_lora, positions)
        keys_of_slots = get_token_to_kv_pool().index_keys_of(layer_id)
        slots_T = forward_batch.out_cache_loc
        keys_of_slots[slots_T] = keys[: len(slots_T)].to(keys_of_slots.dtype)
        weights = self.weights_proj(x)[0].float() * self.n_heads**-0.5
        chosen_TK = torch.full((len(x), self.index_topk), -1, dtype=torch.int32)
        if not forward_batch.forward_mode.is_idle():
            for group in share_groups(get_attn_backend(), forward_batch):
                scores_BQK = score(group, queries, keys_of_slots, weights, self.softmax_scale)
                write_highest(group, scores_BQK, chosen_TK)
        return maybe_capture_indexer_topk(layer_id, chosen_TK)

    Indexer.__init__ = build_in_own_dtype
    Indexer.forward_native = choose


def project(indexer: Any, x: Tensor, q_lora: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rotated index queries [T, heads, D] and index keys [T, D] of a batch."""
    rotated = indexer.rope_head_dim
    queries = indexer.wq_b(q_lora)[0].view(-1, indexer.n_heads, indexer.head_dim)
    keys = indexer.k_norm(indexer.wk(x)[0])[:, None]
    parts = [x[..., :rotated].contiguous() for x in (queries, keys)]
    turned = indexer.rotary_emb(positions, *parts)  # yarn by halves puts an axis before
    queries, keys = (
        torch.cat([part.view(*x.shape[:2], rotated), x[..., rotated:]], -1)
        for part, x in zip(turned, (queries, keys), strict=True)
    )
    return queries, keys[:, 0]


def score(
    group: Group, queries: Tensor, keys_of_slots: Tensor, weights: Tensor, scale: float
) -> Tensor:
    """Return the scores of a group's keys, float32 [B, Q, K]; -inf where a query sees no key.

    A score is the sum over index heads of weight * relu(scale * query . key): arXiv:2512.02556,
    equation 1. A head at a time, as all heads' products would take too much memory.
    """
    keys_BDK = keys_of_slots[group.key_slots_BK].float().mT
    scores_BQK = torch.zeros(group.distance_BQK.shape)
    for head in range(queries.shape[1]):
        products_BQK = queries[group.query_rows_BQ, head].float() @ keys_BDK
        weight_BQ1 = weights[group.query_rows_BQ, head, None]
        scores_BQK += weight_BQ1 * products_BQK.mul_(scale).relu_()
    return scores_BQK.masked_fill_(group.distance_BQK < 0, -torch.inf)


def write_highest(group: Group, scores_BQK: Tensor, chosen_TK: Tensor) -> None:
    """Write the positions of each query's highest scores to its row of `chosen_TK`, then -1."""
    num_chosen = min(chosen_TK.shape[1], scores_BQK.shape[2])
    highest, positions = scores_BQK.topk(num_chosen, -1)
    positions = positions.masked_fill(highest == -torch.inf, -1).to(chosen_TK.dtype)
    valid_BQ = group.valid_BQ
    chosen_TK[group.query_rows_BQ[valid_BQ], :num_chosen] = positions[valid_BQ]


def report_chosen_keys() -> None:
    """Let --enable-return-indexer-topk work, which SGLang disables without CUDA."""
    from sglang.srt.model_executor import model_runner
    from sglang.srt.state_capturer import indexer_topk

    def create(*, model_config: Any, **sizes: Any) -> Any:
        config = model_config.hf_text_config
        return indexer_topk._create_indexer_capturer_raw(
            enable=indexer_topk.get_exec().features.enable_return_indexer_topk,
            num_indexer_layers=indexer_topk.get_num_indexer_layers(config),
            index_topk=getattr(config, "index_topk", 0),
            **sizes,
        )

    model_runner.create_indexer_capturer = indexer_topk.create_indexer_capturer = create
