"""Sampling that repeats with a request's seed."""


def allow_seeded_sampling() -> None:
    """Accept --enable-deterministic-inference on CPU, which makes SGLang honor sampling_seed.

    SGLang rejects the option with torch_native attention because its batch-invariant kernels are
    written in triton.
    """
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None
