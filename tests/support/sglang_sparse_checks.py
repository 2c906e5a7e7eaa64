"""Checks of the patches for SGLang's sparse attention; see sglang_on_cpu_checks.py."""

# pyright: reportMissingImports=false

import inspect
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from tests.support.sglang_attention_checks import attention_inputs
from tests.support.upstream import assert_defect, fails_without

MODEL = "recipes/model/deepseek_v32"
TOP_K = 5


def check_leave_sparse_defaults_out() -> None:
    from sglang.srt.arg_groups.model_override_base import resolved_view
    from sglang.srt.configs.model_config import is_deepseek_dsa
    from sglang.srt.server_args import prepare_server_args
    from sglang_on_cpu.sparse_attention import leave_sparse_defaults_out

    arguments = ["--model-path", MODEL, "--device", "cpu", "--attention-backend", "torch_native"]
    arguments += ["--skip-tokenizer-init", "--disable-overlap-schedule"]
    with fails_without("leave_sparse_defaults_out", AssertionError):
        prepare_server_args(arguments).resolve_once()
    leave_sparse_defaults_out()
    made = prepare_server_args(arguments)
    made.resolve_once()
    settings = resolved_view(made)
    assert (settings.page_size, settings.attention_backend) == (1, "torch_native")
    assert settings.kv_cache_dtype == "auto"
    assert is_deepseek_dsa({"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 4})


def check_keep_index_keys() -> None:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MLATokenToKVPool
    from sglang_on_cpu.sparse_attention import keep_index_keys

    source = inspect.getsource(DSATokenToKVPool.__init__)
    assert_defect("keep_index_keys", "assert index_head_dim == 128" in source)
    keep_index_keys()
    configurator = object.__new__(KVCacheConfigurator)
    resolve = configurator._resolve_kv_pool_class
    assert resolve(kind="mla", default=MLATokenToKVPool) is MLATokenToKVPool
    pool = resolve(kind="dsa", default=DSATokenToKVPool)(
        10,
        page_size=1,
        dtype=torch.float32,
        kv_lora_rank=6,
        qk_rope_head_dim=2,
        layer_num=3,
        device="cpu",
        kv_cache_dim=8,
        enable_memory_saver=False,
        start_layer=4,
        end_layer=7,
        index_head_dim=5,
        skip_topk_layers=[False, True, False],
        max_running_requests=2,
    )
    assert [len(pool.index_keys_of(layer)) for layer in (4, 5, 6)] == [11, 0, 11]
    assert pool.index_keys_of(6).shape[1] == 5 and pool.index_keys_of(6).dtype == torch.float32
    assert pool.get_key_buffer(4).shape[-1] == 8


def check_choose_keys() -> None:
    """The chosen keys are those with the highest scores, computed query by query."""
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang_on_cpu.attention import make_groups
    from sglang_on_cpu.sparse_attention import choose_keys, score, write_highest

    with fails_without("choose_keys", NotImplementedError):
        Indexer.forward_native(object.__new__(Indexer))
    choose_keys()
    _, _, req_to_token, requests, prefix, extend = attention_inputs(torch.float32, seed=4)
    lens = (prefix + extend).tolist()
    num_tokens, heads = int(extend.sum()), 16
    queries, weights = torch.randn(num_tokens, heads, 8), torch.randn(num_tokens, heads)
    keys_of_slots = torch.randn(400, 8)
    chosen_TK = torch.full((num_tokens, TOP_K), -1, dtype=torch.int32)
    for group in make_groups(extend.tolist(), lens, req_to_token, requests):
        scores_BQK = score(group, queries, keys_of_slots, weights, 0.3)
        write_highest(group, scores_BQK, chosen_TK)
    row = 0
    for request, first, num_queries in zip(requests, prefix.tolist(), extend.tolist(), strict=True):
        for position in range(first, first + num_queries):
            keys = keys_of_slots[req_to_token[request, : position + 1].long()]
            scores_K = ((queries[row] @ keys.T * 0.3).relu() * weights[row, :, None]).sum(0)
            wanted = scores_K.topk(min(TOP_K, position + 1)).indices.sort().values
            got = chosen_TK[row][chosen_TK[row] >= 0].sort().values
            assert torch.equal(got, wanted.int()), (row, got, wanted)
            row += 1
    assert row == num_tokens


def check_rotation_of_index_queries_and_keys() -> None:
    """Only the first part of a head turns, by halves or by neighbors as the embedding says."""
    from sglang_on_cpu.sparse_attention import project

    torch.manual_seed(0)
    heads, head, rotated, num_tokens = 3, 6, 4, 5
    linear = [nn.Linear(7, size, bias=False) for size in (heads * head, head)]

    def turn(positions: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        assert queries.shape == (num_tokens, heads, rotated)
        assert keys.shape == (num_tokens, 1, rotated)
        return queries[None] + positions[:, None, None], keys[None] + positions[:, None, None]

    indexer = SimpleNamespace(
        rope_head_dim=rotated,
        n_heads=heads,
        head_dim=head,
        wq_b=lambda x: (linear[0](x), None),
        wk=lambda x: (linear[1](x), None),
        k_norm=nn.LayerNorm(head),
        rotary_emb=turn,
    )
    x, q_lora = torch.randn(num_tokens, 7), torch.randn(num_tokens, 7)
    positions = torch.arange(num_tokens)
    queries, keys = project(indexer, x, q_lora, positions)
    plain_queries = linear[0](q_lora).view(num_tokens, heads, head)
    plain_keys = indexer.k_norm(linear[1](x))
    moved = positions[:, None]
    assert torch.equal(queries[..., rotated:], plain_queries[..., rotated:])
    assert torch.equal(queries[..., :rotated], plain_queries[..., :rotated] + moved[..., None])
    assert torch.equal(keys[:, rotated:], plain_keys[:, rotated:])
    assert torch.equal(keys[:, :rotated], plain_keys[:, :rotated] + moved)


def check_attention_to_chosen_keys() -> None:
    """A token sees the keys at the chosen positions alone, in requests of unlike lengths."""
    from sglang_on_cpu.attention import attend, make_groups

    query, caches, req_to_token, requests, prefix, extend = attention_inputs(torch.float32, seed=5)
    lens = (prefix + extend).tolist()
    positions = torch.cat(
        [torch.arange(p, p + e) for p, e in zip(prefix.tolist(), extend.tolist(), strict=True)]
    )
    chosen_TK = (torch.rand(len(query), TOP_K) * (positions[:, None] + 1)).int()
    chosen_TK[:, 2] = -1
    output = torch.full_like(query, torch.nan)
    for group in make_groups(extend.tolist(), lens, req_to_token, requests):
        attend(group, query, output, *caches, 0.25, chosen_TK=chosen_TK)
    owner = requests.repeat_interleave(extend)
    for row in range(len(query)):
        own = chosen_TK[row].unique()
        slots = req_to_token[owner[row], own[own >= 0].long()].long()
        keys, values = (cache[slots].repeat_interleave(2, 1) for cache in caches)
        weights_hK = (torch.einsum("hd,khd->hk", query[row], keys) * 0.25).softmax(-1)
        expected = torch.einsum("hk,khd->hd", weights_hK, values)
        torch.testing.assert_close(output[row], expected)


def check_report_chosen_keys() -> None:
    from sglang.srt.model_executor import model_runner
    from sglang.srt.state_capturer import indexer_topk
    from sglang_on_cpu.sparse_attention import report_chosen_keys

    source = inspect.getsource(model_runner.create_indexer_capturer)
    assert_defect("report_chosen_keys", 'device != "cuda" and device != "npu"' in source)
    report_chosen_keys()
    assert model_runner.create_indexer_capturer is indexer_topk.create_indexer_capturer
    get_exec, create_raw = indexer_topk.get_exec, indexer_topk._create_indexer_capturer_raw
    features = SimpleNamespace(enable_return_indexer_topk=True)
    config = SimpleNamespace(
        architectures=["DeepseekV32ForCausalLM"], index_topk=4, num_hidden_layers=3
    )
    try:
        indexer_topk.get_exec = lambda: SimpleNamespace(features=features)
        indexer_topk._create_indexer_capturer_raw = lambda **sizes: sizes
        sizes = model_runner.create_indexer_capturer(
            model_config=SimpleNamespace(hf_text_config=config),
            num_tokens=7,
            max_running_requests=2,
            device="cpu",
        )
    finally:
        indexer_topk.get_exec, indexer_topk._create_indexer_capturer_raw = get_exec, create_raw
    wanted = {"enable": True, "num_indexer_layers": 3, "index_topk": 4, "num_tokens": 7}
    assert sizes == wanted | {"max_running_requests": 2, "device": "cpu"}
