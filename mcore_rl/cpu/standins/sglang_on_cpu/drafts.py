"""Sampling of tokens where engines speculate; sgl_kernel/speculative.py has the kernels.

Takes the target's logits of a tree of drafts, and accepts those that it would have drawn itself.
"""

from typing import Any

from sglang_on_cpu.attention import make_groups


def sample_drafts() -> None:
    """Accept drafts by the target's probabilities, as on a GPU.

    On a CPU SGLang accepts what is likeliest, whatever the temperature of a request.
    """
    from sgl_kernel import speculative
    from sglang.srt.speculative import eagle_utils

    uses_greedy = eagle_utils._verify_uses_greedy

    def verify_uses_greedy(*, is_cpu: bool, **options: bool) -> bool:
        return uses_greedy(is_cpu=False, **options)

    eagle_utils._verify_uses_greedy = verify_uses_greedy
    for name in (
        "tree_speculative_sampling_target_only",
        "top_k_renorm_prob",
        "top_p_renorm_prob",
    ):
        setattr(eagle_utils, name, getattr(speculative, name))


class DraftSteps:
    """The attention of a draft model's steps: each sees one token more than the one before.

    attn_backends   a backend of SGLang for each step but the last, which is of the step before
    """

    def __init__(self, runner: Any, num_steps: int) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        self.attn_backends = [TorchNativeAttnBackend(runner) for _ in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Group the requests of a batch, whose lengths are those before the first step."""
        for step, backend in enumerate(self.attn_backends, 1):
            backend.init_forward_metadata(forward_batch)
            backend.attention_groups = make_groups(
                [1] * len(forward_batch.seq_lens),
                (forward_batch.seq_lens + step).tolist(),
                backend.req_to_token_pool.req_to_token,
                forward_batch.req_pool_indices,
            )


def draft_in_torch() -> None:
    """Give draft models the attention of the torch_native backend; SGLang's has none for them."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.speculative.draft_utils import DraftBackendFactory as Factory

    def create_decode_backend(self: Any) -> DraftSteps | None:
        assert self.topk == 1, "a draft model proposes chains here"
        if self.speculative_num_steps == 1:
            return None
        return DraftSteps(self.draft_model_runner, self.speculative_num_steps)

    Factory.create_decode_backend = create_decode_backend
    Factory.create_draft_extend_backend = lambda self: TorchNativeAttnBackend(
        self.draft_model_runner
    )


def share_without_cuda() -> None:
    """Let draft models share the target's embedding and output layer without a wait for CUDA."""
    import torch
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

    share = EagleDraftWorker.init_lm_head

    def init_lm_head(self: Any) -> None:
        wait, find_module = torch.cuda.synchronize, torch.get_device_module
        torch.cuda.synchronize = lambda *arguments: None
        torch.get_device_module = lambda *arguments: torch.cuda  # it has no cache to empty
        try:
            share(self)
        finally:
            torch.cuda.synchronize, torch.get_device_module = wait, find_module

    EagleDraftWorker.init_lm_head = init_lm_head
