"""Torch and numpy versions of sgl_kernel's functions for drafts, by SGLang's names and arguments.

A request has a tree of N drafts, whose root is its last token. A node is named by its index in the
tree, -1 is none; `next_token` is a node's first child, `next_sibling` the next child of its parent:

    tokens         a b c d    next_token     1  3 -1 -1
    ancestors of d a b        next_sibling  -1  2 -1 -1      b and c follow a, d follows b

Results are written to the arguments that SGLang's kernels write to.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sgl_kernel.slots import list_places

FULL_MASK = 0
"""TreeMaskMode of masks that include the tokens before the tree; SGLang asks for it on GPUs."""


def assign_extend_cache_locs_cpu(
    requests_B: Tensor,
    req_to_token: Tensor,
    starts_B: Tensor,
    stops_B: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write the slots of tokens start to stop of each request, one request after another."""
    slots = req_to_token.numpy()[list_places(requests_B, starts_B, stops_B)]
    out_cache_loc.numpy()[: len(slots)] = slots


def assign_draft_cache_locs_contiguous_cpu(
    requests_B: Tensor,
    req_to_token: Tensor,
    seq_lens_B: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Write the `topk` * `num_steps` slots behind the tokens of each request."""
    stops_B = seq_lens_B + topk * num_steps
    arguments = (requests_B, req_to_token, seq_lens_B, stops_B, out_cache_loc, pool_len)
    assign_extend_cache_locs_cpu(*arguments)


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accepted_loc: Tensor
) -> None:
    """Write the slots of the accepted nodes, in their order; an index of -1 is none."""
    indices = accept_index.flatten()
    indices = indices[indices >= 0].long()
    accepted_loc[: len(indices)] = out_cache_loc[indices].to(accepted_loc.dtype)


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens_B: Tensor, bonus_tokens_B: Tensor, stride: int
) -> None:
    """Write the last accepted token of each request, which has `stride` places for its own."""
    lasts_B = torch.arange(len(accept_lens_B)) * stride + accept_lens_B - 1
    bonus_tokens_B.copy_(accept_tokens.flatten()[lasts_B.long()])


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    seq_lens_B: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    batch_size: int,
    num_drafts: int,
) -> None:
    """Write positions and links of the trees whose mask has True where a node is an ancestor."""
    mask_BNN = tree_mask.view(batch_size, num_drafts, num_drafts).bool()
    ancestors_BNN = mask_BNN.tril(-1)
    depths_BN = ancestors_BNN.sum(-1)
    positions.copy_((seq_lens_B[:, None] + depths_BN).flatten())
    retrieve_index.copy_(torch.arange(batch_size * num_drafts).view(batch_size, -1))
    nearest_BN = (ancestors_BNN * torch.arange(num_drafts)).amax(-1)
    parents_BN = torch.where(depths_BN > 0, nearest_BN, -1)
    _link(parents_BN, next_token, next_sibling)


def _link(parents_BN: Tensor, next_token: Tensor, next_sibling: Tensor) -> None:
    """Write the links of trees; siblings follow each other by their indices."""
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    for tree, parents_N in enumerate(parents_BN.tolist()):
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents_N):
            if parent >= 0:
                children.setdefault(parent, []).append(node)
        for parent, nodes in children.items():
            next_token[tree, parent] = nodes[0]
            for node, following in pairwise(nodes):
                next_sibling[tree, node] = following


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens_B: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    depth: int,
    num_drafts: int,
    tree_mask_mode: int,
) -> None:
    """Write the mask of drafts of a draft model, their positions and links.

    A draft is a choice of `selected_index` [B, N - 1] among all that the draft model proposed,
    `topk` for each node that it went on from; `parent_list` has the choices that it went on from,
    the first of them the root.
    """
    assert tree_mask_mode != FULL_MASK, "masks of whole sequences are for GPUs"
    batch_size = len(seq_lens_B)
    parents_BN = torch.full((batch_size, num_drafts), -1)
    for tree in range(batch_size):
        chosen = selected_index[tree].tolist()
        for node, choice in enumerate(chosen, 1):
            origin = choice // topk
            parent = 0 if origin == 0 else 1 + chosen.index(int(parent_list[tree, origin]))
            parents_BN[tree, node] = parent
    mask_BNN = torch.eye(num_drafts, dtype=torch.bool).repeat(batch_size, 1, 1)
    for node in range(1, num_drafts):
        mask_BNN[:, node] |= mask_BNN[torch.arange(batch_size), parents_BN[:, node]]
    tree_mask.copy_(mask_BNN.flatten())
    positions.copy_((seq_lens_B[:, None] + mask_BNN.sum(-1) - 1).flatten())
    retrieve_index.copy_(torch.arange(batch_size * num_drafts).view(batch_size, -1))
    _link(parents_BN, next_token, next_sibling)


Choose = Callable[[int, list[int]], tuple[int, bool]]
"""Takes a node and its children. Returns the chosen child and True, or a token that ends the walk
and False."""


def _walk(
    choose: Choose,
    tree: int,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    links: tuple[list[int], list[int]],
) -> None:
    """Follow the choices from the root of a tree, and write the tokens and nodes on the way."""
    num_drafts = candidates.shape[1]
    next_token, next_sibling = links
    node, num_accepted = 0, 0
    while True:
        row = tree * num_drafts + node
        accept_index[tree, num_accepted] = row
        children = []
        if num_accepted + 1 < accept_index.shape[1]:
            child = next_token[node]
            while child >= 0:
                children.append(child)
                child = next_sibling[child]
        chosen, is_child = choose(node, children)
        predicts[row] = candidates[tree, chosen] if is_child else chosen
        if not is_child:
            break
        node = chosen
        num_accepted += 1
    accept_token_num[tree] = num_accepted


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accept the drafts that are the target's own choice, `target_predict` [B, N] of each node."""
    next_token, next_sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    for tree, (targets_N, tokens_N) in enumerate(
        zip(target_predict.tolist(), candidates.tolist(), strict=True)
    ):

        def choose(
            node: int,
            children: list[int],
            targets_N: list[int] = targets_N,
            tokens_N: list[int] = tokens_N,
        ) -> tuple[int, bool]:
            matching = [child for child in children if tokens_N[child] == targets_N[node]]
            return (matching[0], True) if matching else (targets_N[node], False)

        links = (next_token[tree], next_sibling[tree])
        _walk(choose, tree, predicts, accept_index, accept_token_num, candidates, links)


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accept a draft with the target's probability of it; where none is accepted, draw another
    token with the probabilities that are left.

    So each token is drawn with the target's probabilities, [B, N, V], if no two children of a node
    are the same token. `draft_probs` is not read.
    """
    assert threshold_single == threshold_acc == 1.0, "other thresholds draw other tokens"
    probs_BNV = target_probs.numpy()
    next_token, next_sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    coins, tokens = uniform_samples.tolist(), candidates.tolist()
    finals_B = uniform_samples_for_final_sampling.tolist()
    for tree, final in enumerate(finals_B):
        choose = partial(_accept_or_draw, probs_BNV[tree], coins[tree], final, tokens[tree])
        links = (next_token[tree], next_sibling[tree])
        _walk(choose, tree, predicts, accept_index, accept_token_num, candidates, links)


def _accept_or_draw(
    probs_NV: Any,
    coins_N: list[float],
    final: float,
    tokens_N: list[int],
    node: int,
    children: list[int],
) -> tuple[int, bool]:
    """Return the child that the node's coin falls on, or a token drawn of the rest by `final`."""
    probs_V = probs_NV[node].astype(np.float64)
    reached = 0.0
    for child in children:
        share = probs_V[tokens_N[child]]
        reached += share
        if share > 0 and coins_N[node] < reached:
            return child, True
    rest_V = probs_V.copy()
    rest_V[[tokens_N[child] for child in children]] = 0.0
    if not rest_V.any():  # the children have it all, and rounding kept them from 1
        return max(children, key=lambda child: probs_V[tokens_N[child]]), True
    return draw(rest_V, final), False


def draw(weights_V: Any, share: float) -> int:
    """Return the token at which the running sum of float64 weights passes `share` of their sum."""
    sums_V = weights_V.cumsum()
    token = int(np.searchsorted(sums_V, share * sums_V[-1], side="right"))
    return token if token < len(weights_V) else int(np.flatnonzero(weights_V)[-1])


def top_k_renorm_prob(probs_RV: Tensor, top_k_R: Tensor) -> Tensor:
    """Return the distribution of the `top_k` likeliest tokens of each row, ties included."""
    sorted_RV = probs_RV.sort(-1, descending=True).values
    last_R = (top_k_R.long() - 1).clamp(0, probs_RV.shape[1] - 1)
    least_R1 = sorted_RV.gather(1, last_R[:, None])
    return _renormalize(probs_RV, probs_RV >= least_R1)


def top_p_renorm_prob(probs_RV: Tensor, top_p_R: Tensor) -> Tensor:
    """Return the distribution of the fewest likeliest tokens that have `top_p` of each row."""
    sorted_RV = probs_RV.sort(-1, descending=True).values
    before_RV = sorted_RV.cumsum(-1) - sorted_RV
    count_R1 = (before_RV < top_p_R[:, None]).sum(-1, keepdim=True)
    return _renormalize(probs_RV, probs_RV >= sorted_RV.gather(1, (count_R1 - 1).clamp(min=0)))


def _renormalize(probs_RV: Tensor, kept_RV: Tensor) -> Tensor:
    kept = probs_RV.where(kept_RV, 0.0)
    return kept / kept.sum(-1, keepdim=True)
