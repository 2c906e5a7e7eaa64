"""Finds which languages this machine can run, and says how each is compiled and run.

Commands are absolute, as links such as /etc/alternatives do not exist in a box. `{memory}` in a
command is the limit of memory in MiB that its heap may take.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_rl.services.sandbox.limits import Limits

_VERSION_S = 60.0
_SYSTEM = (
    *("/bin", "/lib", "/lib32", "/lib64"),
    *(f"/usr/{name}" for name in ("bin", "lib", "lib32", "lib64", "libexec", "include", "share")),
    *(f"/usr/local/{name}" for name in ("bin", "lib", "include")),
)
_OF_PREFIX = ("bin", "lib", "lib64", "include", "pyvenv.cfg")
"""Programs see only these of a Python: beside them lie files such as pip.conf, with passwords."""
_PLACES = ("~/.cargo/bin", "/usr/local/go/bin", "~/go/bin")
_TYPES_AWAY = ("--experimental-transform-types", "--experimental-strip-types")
"""Options by which Node runs TypeScript, the better first, which also knows enums."""
_HEAP_SHARE = 0.75
ALIASES = {
    "py": "python",
    "python3": "python",
    "c++": "cpp",
    "golang": "go",
    "js": "nodejs",
    "javascript": "nodejs",
    "node": "nodejs",
    "ts": "typescript",
    "sh": "bash",
    "shell": "bash",
    "sqlite": "sql",
}
EXECUTABLE = "program"
"""The file that compilers of machine code write."""


@dataclass(frozen=True)
class Language:
    """How programs of a language run.

    source           name of the program's file in its box
    run              command; empty: the Python that is already started runs the source
    compile          command, or empty
    paths            folders of the machine that its programs read, beside the system's
    environment      variables that its commands need, as (name, value)
    reserves_memory  it reserves far more addresses than it uses
    min_processes    processes and threads that the runtime itself needs
    min_memory_mib   memory that the compiler needs
    """

    name: str
    source: str
    run: tuple[str, ...] = ()
    compile: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    reserves_memory: bool = False
    min_processes: int = 1
    min_memory_mib: int = 1024
    min_files_mib: int = 64

    def run_command(self, memory_mib: int) -> tuple[str, ...]:
        heap = str(max(int(memory_mib * _HEAP_SHARE), 16))
        return tuple(word.replace("{memory}", heap) for word in self.run)

    def compile_limits(self, limits: Limits, wall_s: float) -> Limits:
        """Return `limits` with what the compiler needs in addition."""
        return replace(
            limits,
            wall_s=wall_s,
            cpu_s=max(limits.cpu_s, int(wall_s) + 1) * 2,
            memory_mib=max(limits.memory_mib, self.min_memory_mib),
            processes=max(limits.processes, self.min_processes, 64),
            files_mib=max(limits.files_mib, self.min_files_mib),
            open_files=max(limits.open_files, 256),
        )

    @property
    def is_executable(self) -> bool:
        """Return whether its compiler makes one file, EXECUTABLE, that runs by itself."""
        return self.run == (f"/box/{EXECUTABLE}",)

    def run_limits(self, limits: Limits) -> Limits:
        """Return `limits` with the threads and descriptors that the runtime itself needs."""
        return replace(limits, processes=max(limits.processes, self.min_processes))


def find_languages() -> dict[str, Language]:
    """Return the languages of this machine by name."""
    return {language.name: language for language in _find()}


def choose(languages: dict[str, Language], name: str) -> Language:
    """Return a language by a name or alias; ValueError if this machine does not have it."""
    known = ALIASES.get(name.lower(), name.lower())
    if known not in languages:
        raise ValueError(
            f"language={name!r}: this machine has no {known}; it has {', '.join(languages)}."
            " Install it and start the sandbox anew"
        )
    return languages[known]


def readable_paths(languages: dict[str, Language]) -> list[str]:
    """Return the folders and files of the machine that programs may read."""
    wanted = [*_SYSTEM]
    real = Path(sys.executable).resolve().parents[1]
    for prefix in {sys.prefix, sys.base_prefix, str(real)}:
        wanted += [f"{prefix}/{name}" for name in _OF_PREFIX]
    wanted += [path for language in languages.values() for path in language.paths]
    return sorted({path for path in wanted if os.path.exists(path)}, key=len)


def _find() -> Iterator[Language]:
    yield Language("python", "program.py")
    if bash := _which("bash"):
        yield Language("bash", "program.sh", (bash, "program.sh"))
    if sqlite := _which("sqlite3"):
        yield Language("sql", "program.sql", (sqlite, "-bail", ":memory:", ".read program.sql"))
    gcc = _which("gcc")
    if gcc:
        command = (gcc, "-O2", "-std=gnu17", "program.c", "-o", "program", "-lm")
        yield Language("c", "program.c", ("/box/program",), command)
    if gpp := _which("g++"):
        command = (gpp, "-O2", "-std=gnu++17", "program.cpp", "-o", "program")
        yield Language("cpp", "program.cpp", ("/box/program",), command)
    yield from _find_go()
    if gcc:
        yield from _find_rust(gcc)
    yield from _find_java()
    yield from _find_node()


def _find_go() -> Iterator[Language]:
    if go := _which("go"):
        home = Path(go).parents[1]
        command = (go, "build", "-o", "program", "program.go")
        yield Language(
            "go",
            "program.go",
            ("/box/program",),
            command,
            (str(home),),
            (("GO111MODULE", "off"), ("GOTOOLCHAIN", "local"), ("CGO_ENABLED", "0")),
            reserves_memory=True,
            min_processes=32,
            min_memory_mib=2048,
            min_files_mib=512,
        )


def _find_rust(linker: str) -> Iterator[Language]:
    rustc = _which("rustc")
    home = _output(rustc, "--print", "sysroot") if rustc else ""
    if home:
        # rustup's rustc asks its settings for the toolchain, which are not in the box.
        real = f"{home}/bin/rustc"
        command = (real, "-O", "--sysroot", home, "-C", f"linker={linker}", "program.rs")
        yield Language(
            "rust",
            "program.rs",
            ("/box/program",),
            command,
            (home,),
            _libraries(f"{home}/lib"),
            min_processes=16,
        )


def _find_java() -> Iterator[Language]:
    java = _which("java")
    javac = _which("javac")
    if not (java and javac):
        return
    home = Path(java).parents[1]
    security = (home / "conf/security/java.security").resolve()
    paths = [str(home)]
    if security.is_relative_to("/etc") and security.exists():
        paths.append(str(Path(*security.parts[:3])))
    quiet = ("-XX:+UseSerialGC", "-XX:-UsePerfData", "-XX:TieredStopAtLevel=1")
    yield Language(
        "java",
        "Main.java",
        (java, "-Xmx{memory}m", "-Xss8m", *quiet, "-cp", "/box", "Main"),
        (javac, "-J-Xmx512m", *(f"-J{word}" for word in quiet), "-cp", "/box", "Main.java"),
        tuple(paths),
        _libraries(f"{home}/lib", f"{home}/lib/server", f"{home}/lib/jli"),
        reserves_memory=True,
        min_processes=48,
    )


def _find_node() -> Iterator[Language]:
    node = _which("node")
    if not node:
        return
    home = str(Path(node).parents[1])
    paths = () if home in ("/usr", "/usr/local", "/") else (f"{home}/bin", f"{home}/lib")
    command = (node, "--max-old-space-size={memory}")
    nodejs = Language("nodejs", "program.js", (*command, "program.js"), (), paths, (), True, 32)
    yield nodejs
    typed = replace(nodejs, name="typescript", source="program.ts")
    if tsx := _which("tsx"):
        yield replace(typed, run=(*command, tsx, "program.ts"), paths=(*paths, _packages_of(tsx)))
        return
    for option in _TYPES_AWAY:
        if _output(node, option, "--version"):
            yield replace(typed, run=(*command, "--no-warnings", option, "program.ts"))
            return


def _packages_of(tsx: str) -> str:
    """Return the folder with tsx and the packages that it needs, which npm puts beside it."""
    folders = [path for path in Path(tsx).parents if path.name == "node_modules"]
    return str(folders[0] if folders else Path(tsx).parents[1])


def _libraries(*folders: str) -> tuple[tuple[str, str], ...]:
    """Return the variable that names folders of libraries; a box has no /proc to find them by."""
    return (("LD_LIBRARY_PATH", ":".join(folders)),)


def _which(name: str) -> str:
    """Return the real path of a program, or an empty text."""
    places = [os.environ.get("PATH", os.defpath), *map(os.path.expanduser, _PLACES)]
    found = shutil.which(name, path=os.pathsep.join(places))
    # A link decides by its own name what it is: rustup's rustc, and compilers behind a cache.
    return "" if found is None else os.path.realpath(found) if name != "rustc" else found


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_VERSION_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
