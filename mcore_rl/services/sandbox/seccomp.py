"""Assembles the filter of system calls: what is not listed fails, foreign ABIs end the program.

The package that would do it (pyseccomp) had its last release in 2021 and needs libseccomp on every
machine; the program here is a list of ranges of numbers and seven calls with checked arguments.

Numbers of system calls: those that programs may make, and those that are checked or our own.

From Linux's tables (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h).
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable

_NEEDED_X86_64 = """
capset=126 clone=56 clone3=435 ioctl=16 keyctl=250 mount_setattr=442 personality=135
pivot_root=155 prctl=157 prlimit64=302 socket=41 socketpair=53
"""
"""Calls of ours, and those whose arguments the filter looks at."""
_NEEDED_AARCH64 = """
capset=91 clone=220 clone3=435 ioctl=29 keyctl=219 mount_setattr=442 personality=92
pivot_root=41 prctl=167 prlimit64=261 socket=198 socketpair=199
"""
_ALLOWED_X86_64 = """
accept=43 accept4=288 access=21 alarm=37 arch_prctl=158 bind=49 brk=12 capget=125 chdir=80
chmod=90 chown=92 clock_getres=229 clock_gettime=228 clock_nanosleep=230 close=3 close_range=436
connect=42 copy_file_range=326 creat=85 dup=32 dup2=33 dup3=292 epoll_create=213
epoll_create1=291 epoll_ctl=233 epoll_pwait=281 epoll_pwait2=441 epoll_wait=232 eventfd=284
eventfd2=290 execve=59 execveat=322 exit=60 exit_group=231 faccessat=269 faccessat2=439
fadvise64=221 fallocate=285 fchdir=81 fchmod=91 fchmodat=268 fchmodat2=452 fchown=93
fchownat=260 fcntl=72 fdatasync=75 fgetxattr=193 flistxattr=196 flock=73 fork=57 fstat=5
fstatfs=138 fsync=74 ftruncate=77 futex=202 futex_waitv=449 futimesat=261 get_mempolicy=239
get_robust_list=274 getcpu=309 getcwd=79 getdents=78 getdents64=217 getegid=108 geteuid=107
getgid=104 getgroups=115 getitimer=36 getpeername=52 getpgid=121 getpgrp=111 getpid=39
getppid=110 getpriority=140 getrandom=318 getresgid=120 getresuid=118 getrlimit=97 getrusage=98
getsid=124 getsockname=51 getsockopt=55 gettid=186 gettimeofday=96 getuid=102 getxattr=191
inotify_add_watch=254 inotify_init=253 inotify_init1=294 inotify_rm_watch=255 kill=62 lchown=94
lgetxattr=192 link=86 linkat=265 listen=50 listxattr=194 llistxattr=195 lseek=8 lstat=6
madvise=28 membarrier=324 mincore=27 mkdir=83 mkdirat=258 mknod=133 mknodat=259 mmap=9
mprotect=10 mremap=25 msync=26 munlock=150 munlockall=152 munmap=11 nanosleep=35 newfstatat=262
open=2 openat=257 openat2=437 pause=34 pidfd_open=434 pidfd_send_signal=424 pipe=22 pipe2=293
poll=7 ppoll=271 pread64=17 preadv=295 preadv2=327 pselect6=270 pwrite64=18 pwritev=296
pwritev2=328 read=0 readahead=187 readlink=89 readlinkat=267 readv=19 recvfrom=45 recvmmsg=299
recvmsg=47 rename=82 renameat=264 renameat2=316 restart_syscall=219 rmdir=84 rseq=334
rt_sigaction=13 rt_sigpending=127 rt_sigprocmask=14 rt_sigqueueinfo=129 rt_sigreturn=15
rt_sigsuspend=130 rt_sigtimedwait=128 rt_tgsigqueueinfo=297 sched_get_priority_max=146
sched_get_priority_min=147 sched_getaffinity=204 sched_getattr=315 sched_getparam=143
sched_getscheduler=145 sched_rr_get_interval=148 sched_setaffinity=203 sched_setattr=314
sched_setparam=142 sched_setscheduler=144 sched_yield=24 select=23 sendfile=40
sendmmsg=307 sendmsg=46 sendto=44 set_robust_list=273 set_tid_address=218 setfsgid=123
setfsuid=122 setgid=106 setgroups=116 setitimer=38 setpgid=109 setpriority=141 setregid=114
setresgid=119 setresuid=117 setreuid=113 setrlimit=160 setsid=112 setsockopt=54 setuid=105
setxattr=188 shutdown=48 sigaltstack=131 signalfd=282 signalfd4=289 splice=275 stat=4 statfs=137
statx=332 symlink=88 symlinkat=266 sync=162 sync_file_range=277 syncfs=306 sysinfo=99 tee=276
tgkill=234 time=201 timer_create=222 timer_delete=226 timer_getoverrun=225 timer_gettime=224
timer_settime=223 timerfd_create=283 timerfd_gettime=287 timerfd_settime=286 times=100 tkill=200
truncate=76 umask=95 uname=63 unlink=87 unlinkat=263 utime=132 utimensat=280 utimes=235 vfork=58
vmsplice=278 wait4=61 waitid=247 write=1 writev=20
"""
_ALLOWED_AARCH64 = """
accept=202 accept4=242 bind=200 brk=214 capget=90 chdir=49 clock_getres=114 clock_gettime=113
clock_nanosleep=115 close=57 close_range=436 connect=203 copy_file_range=285 dup=23 dup3=24
epoll_create1=20 epoll_ctl=21 epoll_pwait=22 epoll_pwait2=441 eventfd2=19 execve=221
execveat=281 exit=93 exit_group=94 faccessat=48 faccessat2=439 fadvise64=223 fallocate=47
fchdir=50 fchmod=52 fchmodat=53 fchmodat2=452 fchown=55 fchownat=54 fcntl=25 fdatasync=83
fgetxattr=10 flistxattr=13 flock=32 fstat=80 fstatfs=44 fsync=82 ftruncate=46 futex=98
futex_waitv=449 get_mempolicy=236 get_robust_list=100 getcpu=168 getcwd=17 getdents64=61
getegid=177 geteuid=175 getgid=176 getgroups=158 getitimer=102 getpeername=205 getpgid=155
getpid=172 getppid=173 getpriority=141 getrandom=278 getresgid=150 getresuid=148 getrlimit=163
getrusage=165 getsid=156 getsockname=204 getsockopt=209 gettid=178 gettimeofday=169 getuid=174
getxattr=8 inotify_add_watch=27 inotify_init1=26 inotify_rm_watch=28 kill=129 lgetxattr=9
linkat=37 listen=201 listxattr=11 llistxattr=12 lseek=62 madvise=233 membarrier=283 mincore=232
mkdirat=34 mknodat=33 mmap=222 mprotect=226 mremap=216 msync=227 munlock=229 munlockall=231
munmap=215 nanosleep=101 newfstatat=79 openat=56 openat2=437 pidfd_open=434
pidfd_send_signal=424 pipe2=59 ppoll=73 pread64=67 preadv=69 preadv2=286 pselect6=72 pwrite64=68
pwritev=70 pwritev2=287 read=63 readahead=213 readlinkat=78 readv=65 recvfrom=207 recvmmsg=243
recvmsg=212 renameat=38 renameat2=276 restart_syscall=128 rseq=293 rt_sigaction=134
rt_sigpending=136 rt_sigprocmask=135 rt_sigqueueinfo=138 rt_sigreturn=139 rt_sigsuspend=133
rt_sigtimedwait=137 rt_tgsigqueueinfo=240 sched_get_priority_max=125 sched_get_priority_min=126
sched_getaffinity=123 sched_getattr=275 sched_getparam=121 sched_getscheduler=120
sched_rr_get_interval=127 sched_setaffinity=122 sched_setattr=274 sched_setparam=118
sched_setscheduler=119 sched_yield=124 sendfile=71 sendmmsg=269 sendmsg=211
sendto=206 set_robust_list=99 set_tid_address=96 setfsgid=152 setfsuid=151 setgid=144
setgroups=159 setitimer=103 setpgid=154 setpriority=140 setregid=143 setresgid=149 setresuid=147
setreuid=145 setrlimit=164 setsid=157 setsockopt=208 setuid=146 setxattr=5 shutdown=210
sigaltstack=132 signalfd4=74 splice=76 statfs=43 statx=291 symlinkat=36 sync=81
sync_file_range=84 syncfs=267 sysinfo=179 tee=77 tgkill=131 timer_create=107 timer_delete=111
timer_getoverrun=109 timer_gettime=108 timer_settime=110 timerfd_create=85 timerfd_gettime=87
timerfd_settime=86 times=153 tkill=130 truncate=45 umask=166 uname=160 unlinkat=35 utimensat=88
vmsplice=75 wait4=260 waitid=95 write=64 writev=66
"""


def _read(table: str) -> dict[str, int]:
    pairs = (word.split("=") for word in table.split())
    return {name: int(number) for name, number in pairs}


ALLOWED = {"x86_64": _read(_ALLOWED_X86_64), "aarch64": _read(_ALLOWED_AARCH64)}
"""For each machine: the calls that a program may make with any arguments."""
NEEDED = {"x86_64": _read(_NEEDED_X86_64), "aarch64": _read(_NEEDED_AARCH64)}
"""For each machine: the calls that the sandbox makes itself, or whose arguments it checks."""
NEWEST = 462
"""The newest number that this table knows, the same on all machines since Linux 5.0."""


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
        *_match_number(needed["clone3"], [(_RETURN, 0, 0, refusal(errno.ENOSYS))]),
        *_match_number(needed["clone"], _refuse_bits(0, _NAMESPACE_FLAGS)),
        *_match_number(needed["socket"], _check_socket()),
        *_match_number(needed["socketpair"], _allow_only(0, _FAMILIES, errno.EAFNOSUPPORT)),
        *_match_number(needed["ioctl"], _refuse_values(1, _TERMINAL_TRICKS)),
        *_match_number(needed["prctl"], _allow_only(0, _PRCTL_OPTIONS, errno.EINVAL)),
        *_match_number(needed["personality"], _allow_only(0, _PERSONALITIES, errno.EPERM)),
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


def _match_number(number: int, block: list[Instruction]) -> list[Instruction]:
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
