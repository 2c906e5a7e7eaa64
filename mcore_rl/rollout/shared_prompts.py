"""Has an engine compute the prompt of several samples once.

SGLang looks into its prefix cache when it admits a request. The samples of a prompt come together
and are admitted together, so none finds it in the cache, and each computes all of it. Here they
wait for the first of them. The rule replaces the one by which SGLang's scheduler admits requests,
in each of its processes; with `rollout.share_prompts=false`, and in engines of judges, teachers and
`mcore-rl serve`, nothing of SGLang is replaced.
"""

from collections.abc import Hashable
from importlib import import_module
from typing import Any

LEAST_TOKENS = 8
"""So many tokens less of a prompt to compute are worth a forward pass more."""
MOST_HOLDS = 4
"""Times that a sample waits. One is enough; two, if the scheduler runs ahead of the model."""
MOST_KEPT = 64
"""Prompts from which on those of finished requests are forgotten: a request holds its images."""


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
