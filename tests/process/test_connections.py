"""Connections that were noted end for those who wait at this end; others, and listeners, go on."""

import socket
import threading

import pytest

from mcore_rl.process.connections import Connections


def connect() -> tuple[socket.socket, socket.socket, socket.socket]:
    """Return (listener, its end of a connection, the other end)."""
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    near.settimeout(20.0)
    return listener, far, near


def test_whoever_waits_at_a_noted_connection_gets_its_end() -> None:
    connections = Connections()
    earlier = connect()
    with connections.note():
        listener, far, near = connect()
        pair = socket.socketpair()
    got: list[bytes] = []
    waiting = threading.Thread(target=lambda: got.append(near.recv(1)))
    waiting.start()
    connections.end()
    waiting.join(20.0)
    assert got == [b""] and far.recv(1) == b""
    again = socket.create_connection(listener.getsockname())
    for sender, receiver in (earlier[1:], pair):
        sender.send(b"x")
        assert receiver.recv(1) == b"x"
    for each in (listener, far, near, again, *earlier, *pair):
        each.close()


def test_connections_end_while_they_are_noted() -> None:
    connections = Connections()
    with connections.note():
        sockets = connect()
        connections.end()
        assert sockets[1].recv(1) == b""
    for each in sockets:
        each.close()


def test_a_socket_with_the_descriptor_of_one_that_was_noted_goes_on() -> None:
    connections = Connections()
    with connections.note():
        noted = connect()
    descriptors = {each.fileno() for each in noted}
    for each in noted:
        each.close()
    later = connect()
    assert {each.fileno() for each in later} == descriptors
    connections.end()
    later[1].send(b"x")
    assert later[2].recv(1) == b"x"
    for each in later:
        each.close()
    with pytest.raises(OSError):
        later[2].send(b"x")
