"""What SGLang needs changed to serve well on CPU; `apply_patches()` in every one of its processes.

Each patch is one function in PATCHES, says why it is needed, and leaves what SGLang computes as it is.
"""

from collections.abc import Callable

from sglang_on_cpu.attention import (
    absorb_latents,
    admit_torch_native,
    batch_attention,
    rotate_without_yarn,
)
from sglang_on_cpu.data_parallel import pad_batches, reduce_without_nccl, wait_for_requests
from sglang_on_cpu.experts import keep_routed_experts_in_plain_memory, run_local_experts
from sglang_on_cpu.kernels import gate_shared_expert
from sglang_on_cpu.models import import_models_when_asked
from sglang_on_cpu.processes import (
    fork_workers,
    keep_load_snapshots_in_temp_dir,
    leave_megatron_out,
    sleep_while_paused,
)
from sglang_on_cpu.sampling import allow_seeded_sampling

PATCHES: tuple[Callable[[], None], ...] = (
    fork_workers,
    leave_megatron_out,
    keep_load_snapshots_in_temp_dir,
    import_models_when_asked,
    sleep_while_paused,
    batch_attention,
    absorb_latents,
    rotate_without_yarn,
    admit_torch_native,
    gate_shared_expert,
    pad_batches,
    reduce_without_nccl,
    wait_for_requests,
    run_local_experts,
    keep_routed_experts_in_plain_memory,
    allow_seeded_sampling,
)


def apply_patches() -> None:
    """Install every patch in this process, which must not have started an engine yet."""
    for patch in PATCHES:
        patch()
