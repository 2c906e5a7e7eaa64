"""Patches of engines without CUDA: each names its check, and the option that switches it off."""

from mcore_rl.device.replaced.entry import Scope, Times
from mcore_rl.device.replaced.sglang_on_cpu import PATCHES
from tests.support import sglang_on_cpu_checks


def test_every_patch_names_a_check_that_runs() -> None:
    checks = {patch.test.partition("[")[2].rstrip("]") for patch in PATCHES}
    assert checks <= sglang_on_cpu_checks.checks().keys()
    assert len(checks) == len(PATCHES)


def test_they_are_of_a_cpu_alone_and_compiled_code_can_be_switched_off() -> None:
    assert {(patch.scope, patch.runs) for patch in PATCHES} == {(Scope.CPU, Times.NEVER)}
    off = {patch.function for patch in PATCHES if patch.switch == "rollout.compiled=false"}
    assert off == {"sample_in_one_pass", "run_in_compiled_code"}
