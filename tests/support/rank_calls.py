"""Method calls that come through a pipe to an object in a process of its own."""

import pickle
from typing import Any


def answer_calls(pipe: Any, served: object) -> None:
    """Answer (method, *arguments) messages until the other end closes the pipe."""
    while True:
        try:
            method, *args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(pickle.dumps(getattr(served, method)(*args)))
