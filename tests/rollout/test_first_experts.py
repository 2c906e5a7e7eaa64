"""Which rows of an engine's experts or chosen keys are kept when a request loses its KV slots."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_rl.rollout.scheduler_setup import EXPERTS, KEYS, Choice, keep_drawn


class Capturer:
    """Answers as SGLang's does: rows of the tokens from start_len on, but not of the last one."""

    def __init__(self) -> None:
        self.num_passes = 0
        self.asked: list[tuple[int, int]] = []

    def get_topk(self, slot: int, num_tokens: int, pool: Any, start_len: int) -> torch.Tensor:
        self.asked.append((start_len, num_tokens))
        return torch.full((num_tokens - 1 - start_len, 1, 1), self.num_passes)


def make_req(num_prompt: int, start_len: int = 0) -> Any:
    return SimpleNamespace(
        origin_input_ids=[0] * num_prompt,
        output_ids=[],
        return_routed_experts=True,
        return_indexer_topk=True,
        routed_experts_start_len=start_len,
        kv=SimpleNamespace(req_pool_idx=5),
    )


@pytest.mark.parametrize(("choice", "start"), [(EXPERTS, 1), (KEYS, 0)])
def test_each_retraction_adds_what_was_drawn_since_the_last(choice: Choice, start: int) -> None:
    req, capturer = make_req(4, start_len=1), Capturer()
    keep_drawn(req, None, capturer, choice)
    nothing = "nothing is drawn yet: the prompt is computed again"
    assert choice.find_first(req) is None, nothing
    for num_drawn in (3, 3, 5):  # at the second time its context is not computed again yet
        req.output_ids = [0] * num_drawn
        capturer.num_passes += 1
        keep_drawn(req, None, capturer, choice)
    assert capturer.asked == [(start, 7), (6, 9)]
    kept = choice.find_first(req)
    assert kept is not None and kept.flatten().tolist() == [1] * (6 - start) + [3] * 2


def test_requests_that_do_not_ask_and_engines_that_do_not_report_keep_nothing() -> None:
    req = make_req(2)
    req.output_ids = [0, 0]
    keep_drawn(req, None, None)
    req.return_routed_experts = False
    keep_drawn(req, None, Capturer())
    assert EXPERTS.find_first(req) is None
