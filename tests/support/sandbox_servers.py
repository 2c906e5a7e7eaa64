"""Servers of `mcore-rl sandbox serve` in processes of their own, for tests that kill them."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def serving(port: int, key_file: Path) -> Iterator[subprocess.Popen[str]]:
    """Serve on a port until the block ends; yield the process when it is ready."""
    words = ["sandbox", "serve", "--port", str(port), "--workers", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mcore_rl.cli", *words, "--key-file", str(key_file)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert "sandbox at" in process.stderr.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def write_key(folder: Path, key: str) -> Path:
    """Return a file of mode 600 that holds a key."""
    path = folder / "key"
    path.write_text(key)
    path.chmod(0o600)
    return path
