"""Tokenizes conversations in processes of their own, and gives the token ids back in order."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, cast

from jinja2 import TemplateError
from pebble import ProcessExpired, ProcessPool

from mcore_rl.data.tokenization import Messages, Tokenization, Tokenizer
from mcore_rl.process.errors import describe_error

TIMEOUT_S = 300.0
"""Deadline of a batch of conversations, the start of a worker included."""
PRELOADED = ["mcore_rl.data.streamed.workers", "mcore_rl.data.tokenizer"]
MakeTokenizer = Callable[[], Tokenizer]
Encoded = tuple[list[list[int]], str]
"""Token ids of the conversations before the first that cannot be rendered, and why it cannot."""
Result = Callable[[], Encoded]
_RENDER_ERRORS = (TemplateError, KeyError, TypeError, ValueError, AttributeError)
"""Chat templates raise these at messages that they were not written for."""
_in_worker: dict[str, Any] = {}
"""The worker's function that makes its tokenizer, and the result."""


class TokenWorkers:
    """Processes that tokenize; without any, `submit` tokenizes in the calling thread."""

    def __init__(self, make_tokenizer: MakeTokenizer, num_workers: int) -> None:
        """`make_tokenizer` can be pickled; each worker calls it once."""
        self._make_tokenizer = make_tokenizer
        self._num_workers = num_workers
        self._pool: ProcessPool | None = None
        self._here: Tokenization | None = None

    def submit(self, conversations: Sequence[Messages]) -> Result:
        """Begin to tokenize, and return a function that waits for the token ids.

        That function raises RuntimeError if a worker died, and TimeoutError after TIMEOUT_S.
        """
        if not self._num_workers:
            if self._here is None:
                self._here = Tokenization(self._make_tokenizer())
            encoded = encode(self._here, conversations)
            return lambda: encoded
        if self._pool is None:
            # Forked from a process that imported transformers once: 15 MiB a worker, not 250.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(PRELOADED)
            self._pool = ProcessPool(
                max_workers=self._num_workers,
                initializer=_prepare_worker,
                initargs=(self._make_tokenizer,),
                context=cast(Any, context),
            )
        try:
            future = self._pool.schedule(_encode_in_worker, args=(list(conversations),))
        except RuntimeError as error:  # the pool broke when its last worker died without work
            raise self._make_lost_error(error) from None
        return partial(self._result, cast("Future[Encoded]", future))

    def close(self) -> None:
        """Kill the workers."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _result(self, future: "Future[Encoded]") -> Encoded:
        try:
            return future.result(TIMEOUT_S)
        except FutureTimeout:
            raise TimeoutError(
                f"prompts were not tokenized within {TIMEOUT_S:g} s by"
                f" data.workers={self._num_workers}: the machine is overloaded, or a chat template"
                " does not end"
            ) from None
        except (ProcessExpired, BrokenProcessPool) as error:
            raise self._make_lost_error(error) from None

    def _make_lost_error(self, error: Exception) -> RuntimeError:
        status = f" with status {error.exitcode}" if isinstance(error, ProcessExpired) else ""
        return RuntimeError(
            f"a process of data.workers={self._num_workers} that tokenizes prompts ended{status}:"
            " it may have run out of memory; set fewer data.workers, and start the run again,"
            " which continues from its checkpoint"
        )


def encode(tokenization: Tokenization, conversations: Sequence[Messages]) -> Encoded:
    """Return token ids, and where a conversation cannot be rendered, why."""
    try:
        return list(tokenization.encode_now(conversations, add_generation_prompt=True)), ""
    except _RENDER_ERRORS:
        encoded: list[list[int]] = []
        for conversation in conversations:
            try:
                encoded += tokenization.encode_now([conversation], add_generation_prompt=True)
            except _RENDER_ERRORS as error:
                return encoded, describe_error(error)
        raise


def _prepare_worker(make_tokenizer: MakeTokenizer) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker is one of several
    _in_worker["make_tokenizer"] = make_tokenizer


def _encode_in_worker(conversations: Sequence[Messages]) -> Encoded:
    if "tokenization" not in _in_worker:
        _in_worker["tokenization"] = Tokenization(_in_worker["make_tokenizer"]())
    return encode(_in_worker["tokenization"], conversations)
