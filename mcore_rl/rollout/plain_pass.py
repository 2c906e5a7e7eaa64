"""Draws one token for each request of an engine that speculates, as an engine that does not.

    SGLang's own way without drafts    a tree of one token for each request, which is verified
    here                               the pass of decoding: its forward, sampling and log-probs

The scheduler gets what it expects of a pass that checked drafts and accepted none.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def can_decode(runner: Any, batch: Any) -> bool:
    """Return whether the target model of `runner` can decode a batch of an engine that speculates.

    The CUDA graphs that such an engine has captured are those of trees, and as it verifies trees
    SGLang keeps up with grammars, and with states of linear attention for its cache of prefixes.
    """
    context: Any = import_module("sglang.srt.runtime_context")
    has_graph = runner.decode_cuda_graph_runner not in (None, runner.eager_runner)
    keeps_states = context.get_exec().mamba.enable_mamba_extra_buffer
    return not (has_graph or keeps_states or batch.has_grammar)


def decode_one(target_worker: Any, batch: Any, last_token_B: Tensor) -> Any:
    """Return the target's GenerationBatchResult of a pass that draws a token for each request.

    batch         SGLang's ScheduleBatch of requests to be decoded; the scheduler restores its
                  fields after the pass
    last_token_B  what was drawn last, whose KV the pass computes
    """
    len_B = batch.seq_lens
    batch.input_ids = last_token_B.long()
    slots = batch.req_to_token_pool.req_to_token[batch.req_pool_indices, len_B]
    batch.out_cache_loc = slots.long()
    batch.spec_info = None
    batch.seq_lens = len_B + 1  # decoding counts the token that it computes
    batch.seq_lens_sum = None
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
    result = target_worker.forward_batch_generation(batch)
    result.next_token_ids = result.next_token_ids.int()
    result.accept_lens = torch.ones_like(result.next_token_ids)
    result.new_seq_lens = batch.seq_lens
    result.speculative_num_draft_tokens = 1
    if batch.return_logprob:  # a row for each request, of the tokens that it accepted
        output = result.logits_output
        output.next_token_logprobs = output.next_token_logprobs[:, None]
    result.extra_keep_alive_refs = [batch.input_ids, batch.out_cache_loc, batch.seq_lens]
    return result
