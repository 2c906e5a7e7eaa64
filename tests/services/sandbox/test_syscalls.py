"""The tables of system calls: the kernel's own numbers, and nothing dangerous on the list."""

import re
from pathlib import Path

import pytest

from mcore_rl.services.sandbox.seccomp import ALLOWED, NEEDED

HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
DANGEROUS = """
mount umount2 pivot_root chroot unshare setns ptrace process_vm_readv bpf keyctl add_key
io_uring_setup perf_event_open userfaultfd memfd_create memfd_secret shmget msgget semget
mq_open kexec_load init_module open_by_handle_at pidfd_getfd open_tree fsopen capset clone
clone3 socket sethostname reboot swapon acct quotactl ioperm iopl seccomp
"""


@pytest.mark.skipif(not HEADER.exists(), reason="no kernel headers")
def test_the_numbers_are_those_of_the_kernel() -> None:
    found = dict(re.findall(r"#define __NR_(\w+)\s+(\d+)", HEADER.read_text()))
    table = ALLOWED["x86_64"] | NEEDED["x86_64"]
    assert len(table) > 230
    known = {name: number for name, number in table.items() if name in found}
    assert len(known) > 230
    assert known == {name: int(found[name]) for name in known}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_nothing_dangerous_is_allowed(machine: str) -> None:
    assert not set(DANGEROUS.split()) & ALLOWED[machine].keys()
    numbers = [*ALLOWED[machine].values(), *NEEDED[machine].values()]
    assert len(numbers) == len(set(numbers))
