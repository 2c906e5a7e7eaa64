"""A process that hosts episodes: reads requests of a pool from a socket, and writes the replies.

Run by keeper.py as `python -m mcore_rl.agents.environments.worker --socket-fd N --keeper-pid N`,
under any interpreter from Python 3.11 on: whatever is imported here needs the standard library
only.
"""

import argparse
import asyncio
import os
import socket
import sys
import traceback
from typing import Any

from mcore_rl.agents.environments.host import Host, describe
from mcore_rl.agents.environments.wire import encode, read_frame
from mcore_rl.process.lasting_output import keep_output_lasting
from mcore_rl.process.rotated_output import rotate_output
from mcore_rl.process.tied import die_with_parent

_CLOSE_ALL_S = 2.0


async def serve(connection: socket.socket) -> None:
    """Serve a pool until it closes the connection or sends None.

    The first frame names kind and options; the reply says whether they make an environment. Each
    further frame is a request, answered when it is done, in any order.
    """
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    first = await read_frame(reader)
    if first is None:
        return
    host = await _make_host(first, writer)
    tasks: set[asyncio.Task[None]] = set()
    while host is not None and (request := await read_frame(reader)) is not None:
        if request["do"] == "stop":
            await asyncio.wait([asyncio.ensure_future(host.close_all())], timeout=_CLOSE_ALL_S)
            return
        if request["do"] == "abandon":
            leaves_thread = host.abandon(request["episode"])
            await _send(writer, {"call": request["call"], "value": leaves_thread})
        else:
            task = asyncio.ensure_future(_answer(host, request, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


async def _make_host(first: dict[str, Any], writer: asyncio.StreamWriter) -> Host | None:
    try:
        host = Host(first["kind"], first["options"])
    except Exception as error:  # the pool gets it, and raises it where the user sees it
        await _send(writer, {"call": first["call"], "error": describe(error)})
        return None
    await _send(writer, {"call": first["call"], "value": None})
    return host


async def _answer(host: Host, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    reply = await host.call(request)
    try:
        await _send(writer, {"call": request["call"], **reply})
    except ValueError as error:  # the environment's messages or metrics are not JSON
        await _send(writer, {"call": request["call"], "error": describe(error)})


async def _send(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    writer.write(encode(value))
    await writer.drain()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--keeper-pid", type=int, required=True)
    given = parser.parse_args(arguments)
    die_with_parent(given.keeper_pid)
    os.set_inheritable(given.socket_fd, False)
    keep_output_lasting()
    rotate_output()
    asyncio.run(serve(socket.socket(fileno=given.socket_fd)))


def _main_and_exit() -> None:
    """Exit without waiting for threads: one that hangs in an environment would keep the process."""
    status = 1
    try:
        main(sys.argv[1:])
        status = 0
    except BaseException:  # the interpreter would print it, too, but then wait for the threads
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _main_and_exit()
