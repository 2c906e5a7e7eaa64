"""Has each scheduler process of an SGLang server call functions of ours before it begins.

keep_first_experts

    request:  prompt | drawn with old weights | retracted, weights swapped | drawn with new weights
    reported: experts of the old weights -----| experts of the new weights -----------------------

SGLang reads the experts of a request from its KV slots when the request ends. A request that was
retracted, for a swap of weights or as the KV cache was full, has new slots by then: its prompt and
what it had drawn were computed again, by other weights or in a batch of another shape. Here the
experts are kept as the slots are released. The rule is added to each of an engine's schedulers.

compute_prompts_once

SGLang looks into its prefix cache when it admits a request. The samples of a prompt come together
and are admitted together, so none finds it in the cache, and each computes all of it. Here they
wait for the first of them. The rule replaces the one by which SGLang's scheduler admits requests,
in each of its processes; with `rollout.share_prompts=false`, and in engines of judges, teachers and
`mcore-rl serve`, nothing of SGLang is replaced.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch

LEAST_TOKENS = 8
"""So many tokens less of a prompt to compute are worth a forward pass more."""
MOST_HOLDS = 4
"""Times that a sample waits. One is enough; two, if the scheduler runs ahead of the model."""
MOST_KEPT = 64
"""Prompts from which on those of finished requests are forgotten: a request holds its images."""
SetUp = Callable[[], None]
"""Changes SGLang in the process that calls it; a function of a module, as processes are spawned."""


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


def compute_prompts_once() -> None:
    """Hold back samples of a prompt that another sample is computing, until the cache has it."""
    schedule_policy: Any = import_module("sglang.srt.managers.schedule_policy")
    scheduler: Any = import_module("sglang.srt.managers.scheduler")
    go_on = schedule_policy.AddReqResult.CONTINUE
    begun: dict[Hashable, Any] = {}
    """The request that was last admitted, by its prompt; all ranks of an engine have the same."""

    class HoldingAdder(schedule_policy.PrefillAdder):
        def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> Any:
            prompt = _prompt_of(req)
            if _may_share(self, req) and _is_computing(begun.get(prompt), req):
                req.num_holds = _num_holds(req) + 1
                return go_on
            result = super().add_one_req(req, *args, **kwargs)
            if self.can_run_list and self.can_run_list[-1] is req:
                if len(begun) >= MOST_KEPT:
                    _forget_finished(begun)
                begun[prompt] = req
            return result

    assert hasattr(scheduler.Scheduler, "get_prefill_adder_class"), "SGLang has another name for it"
    scheduler.Scheduler.get_prefill_adder_class = lambda self: HoldingAdder


def _may_share(adder: Any, req: Any) -> bool:
    """Return whether the prefix cache could give the request enough that it does not have yet."""
    if getattr(adder.tree_cache, "disable", True) or adder.tree_cache.supports_mamba():
        return False
    longest = req._compute_max_prefix_len(len(req.origin_input_ids) + len(req.output_ids))
    in_pages = longest // adder.page_size * adder.page_size
    return in_pages - req.num_matched_prefix_tokens >= LEAST_TOKENS


def _is_computing(other: Any, req: Any) -> bool:
    """Return whether the request `other` still runs, and `req` has not waited for long."""
    if other is None or other is req or other.finished():
        return False
    return _num_holds(req) < MOST_HOLDS


def _prompt_of(req: Any) -> Hashable:
    """Return what requests with the same tokens, and nothing else that keeps them apart, share."""
    if not hasattr(req, "prompt_hash"):
        req.prompt_hash = hash(tuple(req.origin_input_ids))
    return len(req.origin_input_ids), req.prompt_hash, req.extra_key, req.cache_salt


def _num_holds(req: Any) -> int:
    return getattr(req, "num_holds", 0)


def _forget_finished(begun: dict[Hashable, Any]) -> None:
    for prompt in [prompt for prompt, req in begun.items() if req.finished()]:
        del begun[prompt]


def set_schedulers_up(set_ups: Sequence[SetUp]) -> None:
    """Have the schedulers of the server that this process is to start call `set_ups` in order."""
    http_server: Any = import_module("sglang.srt.entrypoints.http_server")
    http_server.launch_server = partial(
        http_server.launch_server, run_scheduler_process_func=partial(run_scheduler, set_ups)
    )


def run_scheduler(set_ups: Sequence[SetUp], *args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler process, with the arguments that SGLang gives it."""
    for set_up in set_ups:
        set_up()
    import_module("sglang.srt.managers.scheduler").run_scheduler_process(*args, **kwargs)
