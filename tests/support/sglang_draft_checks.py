"""Checks of what speculation with drafts needs on a CPU; see sglang_on_cpu_checks.py."""

# pyright: reportMissingImports=false

import inspect
from importlib import import_module
from types import SimpleNamespace

import torch

from tests.support.chi_square import chi_square
from tests.support.upstream import assert_defect, fails_without

PARENTS = [-1, 0, 0, 1, 1, 3]
"""A tree of six nodes:  0 -> 1, 2    1 -> 3, 4    3 -> 5"""
FIRST_CHILD = [1, 3, -1, 5, -1, -1]
NEXT_SIBLING = [-1, 2, -1, 4, -1, -1]
TOKENS = [3, 0, 1, 2, 0, 1]
"""The tokens of its nodes, of five that there are."""


def tree_mask():
    mask_NN = torch.eye(len(PARENTS), dtype=torch.bool)
    for node, parent in enumerate(PARENTS[1:], 1):
        mask_NN[node] |= mask_NN[parent]
    return mask_NN


def tree_links(num_trees):
    """Return candidates, indices, first children and siblings of equal trees."""
    rows = torch.arange(num_trees * len(PARENTS)).view(num_trees, -1)
    lists = (TOKENS, FIRST_CHILD, NEXT_SIBLING)
    candidates, next_token, next_sibling = (torch.tensor(x).repeat(num_trees, 1) for x in lists)
    return candidates, rows, next_token, next_sibling


def make_results(num_trees):
    nodes = num_trees * len(PARENTS)
    accept_index = torch.full((num_trees, len(PARENTS)), -1, dtype=torch.int32)
    return torch.zeros(nodes, dtype=torch.int32), accept_index, torch.zeros(num_trees).int()


def check_links_of_a_mask():
    from sglang.kernels.ops.speculative import reconstruct_tree

    starts = torch.tensor([7, 0])
    results = [torch.zeros(2, 6, dtype=torch.int64) for _ in range(3)]
    positions = torch.zeros(12, dtype=torch.int64)
    mask = tree_mask().repeat(2, 1, 1).flatten()
    function = reconstruct_tree.reconstruct_indices_from_tree_mask_func
    function(mask, starts, positions, *results, 2, 6)
    assert positions.tolist() == [7, 8, 8, 9, 9, 10, 0, 1, 1, 2, 2, 3]
    assert results[0].flatten().tolist() == list(range(12))
    assert results[1].tolist() == [FIRST_CHILD] * 2
    assert results[2].tolist() == [NEXT_SIBLING] * 2


def check_links_of_choices():
    """Four drafts are kept of two behind the root and two behind each of these."""
    from sglang.kernels.ops.speculative import spec_tree

    # 0, 1: behind the root; 2, 3: behind choice 1; 4, 5: behind choice 0
    selected = torch.tensor([[0, 1, 2, 4]])
    parent_list = torch.tensor([[-1, 1, 0]])
    results = [torch.zeros(1, 5, dtype=torch.int64) for _ in range(3)]
    positions, mask = torch.zeros(5, dtype=torch.int64), torch.zeros(25, dtype=torch.bool)
    spec_tree.build_tree_kernel_efficient_func(
        *(parent_list, selected, torch.tensor([4]), mask, positions, *results),
        *(2, 3, 5, spec_tree.TreeMaskMode.QLEN_ONLY),
    )
    assert positions.tolist() == [4, 5, 5, 6, 6]
    assert results[1].tolist() == [[1, 4, 3, -1, -1]]
    assert results[2].tolist() == [[-1, 2, -1, -1, -1]]
    expected = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4]]
    assert [row.nonzero().flatten().tolist() for row in mask.view(5, 5)] == expected


def check_greedy_drafts():
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func

    links = tree_links(3)
    target = torch.tensor([[0, 2, 4, 1, 4, 3], [1, 4, 4, 4, 4, 4], [2, 4, 4, 4, 4, 4]])
    predicts, accept_index, num_accepted = make_results(3)
    verify_tree_greedy_func(predicts, accept_index, num_accepted, *links, target)
    assert num_accepted.tolist() == [3, 1, 0]
    rows = [row[row >= 0].tolist() for row in accept_index]
    assert rows == [[0, 1, 3, 5], [6, 8], [12]]
    assert [predicts[row].tolist() for row in rows] == [[0, 2, 1, 3], [1, 4], [2]]


def check_sample_drafts():
    """Tokens are drawn with the target's probabilities, whatever the drafts are."""
    from sglang.srt.speculative import eagle_utils
    from sglang_on_cpu.drafts import sample_drafts

    on_gpu = {"is_hip": False, "is_xpu": False, "use_rejection_sampling": False}
    greedy = eagle_utils._verify_uses_greedy
    assert_defect("sample_drafts", greedy(is_all_greedy=False, is_cpu=True, **on_gpu))
    sample_drafts()
    assert not eagle_utils._verify_uses_greedy(is_all_greedy=False, is_cpu=True, **on_gpu)
    assert eagle_utils._verify_uses_greedy(is_all_greedy=True, is_cpu=True, **on_gpu)

    torch.manual_seed(0)
    num_trees, vocab_size = 50_000, 5
    probs_NV = torch.softmax(torch.randn(len(PARENTS), vocab_size) / 2, -1)
    probs_NV[1, TOKENS[4]] = 0.0  # a draft that cannot be
    probs_NV[1] /= probs_NV[1].sum()
    predicts, accept_index, num_accepted = make_results(num_trees)
    eagle_utils.tree_speculative_sampling_target_only(
        *(predicts, accept_index, num_accepted, *tree_links(num_trees)),
        *(torch.rand(num_trees, len(PARENTS)), torch.rand(num_trees)),
        *(probs_NV.repeat(num_trees, 1, 1), torch.zeros(num_trees, len(PARENTS), vocab_size)),
    )
    reached = accept_index[accept_index >= 0].long()
    assert not (reached % len(PARENTS) == 4).any()
    for node in (0, 1, 2, 3, 5):
        drawn = predicts[reached[reached % len(PARENTS) == node]]
        counts = torch.bincount(drawn, minlength=vocab_size)
        assert counts.sum() > 100, (node, counts)
        p_value = chi_square(counts, probs_NV[node])
        assert p_value > 1e-3, (node, counts, p_value)


def check_draft_in_torch():
    """A step of a draft model sees one token more than the step before."""
    from sglang.srt.speculative import draft_utils
    from sglang_on_cpu.drafts import draft_in_torch

    defect = '"torch_native"' not in inspect.getsource(draft_utils)
    assert_defect("draft_in_torch", defect)
    draft_in_torch()
    table = torch.arange(40, dtype=torch.int32).view(2, 20)
    runner = SimpleNamespace(
        device="cpu",
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=None,
    )
    factory = object.__new__(draft_utils.DraftBackendFactory)
    factory.topk, factory.draft_model_runner = 1, runner
    factory.speculative_num_steps = 1
    assert factory.create_decode_backend() is None
    factory.speculative_num_steps = 3
    steps = factory.create_decode_backend()
    mode = SimpleNamespace(is_target_verify=lambda: False)
    seq_lens, requests = torch.tensor([5, 6]), torch.tensor([1, 0])
    steps.init_forward_metadata(
        SimpleNamespace(forward_mode=mode, seq_lens=seq_lens, req_pool_indices=requests)
    )
    for step, backend in enumerate(steps.attn_backends, 1):
        [group] = backend.attention_groups
        assert (group.distance_BQK >= 0).sum(-1).flatten().tolist() == [6 + step, 5 + step]
    assert len(steps.attn_backends) == 2


def check_share_without_cuda():
    from sglang.srt.models import deepseek_v2, hunyuan_v3_nextn
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
    from sglang_on_cpu.drafts import share_without_cuda

    source = inspect.getsource(deepseek_v2.DeepseekV2ForCausalLM.set_embed_and_head)
    assert_defect("share_without_cuda", "torch.cuda.synchronize()" in source)
    source = inspect.getsource(hunyuan_v3_nextn.HYV3ForCausalLMNextN.set_embed_and_head)
    assert_defect("share_without_cuda", "get_device_module().empty_cache()" in source)
    cuda, find_module = import_module("torch.cuda"), torch.get_device_module
    wait, share = cuda.synchronize, EagleDraftWorker.init_lm_head
    with fails_without("share_without_cuda", AssertionError, RuntimeError):
        wait()
    with fails_without("share_without_cuda", AttributeError):
        find_module("cpu").empty_cache()
    EagleDraftWorker.init_lm_head = lambda self: [
        cuda.synchronize(),
        torch.get_device_module().empty_cache(),
    ]
    share_without_cuda()
    EagleDraftWorker.init_lm_head(None)
    assert cuda.synchronize is wait and torch.get_device_module is find_module
    EagleDraftWorker.init_lm_head = share


def check_tell_drafts_apart():
    """Where n-grams match nothing, a tree has the same draft several times."""
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

    from mcore_rl.rollout.drafts import tell_drafts_apart

    def find_drafts(corpus):
        """Return the drafts of each tree, as pairs of a node that they follow and a token."""
        tokens, mask = corpus.batch_get(["a", "b"], [[1, 2, 3], [7, 7, 7]], [3, 3])
        trees = []
        for tokens_N, mask_NN in zip(tokens.reshape(2, 6), mask.reshape(2, 6, 6), strict=True):
            parents = [int(mask_NN[n, :n].nonzero()[0][-1]) for n in range(1, 6)]
            trees.append(set(zip(parents, tokens_N[1:].tolist(), strict=True)))
        return trees

    def make_corpus():
        corpus = NgramCorpus(max_trie_depth=8, draft_token_num=6)
        corpus.batch_put([[1, 2, 3, 4, 0], [1, 2, 3, 5]])
        corpus.synchronize()
        return corpus

    assert_defect("tell_drafts_apart", all(len(tree) < 5 for tree in find_drafts(make_corpus())))
    tell_drafts_apart()
    assert all(len(tree) == 5 for tree in find_drafts(make_corpus()))


def check_read_along():
    """Tokens that passes without drafts have drawn are guessed behind the same ones."""
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    from mcore_rl.rollout.ngram_switch import read_along

    worker = object.__new__(NGRAMWorker)
    worker.max_trie_depth, worker.draft_token_num, worker.enable_overlap = 8, 4, True
    worker.ngram_corpus = NgramCorpus(max_trie_depth=8, draft_token_num=4)
    request = SimpleNamespace(origin_input_ids_unpadded=[5, 6], output_ids=[7, 8, 9])
    batch = SimpleNamespace(reqs=[request], grammar_needs_sync=lambda: False)
    read_along(worker, batch)
    request.output_ids += [1, 2, 3]  # fewer than 8, so the next call has each n-gram
    read_along(worker, batch)
    worker.ngram_corpus.synchronize()
    tokens, _ = worker.ngram_corpus.batch_get(["a"], [[4, 8, 9]], [3])
    assert tokens.tolist() == [9, 1, 2, 3]


def check_certain_drafts():
    """Rounding may leave nothing beside drafts that are certain together."""
    from sgl_kernel.speculative import tree_speculative_sampling_target_only

    probs = torch.zeros(1, 6, 5)
    probs[0, :, 0], probs[0, :, 1] = 0.25, 0.75 - 2**-20
    predicts, accept_index, num_accepted = make_results(1)
    tree_speculative_sampling_target_only(
        *(predicts, accept_index, num_accepted, *tree_links(1)),
        *(torch.full((1, 6), 1 - 2**-24), torch.ones(1), probs, torch.zeros(1, 6, 5)),
    )
    assert accept_index[0, :2].tolist() == [0, 2] and predicts[0] == 1


def check_cut_distributions():
    from sgl_kernel.speculative import top_k_renorm_prob, top_p_renorm_prob

    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.7, 0.1, 0.1, 0.1]])
    of_top_k = top_k_renorm_prob(probs, torch.tensor([2, 1], dtype=torch.int32))
    assert torch.allclose(of_top_k[0], torch.tensor([0, 4 / 7, 3 / 7, 0]))
    assert of_top_k[1].tolist() == [1, 0, 0, 0]
    of_top_p = top_p_renorm_prob(probs, torch.tensor([0.5, 1.0]))
    assert torch.allclose(of_top_p[0], torch.tensor([0, 4 / 7, 3 / 7, 0]))
    assert torch.allclose(of_top_p[1], probs[1])


def check_slots_of_drafts():
    from sglang.kernels.ops.speculative import cache_locs, eagle

    table = torch.arange(60, dtype=torch.int32).view(3, 20)
    requests, starts = torch.tensor([2, 0]), torch.tensor([5, 3])
    slots = cache_locs.assign_extend_cache_locs_func(
        *(requests, table, starts, starts + torch.tensor([2, 3]), 2, 3, "cpu")
    )
    assert slots[:5].tolist() == [45, 46, 3, 4, 5]
    behind = torch.zeros(4, dtype=torch.int64)
    cache_locs.assign_draft_cache_locs_contiguous_func(requests, table, starts, behind, 1, 2)
    assert behind.tolist() == [45, 46, 3, 4]
    accepted = torch.zeros(6, dtype=torch.int64)
    index = torch.tensor([[0, 2, -1], [3, -1, -1]], dtype=torch.int32)
    eagle.fill_accept_out_cache_loc_func(index, torch.arange(10, 16), accepted, 6)
    assert accepted.tolist() == [10, 12, 13, 0, 0, 0]


def check_drafts_see_their_ancestors():
    """A draft's attention is that of a sequence which ends with its ancestors and itself."""
    from sglang_on_cpu.attention import attend, group_drafts

    torch.manual_seed(0)
    starts, num_drafts = [9, 0, 30], len(PARENTS)
    table = torch.randperm(150)[: 3 * 40].view(3, 40).int()
    caches = [torch.randn(150, 2, 8) for _ in range(2)]
    query = torch.randn(3 * num_drafts, 4, 8)
    batch = SimpleNamespace(
        seq_lens=torch.tensor(starts),
        req_pool_indices=torch.tensor([2, 0, 1]),
        spec_info=SimpleNamespace(
            draft_token_num=num_drafts, tree_topk=-1, custom_mask=tree_mask().repeat(3, 1, 1)
        ),
    )
    for window in (None, 3):
        output = torch.full_like(query, float("nan"))
        for group in group_drafts(batch, table):
            attend(group, query, output, *caches, None, window)
        for request, (pool_row, start) in enumerate(zip((2, 0, 1), starts, strict=True)):
            for node in range(num_drafts):
                seen = tree_mask()[node].nonzero().flatten() + start
                keys = torch.cat([torch.arange(start), seen])[-(1000 if window is None else 4) :]
                slots = table[pool_row, keys].long()
                row = request * num_drafts + node
                key, value = (cache[slots].repeat_interleave(2, 1) for cache in caches)
                scores = torch.einsum("hd,khd->hk", query[row], key) / 8**0.5
                expected = torch.einsum("hk,khd->hd", scores.softmax(-1), value)
                assert torch.allclose(output[row], expected, atol=1e-6), (window, request, node)
