"""Finds tokens of several requests in SGLang's table of KV slots, [requests, positions].

In numpy, as SGLang asks for a few numbers in each pass, and calls of numpy cost less than torch's.
"""

from typing import Any

import numpy as np
from torch import Tensor

Array = np.ndarray[Any, Any]


def list_places(requests_B: Tensor, starts_B: Tensor, stops_B: Tensor) -> tuple[Array, Array]:
    """Return (requests, positions), [T] each, of tokens start to stop of each request, one request
    after another.
    """
    starts = starts_B.numpy()
    lens = stops_B.numpy() - starts
    if (lens == 1).all():
        return requests_B.numpy(), starts
    firsts = lens.cumsum() - lens
    shifts = np.repeat(starts - firsts, lens)
    return np.repeat(requests_B.numpy(), lens), np.arange(len(shifts)) + shifts
