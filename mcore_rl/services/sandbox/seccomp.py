"""Assembles the filter of system calls: what is not listed fails, foreign ABIs end the program.

The package that would do it (pyseccomp) had its last release in 2021 and needs libseccomp on every
machine; the program here is a list of ranges of numbers and seven calls with checked arguments.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable

from mcore_rl.services.sandbox.syscalls import ALLOWED, NEEDED, NEWEST

_LOAD, _RETURN = 0x20, 0x06
_JUMP_EQUAL, _JUMP_GREATER, _JUMP_AT_LEAST, _JUMP_ANY_BIT = 0x15, 0x25, 0x35, 0x45
_NUMBER_OFFSET, _ARCH_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
ALLOW, KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2

_NAMESPACE_FLAGS = 0x7E020000
"""CLONE_NEW*: cgroup, uts, ipc, user, pid, net and mount namespaces."""
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6. The namespace of the network has no interface that is up."""
_PROTOCOLS = (0, 6, 17)
"""The default, TCP and UDP."""
_TERMINAL_TRICKS = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which type into a terminal."""
_PRCTL_OPTIONS = (1, 2, 3, 4, 15, 16, 23, 29, 30, 36, 37, 38, 39, 41, 42, 0x53564D41)
"""Death signal, dumpable, names, timer slack, subreaper, no_new_privs, huge pages, VMA names."""
_PERSONALITIES = (0, 0xFFFFFFFF)

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false (both counted from the next instruction), constant."""


def refusal(number: int) -> int:
    """Return the action that lets a call fail with the errno `number`."""
    return _ERRNO | number


def make_filter(machine: str) -> bytes:
    """Return the program for `machine`, as an array of struct sock_filter.

    Raises ValueError for a machine without a table of system calls.
    """
    if machine not in _ARCHITECTURES:
        raise ValueError(f"no filter of system calls for {machine}: use {sorted(_ARCHITECTURES)}")
    needed = NEEDED[machine]
    program: list[Instruction] = [
        _load(_ARCH_OFFSET),
        (_JUMP_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, KILL),
        _load(_NUMBER_OFFSET),
        (_JUMP_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, KILL),
        # Libraries take ENOSYS as "this kernel is older", and use an older call instead.
        *_on_number(needed["clone3"], [(_RETURN, 0, 0, refusal(errno.ENOSYS))]),
        *_on_number(needed["clone"], _refuse_bits(0, _NAMESPACE_FLAGS)),
        *_on_number(needed["socket"], _check_socket()),
        *_on_number(needed["socketpair"], _allow_only(0, _FAMILIES, errno.EAFNOSUPPORT)),
        *_on_number(needed["ioctl"], _refuse_values(1, _TERMINAL_TRICKS)),
        *_on_number(needed["prctl"], _allow_only(0, _PRCTL_OPTIONS, errno.EINVAL)),
        *_on_number(needed["personality"], _allow_only(0, _PERSONALITIES, errno.EPERM)),
    ]
    allowed = [*ALLOWED[machine].values(), needed["prlimit64"]]
    for first, last in ranges_of(allowed):
        program += [
            (_JUMP_GREATER, 3, 0, last),
            (_JUMP_AT_LEAST, 0, 1, first),
            (_RETURN, 0, 0, ALLOW),
            (_RETURN, 0, 0, refusal(errno.EPERM)),
        ]
    program += [
        (_JUMP_GREATER, 1, 0, NEWEST),
        (_RETURN, 0, 0, refusal(errno.EPERM)),
        (_RETURN, 0, 0, refusal(errno.ENOSYS)),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def ranges_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers as (first, last), in ascending order."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges


def install(program: bytes) -> None:
    """Filter the system calls of this thread and its children from now on; OSError if refused.

    The thread must have set no_new_privs.
    """
    code = ctypes.create_string_buffer(program, len(program))
    pointer = ctypes.addressof(code)
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, pointer))
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = [_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(header), 0, 0]
    if libc.prctl(*map(ctypes.c_ulong, arguments)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_SECCOMP): {os.strerror(number)}")


def _load(offset: int) -> Instruction:
    return (_LOAD, 0, 0, offset)


def _argument(index: int) -> Instruction:
    """Load the lower half of an argument, which is all that the kernel reads of an int."""
    return _load(_ARGUMENTS_OFFSET + 8 * index)


def _on_number(number: int, block: list[Instruction]) -> list[Instruction]:
    """Return a block that runs if the call has this number; it must end in a return."""
    return [(_JUMP_EQUAL, 0, len(block), number), *block]


def _refuse_bits(index: int, mask: int) -> list[Instruction]:
    return [
        _argument(index),
        (_JUMP_ANY_BIT, 0, 1, mask),
        (_RETURN, 0, 0, refusal(errno.EPERM)),
        (_RETURN, 0, 0, ALLOW),
    ]


def _refuse_values(index: int, values: tuple[int, ...]) -> list[Instruction]:
    tests = [(_JUMP_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [
        _argument(index),
        *tests,
        (_RETURN, 0, 0, ALLOW),
        (_RETURN, 0, 0, refusal(errno.EPERM)),
    ]


def _allow_only(index: int, values: tuple[int, ...], error: int) -> list[Instruction]:
    return [*_require(index, values, error), (_RETURN, 0, 0, ALLOW)]


def _require(index: int, values: tuple[int, ...], error: int) -> list[Instruction]:
    """Return instructions that fall through if the argument is one of the values."""
    tests = [(_JUMP_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [_argument(index), *tests, (_RETURN, 0, 0, refusal(error))]


def _check_socket() -> list[Instruction]:
    return [
        *_require(0, _FAMILIES, errno.EAFNOSUPPORT),
        *_allow_only(2, _PROTOCOLS, errno.EPROTONOSUPPORT),
    ]
