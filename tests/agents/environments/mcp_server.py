"""A server of tools, by the package mcp: over stdio, or over HTTP at the port that is given."""

import os
import sys

try:
    from mcp.server.mcpserver import MCPServer as Server  # pyright: ignore[reportMissingImports]
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server  # pyright: ignore[reportMissingImports]

server = Server("calculator")
counts = {"calls": 0}


@server.tool()
def multiply(first: int, second: int) -> str:
    """Multiply two numbers."""
    counts["calls"] += 1
    return f"{first * second} after {counts['calls']} calls of {os.environ.get('OWNER', 'nobody')}"


@server.tool()
def divide(first: int, second: int) -> str:
    """Divide two numbers."""
    return str(first // second)


@server.tool()
def leave() -> str:
    """End the server within the call."""
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
