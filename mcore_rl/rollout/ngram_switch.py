"""Has SGLang's passes check drafts of n-grams where they are faster with them.

before a pass       DraftChoice.choose -> SGLang's own pass, or plain_pass.py
when it is done     accepted drafts of requests -> DraftChoice.note -> count of the answer

SGLang chooses nothing where it guesses with n-grams: there each pass checks drafts.
"""

from importlib import import_module
from typing import Any

import torch

from mcore_rl.device.rank_clock import read_pass_s
from mcore_rl.rollout.draft_choice import WITHOUT_MODEL, DraftChoice, Way
from mcore_rl.rollout.draft_switch import Publish, agree_on
from mcore_rl.rollout.drafts import count_drafts
from mcore_rl.rollout.plain_pass import can_decode, decode_one


def guess_when_faster() -> None:
    """Have each pass check drafts or not, as measured, in the scheduler that calls this."""
    choice = DraftChoice(read_pass_s, agree_on, WITHOUT_MODEL)
    count_drafts(lambda: choice.told)
    context: Any = import_module("sglang.srt.runtime_context")
    worker: Any = import_module("sglang.srt.speculative.ngram_worker").NGRAMWorker
    run_pass = worker.forward_batch_generation
    unread = 0

    def forward_batch_generation(
        self: Any, batch: Any, on_publish: Publish | None = None, **options: Any
    ) -> Any:
        nonlocal unread
        if batch.forward_mode.is_decode():
            only = None if can_decode(self.model_runner, batch) else Way.DRAFT
            version = context.get_serving().weight_version
            if choice.choose(len(batch.seq_lens), version, only) is Way.PLAIN:
                unread += 1
                if 2 * unread > self.max_trie_depth:
                    unread = 0
                    read_along(self, batch)
                return decode_without_drafts(self, batch, on_publish)
        return run_pass(self, batch, on_publish, **options)

    def note(self: Any, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        choice.note(num_correct_drafts_per_req)

    worker.forward_batch_generation = forward_batch_generation
    worker.on_verify_complete_cpu = note


def read_along(worker: Any, batch: Any) -> None:
    """Add the last tokens of all requests to the n-grams, as many as an n-gram has.

    The tokens of passes whose results the scheduler has not processed yet are added by a later
    call, which has to come before as many tokens are drawn.
    """
    worker.prev_token_ids = []
    worker.prev_accept_lens = [0] * len(batch.reqs)
    worker._update_ngram_corpus(batch)


def decode_without_drafts(worker: Any, batch: Any, on_publish: Publish | None) -> Any:
    """Return the result of a pass that draws one token for each request."""
    info: Any = import_module("sglang.srt.speculative.ngram_info")
    drawn = batch.spec_info
    num_drafts: int = worker.draft_token_num
    last_B = drawn.accept_lens.long() - 1
    drawn_BN = drawn.accept_tokens.view(-1, num_drafts)
    result = decode_one(worker.target_worker, batch, drawn_BN.gather(1, last_B[:, None])[:, 0])
    if on_publish is not None:
        on_publish(result.new_seq_lens)
    tokens_BN = torch.zeros_like(drawn_BN)
    tokens_BN[:, 0] = result.next_token_ids
    result.next_draft_input = info.NgramVerifyInput(
        draft_token_num=num_drafts,
        new_seq_lens=result.new_seq_lens,
        accept_tokens=tokens_BN.flatten(),
        accept_lens=result.accept_lens,
    )
    return result
