"""Makes docs/patches.md of the registry; `python -m` prints it."""

import sys
from collections.abc import Iterable, Sequence

from mcore_rl.device.replaced import PATCHES, in_engines, megatron_on_cpu, on_gpus, sglang_on_cpu
from mcore_rl.device.replaced.entry import Patch, Times

_HEAD = """\
# Patches: names of other packages that are replaced

<!-- Made by `make patches` from mcore_rl/device/replaced/; a test compares the two. -->

mcore_rl assigns to names of torch, megatron-core, SGLang, Ray and others. This page lists all of
them. A test finds assignments in the code that are missing here, and rows whose assignment is gone.
Subclasses that only mcore_rl makes, hooks that torch offers, and fields that upstream documents to
be set replace nothing, and are not listed.

{summary}

## On a GPU

A patch whose code runs in every step of a run with GPUs is off by default until it was measured on
a GPU. The exceptions are those without which results would be wrong; their rows say how.
"""
_TITLES = {
    "training": on_gpus.TRAINING,
    "engines": in_engines.ENGINES,
    "all processes": on_gpus.EVERYWHERE,
}
APPLIED_BY_CHECKS = (
    *("know_linear_in_latent_attention", "recompute_without_fp8", "use_fused_adam"),
    *("allow_precision_aware_adam", "use_te_workalike", "use_torch_delta_net"),
    *("use_torch_mamba", "know_linear_in_latent_experts"),
)
"""The patches that `use_torch_modules_on_cuda` has `setup_device` apply."""
_GPU_COLUMNS = ("patch", "replaces", "why", "runs on a GPU", "off with", "needed, shown by")
_CPU_COLUMNS = ("patch", "replaces", "why", "on a GPU")
_ON_CPU = """\

## Megatron on a CPU

Training ranks without CUDA apply these, in this order. `leave_compiler_out` is called by
`run_eagerly`. With CUDA none is applied. On a machine with CUDA and without Transformer Engine the
[GPU checks](doctor.md#gpu-checks) apply some:
{checks}.
"""
_ENGINES_ON_CPU = """\

## SGLang on a CPU

Engine processes without CUDA apply these, in this order. Their modules lie in
`mcore_rl/cpu/standins/`.
"""
_NAMES = """\

## Every name

| name | patch | where |
|---|---|---|
"""


def make_document() -> str:
    """Return the Markdown of docs/patches.md."""
    parts = [_HEAD.format(summary=_summary())]
    for title, patches in _TITLES.items():
        rows = [_gpu_row(patch) for patch in patches]
        parts.append(f"\n### In {title}\n\n{_table(_GPU_COLUMNS, rows)}")
    checks = ",\n".join(f"`{name}`" for name in APPLIED_BY_CHECKS)
    for heading, patches in (
        (_ON_CPU.format(checks=checks), megatron_on_cpu.PATCHES),
        (_ENGINES_ON_CPU, sglang_on_cpu.PATCHES),
    ):
        rows = [(f"`{p.function}`", p.by, _off(p), p.on_gpu) for p in patches]
        parts.append(f"{heading}\n{_table(_CPU_COLUMNS, rows)}")
    pairs = [(name, patch) for patch in PATCHES for name in patch.names]
    names = sorted(pairs, key=lambda pair: (pair[0], pair[1].where))
    return "".join(parts) + _NAMES + "".join(_name_row(*pair) for pair in names)


def _summary() -> str:
    on_gpus = [patch for patches in _TITLES.values() for patch in patches]
    in_steps = [patch for patch in on_gpus if patch.runs is Times.IN_STEPS]
    num_off = sum(patch.opt_in for patch in in_steps)
    return (
        f"A run with GPUs has {len(on_gpus)} patches. {len(in_steps)} of them run in every step of"
        f" recipes that need\nthem, and {num_off} of these are off unless a recipe asks for them."
        f" A run without CUDA has\n{len(megatron_on_cpu.PATCHES)} more in its training ranks and"
        f" {len(sglang_on_cpu.PATCHES)} in its engines."
    )


def _gpu_row(patch: Patch) -> Sequence[str]:
    where = f"`{patch.function}` ({patch.scope})"
    reason = f"{patch.reason}. Without it {patch.required}" if patch.required else patch.reason
    runs = str(patch.runs)
    if patch.runs is Times.IN_STEPS:
        runs += f"; [measured]({patch.measured})" if patch.measured else "; not measured"
        runs += "; off by default" if patch.opt_in else ""
    return where, patch.by, reason, runs, patch.switch or "nothing", _test(patch)


def _test(patch: Patch) -> str:
    file, _, name = patch.test.partition("::")
    return f"`{name}` in {file}" if name else "no test"


def _off(patch: Patch) -> str:
    return f"{patch.reason}; off with `{patch.switch}`" if patch.switch else patch.reason


def _name_row(name: str, patch: Patch) -> str:
    return f"| `{name}` | `{patch.function}` | {patch.where.partition(':')[0]} |\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return (
        "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
        .replace("| --- |", "|---|")
        .replace(" --- |", "---|")
    )


if __name__ == "__main__":
    sys.stdout.write(make_document())
