"""Processes of ranks and engines start without imports that they do not need."""

import subprocess
import sys

from mcore_rl.device import has_cuda

RANK = """
import sys
from mcore_rl.device import has_cuda, leave_compiler_out
leave_compiler_out()
import mcore_rl.train.actor
from megatron.core.fusions import fused_bias_geglu
compiled = hasattr(fused_bias_geglu.geglu, "_torchdynamo_orig_callable")
assert compiled == has_cuda(), "megatron-core's fused functions would be compiled"
"""
ENGINE_WORKER = """
import sys
import mcore_rl.cluster.rank_actor
import mcore_rl.workers.engine_worker
"""


def modules_of(program: str) -> set[str]:
    """Return the modules imported at the end of `program`, run in a process of its own."""
    print_modules = "\nprint(*sys.modules)"
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program + print_modules],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return set(process.stdout.splitlines()[-1].split())


def test_a_rank_without_cuda_leaves_torchs_compiler_out() -> None:
    modules = modules_of(RANK)
    assert "megatron.core" in modules
    assert ("torch._inductor.compile_fx" in modules) == has_cuda()


def test_an_engines_worker_does_not_import_torch() -> None:
    modules = modules_of(ENGINE_WORKER)
    assert "ray" in modules and "torch" not in modules
