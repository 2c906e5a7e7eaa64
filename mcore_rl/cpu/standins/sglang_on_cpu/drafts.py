"""Sampling of tokens where engines speculate; sgl_kernel/speculative.py has the kernels.

Takes the target's logits of a tree of drafts, and accepts those that it would have drawn itself.
"""


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
