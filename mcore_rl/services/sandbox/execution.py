"""One request to run code: compiles and runs it in a box, and returns records and files."""

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mcore_rl.process.errors import make_encodable
from mcore_rl.services.sandbox.box import FilesRefusedError, ProgramBox
from mcore_rl.services.sandbox.isolation import BOX
from mcore_rl.services.sandbox.languages import EXECUTABLE, Language, choose
from mcore_rl.services.sandbox.limits import (
    BoxStep,
    Limits,
    RunRecord,
    RunVerdict,
    SandboxError,
    SandboxFullError,
)
from mcore_rl.services.sandbox.worker import WorkerPool

_MAX_PATHS = 256
_MAX_PATH_LEN = 200


@dataclass(frozen=True)
class CodeRequest:
    """A program to run.

    code        its source; empty if `files` has the executable "program" that its compiler made
    compile_s   seconds for the compiler
    files       further files of its box, by path
    fetch       paths of files to return, as far as they exist
    max_files_bytes   the most that the returned files may have together
    """

    code: str
    language: str = "python"
    stdin: str = ""
    compile_s: float = 10.0
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    max_files_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        if not self.compile_s > 0:
            raise ValueError(f"compile_s={self.compile_s}: must be greater than 0")
        if len(self.files) > _MAX_PATHS or len(self.fetch) > _MAX_PATHS:
            raise ValueError(
                f"{len(self.files)} files to write and {len(self.fetch)} to fetch: at most"
                f" {_MAX_PATHS} each; pack them into an archive"
            )
        for path in (*self.files, *self.fetch):
            check_path(path)


@dataclass(frozen=True)
class CodeResult:
    """The records of a request: `compiled` for languages that compile, `ran` if that succeeded.

    message   what failed if the verdict is sandbox_error, or why files were not returned
    """

    verdict: RunVerdict
    compiled: RunRecord | None = None
    ran: RunRecord | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    message: str = ""


def check_path(path: str) -> None:
    """Raise ValueError unless `path` leads from a box to a file in it."""
    plain = posixpath.normpath(path)
    if plain != path or path.startswith(("/", "../")) or path in (".", "..") or "\0" in path:
        raise ValueError(
            f"path {path[:_MAX_PATH_LEN]!r}: give it relative to the box, without '.' and '..',"
            " such as data/a.txt"
        )
    if len(path) > _MAX_PATH_LEN:
        raise ValueError(f"path {path[:40]!r}... has {len(path)} letters, at most {_MAX_PATH_LEN}")


def execute(pool: WorkerPool, languages: dict[str, Language], request: CodeRequest) -> CodeResult:
    """Run a request on a worker of the pool.

    Raises ValueError for a language that is not there and for files that do not fit, and
    SandboxFullError if the queue is full. Other failures are results with verdict sandbox_error.
    """
    language = choose(languages, request.language)
    try:
        with pool.lend() as worker, ProgramBox(worker, _box_limits(language, request)) as box:
            found = _run(box, language, request)
    except SandboxFullError:
        raise
    except SandboxError as error:
        return CodeResult(RunVerdict.SANDBOX_ERROR, message=str(error))
    if isinstance(found, FilesRefusedError):
        raise found
    return found


def _box_limits(language: Language, request: CodeRequest) -> Limits:
    """Return the limits of the box: those of its greediest step."""
    limits = language.run_limits(request.limits)
    if not language.compile:
        return limits
    return language.compile_limits(limits, request.compile_s)


def _run(
    box: ProgramBox, language: Language, request: CodeRequest
) -> CodeResult | FilesRefusedError:
    """Return the result, or why the request's files are refused; the box is sound in both cases."""
    source = make_encodable(request.code).encode()
    try:
        box.put({**request.files, language.source: source})
    except FilesRefusedError as error:
        return error
    compiled = None
    is_built = language.is_executable and not request.code and EXECUTABLE in request.files
    if language.compile and not is_built:
        limits = _box_limits(language, request)
        compiled = box.run(
            BoxStep(language.compile, "", language.environment, limits, language.reserves_memory)
        )
        if compiled.verdict != RunVerdict.OK:
            return CodeResult(compiled.verdict, compiled)
    limits = language.run_limits(request.limits)
    if language.compile:
        box.limit(limits)
    step = BoxStep(
        language.run_command(limits.memory_mib),
        "" if language.run else f"{BOX}/{language.source}",
        language.environment,
        limits,
        language.reserves_memory,
    )
    ran = box.run(step, make_encodable(request.stdin).encode())
    try:
        files = box.get(request.fetch, request.max_files_bytes) if request.fetch else {}
    except FilesRefusedError as error:  # the program made them too large, which is no wrong request
        return CodeResult(ran.verdict, compiled, ran, message=str(error))
    return CodeResult(ran.verdict, compiled, ran, files)


def set_wall(limits: Limits, wall_s: float) -> Limits:
    """Return `limits` for a program that may take `wall_s` seconds."""
    return replace(limits, wall_s=wall_s, cpu_s=max(int(wall_s) + 1, 1))
