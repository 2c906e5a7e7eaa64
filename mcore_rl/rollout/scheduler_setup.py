"""Has each scheduler process of an SGLang server call functions of ours before it begins.

keep_first_experts, keep_first_keys

    request:  prompt | drawn with old weights | retracted, weights swapped | drawn with new weights
    reported: experts of the old weights -----| experts of the new weights -----------------------

SGLang reads the experts of a request, and the keys that indexers chose, from its KV slots when the
request ends. A request that was retracted, for a swap of weights or as the KV cache was full, has
new slots by then: its prompt and what it had drawn were computed again, by other weights or in a
batch of another shape. Here the choices are kept as the slots are released. The rules are added to
each of an engine's schedulers.

tell_versions_of_parts

SGLang tells which weights drew a response once it is whole. An answer that comes in parts
(streamed_answer.py) may end before, so here each part tells it of what is drawn so far.

compute_prompts_once

SGLang looks into its prefix cache when it admits a request. The samples of a prompt come together
and are admitted together, so none finds it in the cache, and each computes all of it. Here they
wait for the first of them. The rule replaces the one by which SGLang's scheduler admits requests,
in each of its processes; with `rollout.share_prompts=false`, and in engines of judges, teachers and
`mcore-rl serve`, nothing of SGLang is replaced.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

LEAST_TOKENS = 8
"""So many tokens less of a prompt to compute are worth a forward pass more."""
MOST_HOLDS = 4
"""Times that a sample waits. One is enough; two, if the scheduler runs ahead of the model."""
MOST_KEPT = 64
"""Prompts from which on those of finished requests are forgotten: a request holds its images."""
SetUp = Callable[[], None]
"""Changes SGLang in the process that calls it; a function of a module, as processes are spawned."""


@dataclass(frozen=True)
class Choice:
    """A kind of choices that an engine reports of each token.

    name    the field of SGLang's requests that has them in the end
    start   the field of a request with the first token that is told of; "": all are
    dtype   in which they are kept until the request ends
    """

    name: str
    start: str
    dtype: torch.dtype

    def find_start(self, req: Any) -> int:
        """Return the first token that a request is told of."""
        return getattr(req, self.start) if self.start else 0

    def find_first(self, req: Any) -> Tensor | None:
        """Return what `keep_drawn` has kept of a request."""
        return getattr(req, "first_choices", {}).get(self.name)


EXPERTS = Choice("routed_experts", "routed_experts_start_len", torch.int16)
KEYS = Choice("indexer_topk", "", torch.int32)


def keep_first_experts() -> None:
    """Report for each token the experts of the pass that drew the token after it.

    Prompt tokens keep those of the pass that drew the first token of the response. Changes SGLang
    in this process, which is to be a scheduler's.
    """
    schedule_batch: Any = import_module("sglang.srt.managers.schedule_batch")
    processors: Any = import_module(_PROCESSORS)
    processor = processors.SchedulerBatchResultProcessor
    release = _keep_at_release(
        schedule_batch.release_req, lambda: processors.get_global_experts_capturer(), EXPERTS
    )
    collect = _put_first_back(processor._maybe_collect_routed_experts, EXPERTS)
    schedule_batch.release_req = release
    processor._maybe_collect_routed_experts = collect


def keep_first_keys() -> None:
    """Do the same with the keys that indexers chose."""
    schedule_batch: Any = import_module("sglang.srt.managers.schedule_batch")
    processors: Any = import_module(_PROCESSORS)
    processor = processors.SchedulerBatchResultProcessor
    release = _keep_at_release(
        schedule_batch.release_req, lambda: processors.get_global_indexer_capturer(), KEYS
    )
    collect = _put_first_back(processor._maybe_collect_indexer_topk, KEYS)
    schedule_batch.release_req = release
    processor._maybe_collect_indexer_topk = collect


def tell_versions_of_parts() -> None:
    """Tell with each part of an answer which weights drew it and what came before.

    Changes SGLang in this process, which is to be a scheduler's.
    """
    streamer: Any = import_module("sglang.srt.managers.scheduler_components.output_streamer")
    batch = streamer._GenerationStreamAccumulator
    accept = batch.accept

    def accept_and_tell(self: Any, *, req: Any) -> None:
        num_told = len(self.weight_versions)
        accept(self, req=req)
        if len(self.weight_versions) > num_told and req.stream and not req.finished():
            self.weight_versions[-1] = streamer.compute_weight_version_spans(
                req.weight_version_events,
                current_version=self.current_weight_version,
                num_output_tokens=req.send_token_offset,
            )

    batch.accept = accept_and_tell


_PROCESSORS = "sglang.srt.managers.scheduler_components.batch_result_processor"


def _keep_at_release(
    release_req: Callable[..., Any], find_capturer: Callable[[], Any], choice: Choice
) -> Callable[..., Any]:
    def keep_and_release(*, req: Any, req_to_token_pool: Any, **options: Any) -> Any:
        keep_drawn(req, req_to_token_pool, find_capturer(), choice)
        return release_req(req=req, req_to_token_pool=req_to_token_pool, **options)

    return keep_and_release


def _put_first_back(collect: Callable[..., Any], choice: Choice) -> Callable[..., Any]:
    def collect_first(self: Any, req: Any) -> None:
        collect(self, req)
        first, collected = choice.find_first(req), getattr(req, choice.name)
        if first is not None and collected is not None:
            collected[: len(first)] = first

    return collect_first


def keep_drawn(req: Any, req_to_token_pool: Any, capturer: Any, choice: Choice = EXPERTS) -> None:
    """Append to the choice in `req.first_choices`, [tokens that are told of, L, K], the rows that
    drew tokens since the request was last retracted.

    The last drawn token has not been run. A request that was computing its context again has drawn
    nothing since: its slots are not read, as they may hold nothing yet. A row takes L * K numbers
    of host memory until the request ends; each is copied once, however often weights change.
    """
    if capturer is None or not getattr(req, f"return_{choice.name}") or not req.output_ids:
        return
    first = choice.find_first(req)
    num_kept = 0 if first is None else len(first)
    start_len = choice.find_start(req) + num_kept
    num_tokens = len(req.origin_input_ids) + len(req.output_ids)
    if start_len >= num_tokens - 1:
        return
    rows = capturer.get_topk(req.kv.req_pool_idx, num_tokens, req_to_token_pool, start_len)
    rows = rows.to(choice.dtype)
    kept = rows if first is None else torch.cat([first, rows])
    req.first_choices = {**getattr(req, "first_choices", {}), choice.name: kept}


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
