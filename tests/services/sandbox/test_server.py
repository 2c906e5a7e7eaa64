"""The server answers over HTTP whatever programs do, and wants its key."""

import asyncio
import base64
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestClient, TestServer

from mcore_rl.services.sandbox import server
from mcore_rl.services.sandbox.limits import Limits
from mcore_rl.services.sandbox.server import SandboxServer
from mcore_rl.services.sandbox.service import Sandbox, SandboxOptions

KEY = "0123456789abcdef"


@asynccontextmanager
async def serving(
    key: str = "", busy_status: int = 429, **options: Any
) -> AsyncIterator[TestClient[Any, Any]]:
    numbers: dict[str, Any] = {"workers": 1, "max_sessions": 1}
    sandbox = Sandbox(SandboxOptions(**numbers | options))
    app = SandboxServer(sandbox, key, busy_status).make_app()
    async with TestClient(TestServer(app)) as client:
        yield client


async def run(client: TestClient[Any, Any], code: str, **fields: Any) -> dict[str, Any]:
    body = {"code": code, "language": "python"} | fields
    async with client.post("/run_code", json=body) as response:
        return {"http": response.status} | await response.json()


def test_code_runs_and_health_is_told() -> None:
    async def main() -> None:
        async with serving() as client:
            files = {"a": base64.b64encode(b"7").decode()}
            code = "open('b', 'w').write(open('a').read() + input())"
            answer = await run(client, code, stdin="8", files=files, fetch_files=["b"])
            assert (answer["http"], answer["status"]) == (200, "Success")
            assert base64.b64decode(answer["files"]["b"]) == b"78"
            late = await run(client, "while True: pass", run_timeout=0.5)
            assert late["run_result"]["status"] == "TimeLimitExceeded"
            async with client.get("/healthz") as response:
                health = await response.json()
            assert (health["workers"], health["busy"]) == (1, 0)

    asyncio.run(main())


def test_wrong_requests_are_named() -> None:
    async def main() -> None:
        async with serving() as client:
            missing = await run(client, "x", language="cobol")
            assert missing["http"] == 422
            assert "this machine has no cobol" in missing["error"]
            for data in (b"{", b"[]", b"\xff", b"[" * 100_000):
                async with client.post("/run_code", data=data) as response:
                    assert response.status == 422
            for kind in (0, False, [], {"a": 1}):
                async with client.post("/sessions", json={"kind": kind}) as response:
                    assert response.status == 422
                    assert "kind=" in (await response.json())["error"]
            async with client.post("/sessions/none/call", json={"code": "1"}) as response:
                assert response.status == 422
                assert "no such session" in (await response.json())["error"]

    asyncio.run(main())


@pytest.mark.slow
def test_a_full_queue_is_refused_while_health_is_answered() -> None:
    async def main() -> None:
        async with serving(max_waiting=1, busy_status=504) as client:
            slow = [
                asyncio.create_task(run(client, "import time; time.sleep(3)")) for _ in range(2)
            ]
            while (await (await client.get("/healthz")).json())["waiting"] < 1:
                await asyncio.sleep(0.05)
            refused = await run(client, "print(1)")
            assert refused["http"] == 504
            assert "try again later" in refused["error"]
            assert [(await task)["status"] for task in slow] == ["Success"] * 2
            assert (await run(client, "print(1)"))["status"] == "Success"

    asyncio.run(main())


def test_a_key_is_wanted() -> None:
    async def main() -> None:
        async with serving(KEY) as client:
            assert (await client.get("/healthz")).status == 200
            body = {"code": "print(1)", "language": "python"}
            url = client.make_url("/run_code")
            async with ClientSession() as http:
                for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Basic ?"}):
                    assert (await http.post(url, json=body, headers=headers)).status == 401
                bearer = {"Authorization": f"Bearer {KEY}"}
                assert (await http.post(url, json=body, headers=bearer)).status == 200
                user = base64.b64encode(f"anyone:{KEY}".encode()).decode()
                basic = {"Authorization": f"Basic {user}"}
                assert (await http.post(url, json=body, headers=basic)).status == 200

    asyncio.run(main())


def test_a_session_over_http() -> None:
    async def main() -> None:
        async with serving() as client:

            async def ask(path: str, **body: Any) -> dict[str, Any]:
                async with client.post(path, json=body) as response:
                    return {"http": response.status} | await response.json()

            path = f"/sessions/{(await ask('/sessions', kind='python'))['session']}"
            assert (await ask("/sessions", kind="bash"))["http"] == 429
            await ask(f"{path}/files", files={"a": base64.b64encode(b"5").decode()})
            assert (await ask(f"{path}/call", code="x = int(open('a').read())"))["status"] == 0
            assert (await ask(f"{path}/call", code="x + 1", timeout=30))["stdout"] == "6\n"
            files = (await ask(f"{path}/snapshot"))["files"]
            assert base64.b64decode(files["a"]) == b"5"
            ended = await ask(f"{path}/call", code="import os; os._exit(0)")
            assert not ended["is_alive"]
            assert (await ask(f"{path}/call", code="1"))["http"] == 503
            async with client.delete(path) as response:
                assert response.status == 200
            assert (await ask(f"{path}/call", code="1"))["http"] == 422

    asyncio.run(main())


def test_a_body_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 1 << 20)

    async def main() -> None:
        async with serving(limits=Limits()) as client:
            bomb = zlib.compress(b" " * (64 << 20))
            assert len(bomb) < 1 << 20
            headers = {"Content-Encoding": "deflate"}
            async with client.post("/run_code", data=bomb, headers=headers) as response:
                assert response.status == 413
            assert (await run(client, "print(1)"))["status"] == "Success"

    asyncio.run(main())
