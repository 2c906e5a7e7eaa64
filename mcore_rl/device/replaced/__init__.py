"""The registry of all names of other packages that this one replaces: data, and no imports of them.

`make patches` writes docs/patches.md. A house test compares the registry with
the assignments in the code.
"""

from mcore_rl.device.replaced import in_engines, megatron_on_cpu, on_gpus, sglang_on_cpu
from mcore_rl.device.replaced.entry import Patch

PATCHES: tuple[Patch, ...] = (
    *on_gpus.TRAINING,
    *in_engines.ENGINES,
    *on_gpus.EVERYWHERE,
    *megatron_on_cpu.PATCHES,
    *sglang_on_cpu.PATCHES,
)
