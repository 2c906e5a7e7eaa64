"""Tasks are cut into units in order, and a memory budget that is too small is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_tools.assembly import Assembly, make_pieces, whole
from checkpoint_tools.output import (
    FILES_AT_ONCE,
    LARGEST_BAND,
    SMALLEST_SHARE,
    OutputFile,
    Task,
    buffer_bytes,
    check_held,
    compute_share,
    make_units,
)
from checkpoint_tools.stored import Chunk


def assembly(num_bytes: int) -> Assembly:
    return whole(Chunk("t", "uint8", (0,), (num_bytes,), "file", 0, num_bytes, False))


@given(
    sizes=st.lists(st.lists(st.integers(1, 100), max_size=10), max_size=3),
    unit_bytes=st.integers(1, 200),
)
def test_units_hold_every_task_once_and_stay_near_their_size(
    sizes: list[list[int]], unit_bytes: int
) -> None:
    files: list[OutputFile] = []
    for number, file_sizes in enumerate(sizes):
        name = f"file{number}"
        tasks = tuple(Task(name, i, assembly(size)) for i, size in enumerate(file_sizes))
        files.append(OutputFile(name, sum(file_sizes), b"", tasks))
    units = make_units(files, unit_bytes)
    assert [task for unit in units for task in unit.tasks] == [t for f in files for t in f.tasks]
    assert [unit.number for unit in units] == list(range(len(units)))
    for unit in units:
        assert {task.file for task in unit.tasks} == {unit.file}
        assert len(unit.tasks) == 1 or unit.source_bytes <= unit_bytes


@pytest.mark.parametrize(
    ("total_bytes", "max_file_bytes", "share"),
    [
        (1000, 10**9, SMALLEST_SHARE),
        (1000, 100, 100),
        (16 << 30, 4 << 30, (16 << 30) // FILES_AT_ONCE),
        (64 << 30, 4 << 30, 4 << 30),
    ],
)
def test_an_output_is_cut_so_that_workers_write_to_different_files(
    total_bytes: int, max_file_bytes: int, share: int
) -> None:
    assert compute_share(total_bytes, max_file_bytes) == share


def test_buffers_are_an_eighth_of_the_budget_up_to_a_limit() -> None:
    assert buffer_bytes(4 << 20) == 512 << 10
    assert buffer_bytes(1 << 30) == LARGEST_BAND
    with pytest.raises(ValueError, match="--memory-budget leaves 4095 KiB for each worker"):
        buffer_bytes((4 << 20) - 1)


def test_a_matrix_that_must_be_held_needs_three_times_its_size() -> None:
    chunk = Chunk("t", "uint8", (0, 0), (64, 32), "file", 0, 2048, False)
    pieces = make_pieces(chunk, (32, 64), (0, (1, 32)), (0, (64, 1)), 64)
    held = Assembly("t", "uint8", (32, 64), tuple(pieces))
    check_held([held, assembly(10**6)], 6144)
    with pytest.raises(ValueError, match="leaves 5 KiB for each worker, 't' needs 6 KiB"):
        check_held([held], 6143)
