"""Imitates the Hugging Face hub on this machine: serves given repositories to huggingface_hub."""

import hashlib
import json
import threading
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import unquote

TOKEN = "hf_of_the_tests"
Files = Mapping[str, bytes]
"""Path in the repository -> content."""


class Handler(BaseHTTPRequestHandler):
    """Answers for `repos`: "models/owner/name" or "datasets/owner/name" -> its files.

    Whoever brings TOKEN may create models and commit files to them.
    """

    repos: ClassVar[dict[str, Files]]
    messages: ClassVar[list[str]]

    def do_GET(self) -> None:
        path = unquote(self.path).split("?")[0].strip("/")
        if path.startswith("api/"):
            self._describe(path.removeprefix("api/"))
        else:
            self._send_file(path if path.startswith("datasets/") else f"models/{path}")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        path = unquote(self.path).split("?")[0].strip("/").removeprefix("api/")
        name, _, action = path.partition("/preupload/" if "/preupload/" in path else "/commit/")
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._answer(401, b"{}", {})
        elif path == "repos/create":
            asked = json.loads(content)
            self.repos.setdefault(f"models/{asked['organization']}/{asked['name']}", {})
            self.messages.append(asked["visibility"])
            self._answer_json(
                {"url": f"https://huggingface.co/{asked['organization']}/{asked['name']}"}
            )
        elif "/preupload/" in path and name in self.repos:
            files = [file["path"] for file in json.loads(content)["files"]]
            answer = {"uploadMode": "regular", "shouldIgnore": False}
            self._answer_json({"files": [{"path": file, **answer} for file in files]})
        elif "/commit/" in path and name in self.repos:
            lines = [json.loads(line) for line in content.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            added = {file["path"]: b64decode(file["content"]) for file in files}
            self.repos[name] = {**self.repos[name], **added}
            self.messages.append(lines[0]["value"]["summary"])
            url = f"https://huggingface.co/{name}/commit/{digest(action.encode())}"
            self._answer_json({"commitUrl": url, "commitOid": digest(action.encode())})
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

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
        if self.command in ("GET", "POST"):
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def fake_hub(models: Mapping[str, Files], datasets: Mapping[str, Files]) -> Iterator[str]:
    """The address of a hub with these repositories; every one has the branches main and v2."""
    with serve_hub(models, datasets) as (endpoint, _):
        yield endpoint


@contextmanager
def serve_hub(
    models: Mapping[str, Files], datasets: Mapping[str, Files]
) -> Iterator[tuple[str, type[Handler]]]:
    """The address of a hub, and the handler with its repositories as they are now."""
    repos = {f"models/{name}": files for name, files in models.items()}
    repos |= {f"datasets/{name}": files for name, files in datasets.items()}
    handler = type("HandlerOfRepos", (Handler,), {"repos": repos, "messages": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        server.server_close()


def file_entry(path: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(content), "oid": digest(content)}


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


COMMITS = {revision: digest(revision.encode()) for revision in ("main", "v2")}
"""Branch -> the commit that it is at, in every repository."""
