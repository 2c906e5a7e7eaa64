"""Has an engine report the experts that drew a token, whatever it computes again later.

    request:  prompt | drawn with old weights | retracted, weights swapped | drawn with new weights
    reported: experts of the old weights -----| experts of the new weights -----------------------

SGLang reads the experts of a request from its KV slots when the request ends. A request that was
retracted, for a swap of weights or as the KV cache was full, has new slots by then: its prompt and
what it had drawn were computed again, by other weights or in a batch of another shape. Here the
experts are kept as the slots are released. The rule is added to each of an engine's schedulers.
"""

from importlib import import_module
from typing import Any

import torch


def keep_first_experts() -> None:
    """Report for each token the experts of the pass that drew the token after it.

    Prompt tokens keep those of the pass that drew the first token of the response. Changes SGLang
    in this process, which is to be a scheduler's.
    """
    schedule_batch: Any = import_module("sglang.srt.managers.schedule_batch")
    processors: Any = import_module(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
    )
    processor = processors.SchedulerBatchResultProcessor
    release_req = schedule_batch.release_req
    collect = processor._maybe_collect_routed_experts

    def keep_and_release(*, req: Any, req_to_token_pool: Any, **options: Any) -> Any:
        keep_drawn(req, req_to_token_pool, processors.get_global_experts_capturer())
        return release_req(req=req, req_to_token_pool=req_to_token_pool, **options)

    def collect_first(self: Any, req: Any) -> None:
        collect(self, req)
        first = getattr(req, "first_experts", None)
        if first is not None and req.routed_experts is not None:
            req.routed_experts[: len(first)] = first

    schedule_batch.release_req = keep_and_release
    processor._maybe_collect_routed_experts = collect_first


def keep_drawn(req: Any, req_to_token_pool: Any, capturer: Any) -> None:
    """Append to `req.first_experts`, int16 [tokens from routed_experts_start_len on, L, K], the
    rows that drew tokens since the request was last retracted.

    The last drawn token has not been run. A request that was computing its context again has drawn
    nothing since: its slots are not read, as they may hold nothing yet. A row takes 2 * L * K bytes
    of host memory until the request ends; each is copied once, however often weights change.
    """
    if capturer is None or not req.return_routed_experts or not req.output_ids:
        return
    first = getattr(req, "first_experts", None)
    num_kept = 0 if first is None else len(first)
    start_len = req.routed_experts_start_len + num_kept
    num_tokens = len(req.origin_input_ids) + len(req.output_ids)
    if start_len >= num_tokens - 1:
        return
    rows = capturer.get_topk(req.kv.req_pool_idx, num_tokens, req_to_token_pool, start_len)
    rows = rows.to(torch.int16)
    req.first_experts = rows if first is None else torch.cat([first, rows])
