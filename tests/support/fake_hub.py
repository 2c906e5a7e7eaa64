"""A Hugging Face hub on this machine: repositories by name in, what huggingface_hub asks for out."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

Files = Mapping[str, bytes]
"""Path in the repository -> content."""


@contextmanager
def fake_hub(models: Mapping[str, Files], datasets: Mapping[str, Files]) -> Iterator[str]:
    """The address of a hub with these repositories; every one has the branches main and v2."""
    repos = {f"models/{name}": files for name, files in models.items()}
    repos |= {f"datasets/{name}": files for name, files in datasets.items()}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(self.path).split("?")[0].strip("/")
            if path.startswith("api/"):
                self._describe(path.removeprefix("api/"))
            else:
                self._send_file(path if path.startswith("datasets/") else f"models/{path}")

        do_HEAD = do_GET

        def _describe(self, path: str) -> None:
            name, _, revision = path.partition("/revision/")
            if name not in repos or revision not in ("main", "v2"):
                self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                return
            files = [{"rfilename": file} for file in repos[name]]
            repo = name.partition("/")[2]
            info = {"id": repo, "sha": commit_of(revision), "siblings": files}
            self._answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

        def _send_file(self, path: str) -> None:
            name, _, rest = path.partition("/resolve/")
            commit, _, file = rest.partition("/")
            content = repos.get(name, {}).get(file)
            if content is None:
                self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            tag = hashlib.sha1(content).hexdigest()
            self._answer(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": commit})

        def _answer(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()
