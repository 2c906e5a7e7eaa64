"""Has SGLang's passes check drafts where they are faster with them; draft_choice.py decides.

before a pass       StepChoice.begin -> drafts of the pass, none, or none and no draft model
                    -> SGLang's AdaptiveController, or plain_pass.py
when it is done     accepted drafts of requests -> DraftChoice.note -> count of the answer
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

from mcore_rl.device.rank_clock import read_pass_s
from mcore_rl.rollout.draft_choice import DraftChoice, Seconds, Way
from mcore_rl.rollout.drafts import count_drafts
from mcore_rl.rollout.plain_pass import can_decode, decode_one
from mcore_rl.rollout.speculation import ALGORITHM, NGRAM, NUM_STEPS, WHEN_FASTER

Publish = Callable[[torch.Tensor], None]
"""Tells SGLang's scheduler the lengths of requests behind a pass, before the pass has ended."""


def offer_no_drafts(num_steps: int) -> None:
    """Have SGLang choose for each pass between `num_steps` drafts and none, in this process."""
    params: Any = import_module("sglang.srt.speculative.adaptive_spec_params")
    assert hasattr(params, "DEFAULT_ADAPTIVE_CONFIG"), "SGLang has another name for it"
    params.DEFAULT_ADAPTIVE_CONFIG = {"1": {"candidate_steps": [0, num_steps]}}


def prepare_choice(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Return the arguments of SGLang's, and whether a pass may check no drafts.

    SGLang is set up to read such a choice; with n-grams it has no such option, which is left out.
    """
    if WHEN_FASTER not in arguments:
        return list(arguments), False
    if arguments[arguments.index(ALGORITHM) + 1] == NGRAM:
        return [argument for argument in arguments if argument != WHEN_FASTER], True
    offer_no_drafts(int(arguments[arguments.index(NUM_STEPS) + 1]))
    return list(arguments), True


def refuse_fixed(server_args: Any) -> None:
    """Raise ValueError if SGLang would check drafts in each pass against what was asked for."""
    params: Any = import_module("sglang.srt.speculative.adaptive_spec_params")
    if reason := params.adaptive_unsupported_reason(server_args):
        raise ValueError(
            f"rollout.speculate_when=faster: SGLang cannot choose whether a pass checks drafts:"
            f" {reason}; leave that out, or set rollout.speculate_when=always"
        )


def draft_when_faster(num_steps: int) -> None:
    """Have each pass check drafts or not, as measured, in the scheduler that calls this."""
    offer_no_drafts(num_steps)
    choice = DraftChoice(read_pass_s, agree_on)
    count_drafts(lambda: choice.told)
    worker: Any = import_module("sglang.srt.speculative.eagle_worker_v2")
    assert hasattr(worker, "AdaptiveSpeculativeParams"), "SGLang has another name for it"
    steps = StepChoice(choice, num_steps)
    worker.AdaptiveSpeculativeParams = lambda initial_steps, cfg_path: steps
    run_pass = worker.EAGLEWorkerV2.forward_batch_generation

    def forward_batch_generation(
        self: Any, batch: Any, on_publish: Publish | None = None, **options: Any
    ) -> Any:
        if batch.forward_mode.is_decode():
            way = steps.begin(len(batch.seq_lens))
            if way is Way.PLAIN and can_decode(self.target_worker.model_runner, batch):
                return decode_without_draft_model(self, batch, on_publish)
        return run_pass(self, batch, on_publish, **options)

    worker.EAGLEWorkerV2.forward_batch_generation = forward_batch_generation


def decode_without_draft_model(worker: Any, batch: Any, on_publish: Publish | None) -> Any:
    """Return the result of a pass that draws one token for each request, and that the draft model
    does not read.
    """
    drawn = batch.spec_info
    result = decode_one(worker.target_worker, batch, drawn.bonus_tokens)
    if on_publish is not None:
        on_publish(result.new_seq_lens)
    info: Any = import_module("sglang.srt.speculative.eagle_info")
    result.next_draft_input = info.EagleDraftInput(
        bonus_tokens=result.next_token_ids,
        topk_p=drawn.topk_p,  # the guess behind an older token, until the draft model reads again
        topk_index=drawn.topk_index,
        hidden_states=drawn.hidden_states,
    )
    return result


def agree_on(seconds: Seconds) -> Seconds:
    """Return the seconds of the first of an engine's ranks, on all of them, in their order."""
    context: Any = import_module("sglang.srt.runtime_context")
    group = context.get_parallel().tp_group
    told = torch.tensor(list(seconds.values()), dtype=torch.float64)
    if len(group.ranks) > 1:
        torch.distributed.broadcast(told, src=group.ranks[0], group=group.cpu_group)
    return dict(zip(seconds, told.tolist(), strict=True))


class StepChoice:
    """Tells SGLang how many drafts each pass checks, `num_steps` or none.

    The names and arguments of its methods are those of SGLang's AdaptiveSpecPolicy.
    """

    def __init__(self, choice: DraftChoice, num_steps: int) -> None:
        self._choice = choice
        self._num_steps = num_steps
        self._batch_sizes: list[int] | None = None
        environ: Any = import_module("sglang.srt.environ")
        self._leaves_out = environ.envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND
        self._context: Any = import_module("sglang.srt.runtime_context")
        self._way = Way.DRAFT

    def begin(self, num_requests: int) -> Way:
        """Return the way of the pass that is about to begin."""
        way = self._choice.choose(num_requests, self._context.get_serving().weight_version)
        if way is not self._way:
            self._leaves_out.set(way is Way.PLAIN)
        self._way = way
        return way

    @property
    def candidate_steps(self) -> list[int]:
        """Return the numbers of drafts that a pass may check."""
        return [0, self._num_steps]

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Take the batch sizes that SGLang captures graphs for."""
        self._batch_sizes = cuda_graph_bs

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Return the batch sizes that may run with `step` drafts: any."""
        return self._batch_sizes

    def get_steps_for_batch(self, batch_size: int) -> int:
        """Return the number of drafts of the pass that has begun."""
        return self._num_steps if self._way is Way.DRAFT else 0

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> None:
        """Take what a pass has accepted; the next one asks by itself."""
        self._choice.note(num_correct_drafts_per_req)
