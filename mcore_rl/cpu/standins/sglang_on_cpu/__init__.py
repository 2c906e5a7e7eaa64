"""Patches that let SGLang serve on CPU. Each of its processes calls `apply_patches()`.

Each patch is one function in PATCHES whose docstring says why it is needed. No patch changes what
SGLang computes on a GPU. docs/patches.md lists them, and
tests/scenarios/device/test_sglang_on_cpu.py has a test for each that fails once SGLang works
without it.
"""

from collections.abc import Callable
from functools import cache

from sglang_on_cpu.adapters import keep_adapters_in_plain_memory
from sglang_on_cpu.attention import (
    absorb_latents,
    admit_torch_native,
    batch_attention,
    rotate_without_yarn,
)
from sglang_on_cpu.data_parallel import pad_batches, reduce_without_nccl, wait_for_requests
from sglang_on_cpu.delta_net import keep_accepted_states, norm_gated_outputs
from sglang_on_cpu.drafts import draft_in_torch, sample_drafts, share_without_cuda
from sglang_on_cpu.experts import (
    gate_shared_expert,
    group_experts,
    keep_routed_experts_in_plain_memory,
    unpack_experts,
)
from sglang_on_cpu.models import import_few_image_processors, import_models_when_asked
from sglang_on_cpu.native_forward import run_in_compiled_code
from sglang_on_cpu.processes import (
    fork_workers,
    keep_load_snapshots_in_temp_dir,
    leave_megatron_out,
    sleep_while_paused,
)
from sglang_on_cpu.sampling import allow_seeded_sampling, sample_in_one_pass
from sglang_on_cpu.sparse_attention import (
    choose_keys,
    keep_index_keys,
    leave_sparse_defaults_out,
    report_chosen_keys,
)

PATCHES: tuple[Callable[[], None], ...] = (
    fork_workers,
    leave_megatron_out,
    keep_load_snapshots_in_temp_dir,
    import_models_when_asked,
    import_few_image_processors,
    sleep_while_paused,
    batch_attention,
    absorb_latents,
    rotate_without_yarn,
    admit_torch_native,
    leave_sparse_defaults_out,
    keep_index_keys,
    choose_keys,
    report_chosen_keys,
    gate_shared_expert,
    norm_gated_outputs,
    keep_accepted_states,
    pad_batches,
    reduce_without_nccl,
    wait_for_requests,
    group_experts,
    unpack_experts,
    keep_routed_experts_in_plain_memory,
    keep_adapters_in_plain_memory,
    allow_seeded_sampling,
    sample_in_one_pass,
    sample_drafts,
    draft_in_torch,
    share_without_cuda,
    run_in_compiled_code,
)


@cache
def apply_patches() -> None:
    """Apply every patch in this process, once; call it before an engine is started."""
    for patch in PATCHES:
        patch()
