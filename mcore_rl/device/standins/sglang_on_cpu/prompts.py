"""Has an engine compute the prompt of several samples once.

SGLang looks into its prefix cache when it admits a request. Samples of one prompt come together, are
admitted together, and each computes all of the prompt, because none finds it in the cache yet.
"""

from collections.abc import Hashable
from typing import Any

LEAST_TOKENS = 8
"""So many tokens less of a prompt to compute are worth a forward pass more."""
MOST_HOLDS = 4
"""Times that a sample waits. One is enough; two, if the scheduler runs ahead of the model."""


def compute_prompts_once() -> None:
    """Hold back samples of a prompt that another sample is computing, until the cache has it."""
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler

    begun: dict[Hashable, Any] = {}
    """The request that was last admitted, by its prompt. All ranks of an engine have the same."""

    class HoldingAdder(PrefillAdder):
        def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> Any:
            prompt = _prompt_of(req)
            if self._must_wait(req, begun.get(prompt)):
                req.num_holds = _num_holds(req) + 1
                return AddReqResult.CONTINUE
            result = super().add_one_req(req, *args, **kwargs)
            if self.can_run_list and self.can_run_list[-1] is req:
                _forget_finished(begun)
                begun[prompt] = req
            return result

        def _must_wait(self, req: Any, other: Any) -> bool:
            """Return whether `other` is computing enough of what `req` needs."""
            if other is None or other is req or other.finished() or _num_holds(req) >= MOST_HOLDS:
                return False
            if getattr(self.tree_cache, "disable", True) or self.tree_cache.supports_mamba():
                return False
            longest = req._compute_max_prefix_len(len(req.origin_input_ids) + len(req.output_ids))
            cached = longest // self.page_size * self.page_size
            return cached - req.num_matched_prefix_tokens >= LEAST_TOKENS

    Scheduler.get_prefill_adder_class = lambda self: HoldingAdder


def _prompt_of(req: Any) -> Hashable:
    """Return what requests with the same tokens, and nothing else that keeps them apart, share."""
    if not hasattr(req, "prompt_hash"):
        req.prompt_hash = hash(tuple(req.origin_input_ids))
    return len(req.origin_input_ids), req.prompt_hash, req.extra_key, req.cache_salt


def _num_holds(req: Any) -> int:
    return getattr(req, "num_holds", 0)


def _forget_finished(begun: dict[Hashable, Any], most: int = 4096) -> None:
    if len(begun) > most:
        for prompt in [prompt for prompt, req in begun.items() if req.finished()]:
            del begun[prompt]
