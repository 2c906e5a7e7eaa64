"""Programs that mean harm: each prints BAD and its loot, if it got any."""

from dataclasses import dataclass

PRELUDE = """
import ctypes, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
PORT, ABSTRACT, PATH, HOME = {port}, {abstract!r}, {path!r}, {home!r}
def bad(*what):
    print('BAD', *what, flush=True)
def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    if result >= 0: bad('system call', number, 'gave', result)
def connects(family, address):
    try:
        with socket.socket(family) as s:
            s.settimeout(1); s.connect(address); bad('reached', address)
    except OSError: pass
def reads(path):
    try: bad('read', path, open(path, 'rb').read(40))
    except OSError: pass
def lists(path):
    try: bad('listed', path, os.listdir(path)[:9])
    except OSError: pass
"""
"""In front of each program; the names in braces are filled in by the test."""


@dataclass(frozen=True)
class Hostile:
    """A program, and the files it would have handed out."""

    source: str
    fetch: tuple[str, ...] = ()


_FILL = "\nexcept (OSError, MemoryError): pass\n"

PROGRAMS = {
    # Too much of everything.
    "fork bomb": "while True:\n try: os.fork()\n except OSError: pass",
    "thread bomb": "import threading\ntry:\n while True:"
    " threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nexcept RuntimeError:"
    " pass\nos._exit(0)",
    "memory bomb": "held = []\nwhile True: held.append(bytearray(b'x') * (4 << 20))",
    "memory in many processes": "for i in range(12):\n if os.fork() == 0:\n  held = []\n"
    "  while True: held.append(b'x' * (4 << 20))\ntime.sleep(60)",
    "memfd bomb": "for i in range(50):\n try: f = os.memfd_create('x')\n except OSError: continue\n"
    " for j in range(64): os.write(f, b'x' * (1 << 20))\n bad('memfd', i)",
    "shared mapping bomb": "import mmap\nheld = []\ntry:\n while len(held) < 600:\n"
    "  held.append(mmap.mmap(-1, 4 << 20)); held[-1].write(b'x' * (4 << 20))\n"
    f" bad('2.4 GiB'){_FILL}",
    "System V memory bomb": "for i in range(64):\n n = libc.shmget(0, 64 << 20, 0o1600)\n"
    " if n >= 0: bad('segment', n)",
    "POSIX memory bomb": "try:\n with open('/dev/shm/x', 'wb') as f:\n"
    f"  for i in range(600): f.write(b'x' * (1 << 20))\n bad('600 MiB'){_FILL}",
    "file bomb": "n = 0\ntry:\n for i in range(300):\n  with open(f'/box/{{i}}', 'wb') as f:"
    " f.write(b'x' * (1 << 20))\n  n += 1\nexcept OSError: pass\nif n > 16: bad(n, 'MiB')",
    "inode bomb": "n = 0\ntry:\n while n < 100000: os.close(os.open(f'/box/f{{n}}', os.O_CREAT));"
    " n += 1\nexcept OSError: pass\nif n > 5000: bad(n, 'files')",
    "folder bomb": "n = 0\ntry:\n while n < 100000: os.mkdir('d'); os.chdir('d'); n += 1\n"
    "except OSError: pass\nif n > 5000: bad(n, 'folders')",
    "output bomb": "while True: os.write(1, b'x' * 65536)",
    "error bomb": "while True: os.write(2, b'x' * 65536)",
    "zip bomb": "import zlib\ndata = zlib.compress(bytes(64 << 20), 9)\nheld = []\ntry:\n"
    f" while len(held) < 40: held.append(zlib.decompress(data))\n bad('2.5 GiB'){_FILL}",
    "pipe bomb": "import fcntl\nn = 0\ntry:\n while True:\n  r, w = os.pipe();"
    " os.set_blocking(w, False)\n  n += os.write(w, b'x' * (1 << 20))\nexcept OSError: pass\n"
    "if n > 64 << 20: bad(n)",
    "socket bomb": "n = 0\nheld = []\ntry:\n while True:\n  a, b = socket.socketpair();"
    " held += [a, b]; a.setblocking(False)\n  n += a.send(b'x' * (1 << 20))\nexcept OSError:"
    " pass\nif n > 64 << 20: bad(n)",
    "timer bomb": "while True: libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) and"
    " os._exit(0)",
    # Reading.
    "processes of the host": "lists('/proc'); reads('/proc/1/environ'); reads('/proc/self/maps')",
    "etc": "reads('/etc/passwd'); reads('/etc/shadow'); reads('/etc/pip.conf')\n"
    "if os.path.isdir('/etc'):\n seen = [n for n in os.listdir('/etc') if 'java' not in n]\n"
    " if seen: bad(seen)",
    "home": "reads(HOME + '/.bashrc'); reads(HOME + '/.netrc'); lists(HOME + '/.ssh');"
    " lists('/home')",
    "environment": "names = set(os.environ) - {{'PATH', 'HOME', 'TMPDIR', 'LANG',"
    " 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'}}\nif names: bad(names)",
    "pip.conf": "reads(sys.prefix + '/pip.conf'); reads(sys.base_prefix + '/pip.conf')\n"
    "seen = set(os.listdir(sys.prefix)) - {{'bin', 'lib', 'lib64', 'include', 'pyvenv.cfg'}}\n"
    "if seen: bad(seen)",
    "cgroups and sysfs": "lists('/sys'); lists('/sys/fs/cgroup'); lists('/run'); lists('/var')",
    "inherited descriptors": "n = [i for i in range(3, 60) if libc.fcntl(i, 1) >= 0]\nif n: bad(n)",
    "memory of the parent": "call(310, 1, None, 0, None, 0, 0)\n"
    "call(310, os.getppid(), 0, 0, 0, 0)",
    # Reaching.
    "engine on loopback": "connects(socket.AF_INET, ('127.0.0.1', PORT))",
    "engine on IPv6": "connects(socket.AF_INET6, ('::1', PORT))",
    "Ray": "for p in (6379, 8265, 10001, PORT): connects(socket.AF_INET, ('127.0.0.1', p))",
    "metadata service": "connects(socket.AF_INET, ('169.254.169.254', 80))",
    "abstract socket": "connects(socket.AF_UNIX, '\\0' + ABSTRACT)",
    "socket with a path": "connects(socket.AF_UNIX, PATH)",
    "AF_VSOCK": "try: socket.socket(40, socket.SOCK_STREAM); bad('vsock')\nexcept OSError: pass",
    "AF_NETLINK": "try: socket.socket(16, socket.SOCK_RAW); bad('netlink')\nexcept OSError: pass",
    "other families": "for f in (3, 4, 5, 9, 17, 29, 31, 38, 41, 44, 45):\n"
    " try: socket.socket(f, socket.SOCK_RAW); bad('family', f)\n except OSError: pass",
    "SCTP": "try: socket.socket(2, 1, 132); bad('sctp')\nexcept OSError: pass",
    # Numbers are those of x86_64, which is what the machine of the test must have.
    "io_uring": "call(425, 4, ctypes.create_string_buffer(256))",
    "bpf": "call(321, 0, ctypes.create_string_buffer(128), 128)",
    "keyctl": "call(250, 0, -3, 1)\ncall(248, b'user', b'x', b'y', 1, -3)\n"
    "call(249, b'a', b'b', 0, 0)",
    "ptrace": "call(101, 0, 0, 0, 0); call(101, 16, 1, 0, 0)",
    "perf_event": "call(298, ctypes.create_string_buffer(128), 0, -1, -1, 0)",
    "userfaultfd": "call(323, 1)",
    "user namespace": "call(272, 0x10000000); call(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "clone3": "call(435, ctypes.create_string_buffer(88), 88)",
    "other namespaces": "call(272, 0x20000); call(272, 0x40000000); call(308, 0, 0)",
    "mount": "call(165, b'none', b'/box', b'tmpfs', 0, 0); call(166, b'/box', 2)\n"
    "call(428, 0, b'/', 0)",
    "chroot": "call(161, b'/box'); call(155, b'/box', b'/box')",
    "modules and kexec": "call(175, 0, 0, b''); call(313, 0, b'', 0); call(246, 0, 0, 0, 0)",
    "handles": "call(304, -100, ctypes.create_string_buffer(64), 0); call(438, 3, 0, 0)",
    "rights": "for f in (os.setuid, os.setgid):\n try: f(0); bad(f)\n except OSError: pass\n"
    "call(126, ctypes.create_string_buffer(b' \\x08\\x05\\x20' + bytes(4)), b'\\xff' * 24)",
    "host name": "call(170, b'x', 1)",
    "typing into a terminal": "call(16, 0, 0x5412, b'x')",
    "foreign system calls": "import mmap\nm = mmap.mmap(-1, 4096, prot=7)\n"
    "m.write(b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3')\n"
    "a = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
    "bad('int 0x80', ctypes.CFUNCTYPE(ctypes.c_int)(a)())",
    # Outliving.
    "daemon": "if os.fork() == 0:\n os.setsid()\n if os.fork() == 0: time.sleep(300)\n os._exit(0)",
    "orphans that hold the output": "for i in range(3):\n if os.fork() == 0: time.sleep(300)",
    "SIGSTOP": "os.kill(os.getpid(), signal.SIGSTOP)",
    "stopped parent": "if os.fork(): os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(300)",
    "kill all": "try: os.kill(-1, 9)\nexcept OSError: pass\ntime.sleep(0.1)",
    "kill the first": "for s in (9, 15, 2, 1, 17, 19):\n"
    " try: os.kill(1, s)\n except OSError: pass\ntime.sleep(0.2)",
    "deaf to signals": "for s in range(1, 65):\n try: signal.signal(s, signal.SIG_IGN)\n"
    " except (OSError, ValueError): pass\nwhile True: pass",
    "file locks": "import fcntl\nf = open('/usr/bin/env')\ntry: fcntl.flock(f, fcntl.LOCK_EX)\n"
    "except OSError: pass\ntime.sleep(300)",
    "writes to runtimes": "for p in (os.__file__, sys.executable, '/usr/x', '/x', '/dev/x'):\n"
    " try: open(p, 'ab').write(b'x'); bad('wrote', p)\n except OSError: pass",
}
"""Name -> source after the prelude."""

FILES_OUT = {
    "symbolic link out": Hostile("os.symlink('/usr/bin/env', 'out')", ("out",)),
    "linked folder out": Hostile("os.symlink('/usr/bin', 'd')", ("d/env",)),
    "hard link out": Hostile("try: os.link('/usr/bin/env', 'out')\nexcept OSError: pass", ("out",)),
    "pipe out": Hostile("os.mkfifo('out')", ("out",)),
    "device out": Hostile("try: os.mknod('out', 0o20666, 0x105)\nexcept OSError: pass", ("out",)),
    "socket out": Hostile("socket.socket(socket.AF_UNIX).bind('out')", ("out",)),
    "folder out": Hostile("os.mkdir('out')", ("out",)),
    "link that changes": Hostile(
        "if os.fork() == 0:\n while True:\n  os.symlink('/usr/bin/env', 't'); os.rename('t', 'out')"
        "\n  open('t', 'w').close(); os.rename('t', 'out')\ntime.sleep(0.3)",
        ("out",),
    ),
}
"""Name -> a program and the files it hands out, none of which may have any bytes."""
