"""Imitates the Hugging Face hub on this machine: serves given repositories to huggingface_hub."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import unquote

Files = Mapping[str, bytes]
"""Path in the repository -> content."""


class Handler(BaseHTTPRequestHandler):
    """Answers for `repos`: "models/owner/name" or "datasets/owner/name" -> its files."""

    repos: ClassVar[Mapping[str, Files]]

    def do_GET(self) -> None:
        path = unquote(self.path).split("?")[0].strip("/")
        if path.startswith("api/"):
            self._describe(path.removeprefix("api/"))
        else:
            self._send_file(path if path.startswith("datasets/") else f"models/{path}")

    do_HEAD = do_GET

    def _describe(self, path: str) -> None:
        name, _, commit = path.partition("/tree/")
        if commit in COMMITS.values() and name in self.repos:
            self._answer_json([file_entry(*item) for item in self.repos[name].items()])
            return
        name, _, revision = path.partition("/revision/")
        if revision in COMMITS and name in self.repos:
            self._answer_json({"id": name.partition("/")[2], "sha": COMMITS[revision]})
            return
        self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _answer_json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send_file(self, path: str) -> None:
        name, _, rest = path.partition("/resolve/")
        commit, _, file = rest.partition("/")
        content = self.repos.get(name, {}).get(file)
        if content is None:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"ETag": f'"{digest(content)}"', "X-Repo-Commit": commit}
        self._answer(200, content, headers)

    def _answer(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def fake_hub(models: Mapping[str, Files], datasets: Mapping[str, Files]) -> Iterator[str]:
    """The address of a hub with these repositories; every one has the branches main and v2."""
    repos = {f"models/{name}": files for name, files in models.items()}
    repos |= {f"datasets/{name}": files for name, files in datasets.items()}
    handler = type("HandlerOfRepos", (Handler,), {"repos": repos})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def file_entry(path: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(content), "oid": digest(content)}


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


COMMITS = {revision: digest(revision.encode()) for revision in ("main", "v2")}
"""Branch -> the commit that it is at, in every repository."""
