"""Sampling that a seed per request repeats."""


def allow_seeded_sampling() -> None:
    """Accept --enable-deterministic-inference, which makes SGLang honour sampling_seed, on CPU.

    SGLang refuses it with torch_native attention, because its batch-invariant kernels are triton.
    """
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None
