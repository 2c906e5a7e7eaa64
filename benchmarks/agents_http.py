"""Bare HTTP/1.1 for the benchmark of gateways, so that its client and its engine cost little."""

import asyncio
import re
from collections.abc import Awaitable, Callable

Answer = Callable[[bytes, bytes], Awaitable[bytes]]
"""Returns the body of the answer to (path, body)."""
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
LONGEST_LINE = 1 << 16


class Connection:
    """A connection to a server, kept open for one request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @staticmethod
    async def open(host: str, port: int) -> "Connection":
        return Connection(*await asyncio.open_connection(host, port))

    async def post(self, path: str, body: bytes, key: str = "") -> tuple[int, bytes]:
        """Return status and body of the answer to a request."""
        bearer = f"Authorization: Bearer {key}\r\n" if key else ""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: gateway\r\n{bearer}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        return int(answer[9:12]), await self._reader.readexactly(_body_len(answer))

    def close(self) -> None:
        self._writer.close()


async def serve(answer: Answer) -> tuple[asyncio.Server, int]:
    """Serve on a free port of loopback; return the server and the port."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(_body_len(head))
                data = await answer(head.split(b" ", 2)[1], body)
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n" % len(data) + data
                )
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0, backlog=4096, limit=LONGEST_LINE)
    return server, server.sockets[0].getsockname()[1]


def _body_len(head: bytes) -> int:
    found = _LENGTH.search(head)
    return int(found[1]) if found else 0
