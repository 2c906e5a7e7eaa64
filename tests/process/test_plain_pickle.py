"""Plain values come back; whatever else a pickle names is refused before it is called."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.agents.messages import EndReason
from mcore_rl.process.plain_pickle import load_plain
from mcore_rl.types import GroupLease, VersionSpan, WeightVersion

PATH = Path("groups.pickle")


class Calls:
    """Its pickle calls a function."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(4, pickle.HIGHEST_PROTOCOL + 1))
def test_values_come_back(protocol: int) -> None:
    arrays = [np.arange(6, dtype=np.uint16).reshape(2, 3)[:, 1:], np.float32(2.5), np.zeros(0)]
    values = {3: [GroupLease(1, 2), VersionSpan(0, 4, WeightVersion(7)), EndReason.DONE, None]}
    found, those = load_plain(pickle.dumps((values, arrays), protocol), PATH)
    assert found[3][1:] == values[3][1:] and found[3][0].group == 2
    for array, other in zip(arrays, those, strict=True):
        assert array.dtype == other.dtype and array.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        (os.mkdir, ("made",), "posix.mkdir"),
        (eval, ("1",), "builtins.eval"),
        (load_plain, (b"", PATH), "mcore_rl.process.plain_pickle.load_plain"),
        (np.load, ("file", None, True), "numpy.load"),
        (pickle.loads, (b"",), "_pickle.loads"),
    ],
)
def test_a_call_is_refused(
    function: Any, arguments: Any, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps(Calls(function, *arguments))
    with pytest.raises(ValueError, match=rf"groups.pickle is damaged .*names {named}, which"):
        load_plain(data, PATH)
    assert not list(tmp_path.iterdir())


def test_what_a_module_only_imports_is_refused() -> None:
    data = b"cmcore_rl.process.plain_pickle\nPath\n(S'x'\ntR."
    with pytest.raises(ValueError, match=r"plain_pickle\.Path, which is no plain value"):
        load_plain(data, PATH)


def test_a_damaged_pickle_is_named() -> None:
    data = pickle.dumps([GroupLease(1, 2)])
    for end in range(len(data)):
        with pytest.raises(ValueError, match=r"groups\.pickle is damaged"):
            load_plain(data[:end], PATH)
