"""The filter decides as its tables say, for every number, and holds in a real process."""

import errno
import itertools
import os
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.services.sandbox import isolation
from mcore_rl.services.sandbox.seccomp import (
    ALLOW,
    ALLOWED,
    KILL,
    NEEDED,
    NEWEST,
    install,
    make_filter,
    ranges_of,
    refusal,
)

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def decide(program: bytes, number: int, arch: int, *arguments: int) -> int:
    """Run the filter as the kernel does, with the few instructions that it uses."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack(
        "=iIQ6Q", number if number < 1 << 31 else number - (1 << 32), arch, 0, *padded
    )
    code = list(struct.iter_unpack("=HBBI", program))
    at = 0
    value = 0
    while True:
        operation, if_true, if_false, constant = code[at]
        at += 1
        if operation == 0x06:
            return constant
        if operation == 0x20:
            value = struct.unpack_from("=I", data, constant)[0]
            continue
        is_true = {
            0x15: value == constant,
            0x25: value > constant,
            0x35: value >= constant,
            0x45: bool(value & constant),
        }[operation]
        at += if_true if is_true else if_false


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_every_number_is_decided_as_the_table_says(machine: str) -> None:
    program = make_filter(machine)
    arch = ARCHITECTURES[machine]
    checked = {name: number for name, number in NEEDED[machine].items() if name != "prlimit64"}
    allowed = {*ALLOWED[machine].values(), NEEDED[machine]["prlimit64"]}
    for number in range(NEWEST + 50):
        if number in (checked[name] for name in ("clone3", "clone", "socket", "socketpair")):
            continue
        if number in (checked[name] for name in ("ioctl", "prctl", "personality")):
            continue
        unknown = errno.EPERM if number <= NEWEST else errno.ENOSYS
        wanted = ALLOW if number in allowed else refusal(unknown)
        assert decide(program, number, arch) == wanted, number


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize(
    ("name", "arguments", "wanted"),
    [
        ("clone", (17,), ALLOW),
        ("clone", (0x10000000 | 17,), refusal(errno.EPERM)),
        ("clone", (0x40000000,), refusal(errno.EPERM)),
        ("clone3", (), refusal(errno.ENOSYS)),
        ("socket", (1, 1, 0), ALLOW),
        ("socket", (2, 2, 17), ALLOW),
        ("socket", (2, 1, 132), refusal(errno.EPROTONOSUPPORT)),
        ("socket", (40, 1, 0), refusal(errno.EAFNOSUPPORT)),
        ("socket", (16, 3, 0), refusal(errno.EAFNOSUPPORT)),
        ("socketpair", (1, 1, 0), ALLOW),
        ("ioctl", (0, 0x5401), ALLOW),
        ("ioctl", (0, 0x5412), refusal(errno.EPERM)),
        ("ioctl", (0, 1 << 32 | 0x5412), refusal(errno.EPERM)),
        ("prctl", (15,), ALLOW),
        ("prctl", (22,), refusal(errno.EINVAL)),
        ("personality", (0xFFFFFFFF,), ALLOW),
        ("personality", (0x0040000,), refusal(errno.EPERM)),
    ],
)
def test_arguments_are_checked(
    machine: str, name: str, arguments: tuple[int, ...], wanted: int
) -> None:
    number = NEEDED[machine][name]
    assert decide(make_filter(machine), number, ARCHITECTURES[machine], *arguments) == wanted


def test_foreign_conventions_end_the_program() -> None:
    program = make_filter("x86_64")
    assert decide(program, 0, 0x40000003) == KILL
    assert decide(program, 0x40000000, ARCHITECTURES["x86_64"]) == KILL


@given(st.lists(st.integers(0, 500)))
def test_ranges_hold_the_numbers_and_no_others(numbers: list[int]) -> None:
    ranges = ranges_of(numbers)
    assert {n for first, last in ranges for n in range(first, last + 1)} == set(numbers)
    assert all(a[1] + 1 < b[0] for a, b in itertools.pairwise(ranges))


def test_another_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        make_filter("riscv64")


def test_the_kernel_takes_the_filter() -> None:
    child = os.fork()
    if child == 0:
        try:
            isolation.drop_rights()
            install(make_filter(isolation.MACHINE))
            os.getpid()
            with socket.socket(socket.AF_UNIX):
                pass
            try:
                socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
            except OSError as error:
                os._exit(7 if error.errno == errno.EAFNOSUPPORT else 8)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
