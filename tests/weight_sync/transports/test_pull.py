"""Engine ranks pull versions from trainer ranks' storages, by Triton's interpreter.

Where CUDA would map another process's memory, ranks in threads of one process use its addresses.
"""

from tests.support.triton_code import needs_triton, run_with_triton

BEGIN = """
import pytest, time, torch
from dataclasses import replace
from threading import Lock
from mcore_rl.device import gpu_ipc
from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.device.pull_kernels import PullTable
from mcore_rl.weight_sync import link_end
from mcore_rl.weight_sync.execute import PlanExecutor
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.roster import RankFacts
from mcore_rl.weight_sync.transports.pull import PullTransport
from mcore_rl.weight_sync.transports.select import select_transport
from mcore_rl.weight_sync.verify import ROWS
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weights.box import Box, Shard
from tests.support.link_ends import make_link, open_ends, run_ranks

gpu_ipc.can_export = gpu_ipc.can_open = lambda device: True
gpu_ipc.export_memory = lambda address: (b"h" * 64, address)
opened = []
gpu_ipc.open_memory = lambda handle, device: opened.append(handle) or 0
gpu_ipc.close_memory = lambda address, device: opened.pop()
link_end.describe_rank = lambda device, *, is_sender, memory=None: RankFacts(
    "machine", (ROWS,), "gpu-0", ("gpu-0",)
)

run_table, at_once = PullTable.run, Lock()


def run_alone(table, bases):
    '''Triton's interpreter replaces Triton's functions while it runs a kernel.'''
    with at_once:
        return run_table(table, bases)


PullTable.run = run_alone

# A matrix cut by rows on the trainer's side and by columns on the engine's, a fused one that the
# trainer holds in turns, and a bias whose rank's part begins within a word.
NAMES = {"cut": (12, 40), "fused": (8, 36), "bias": (10,)}


def shards_of(rank, side, dtype):
    if side == "trainer":
        rows = slice(6 * rank, 6 * rank + 6)
        halves = [
            Shard(Box("fused", (start, 0), (start + 2, 36)), "own", 240 + 72 * i, (36, 1), dtype)
            for i, start in enumerate((4 * rank, 4 * rank + 2))
        ]
        return [
            Shard(Box("cut", (rows.start, 0), (rows.stop, 40)), "own", 0, (40, 1), dtype),
            *halves,
            Shard(Box("bias", (5 * rank,), (5 * rank + 5,)), "odd", 3, (1,), dtype),
        ]
    return [
        Shard(Box("cut", (0, 20 * rank), (12, 20 * rank + 20)), "w", 0, (20, 1), dtype),
        Shard(Box("fused", (4 * rank, 0), (4 * rank + 4, 36)), "w", 240, (36, 1), dtype),
        Shard(Box("bias", (5 * rank,), (5 * rank + 5,)), "b", 0, (1,), dtype),
    ]


def make_values(version):
    torch.manual_seed(version)
    return {name: torch.randn(shape).bfloat16() for name, shape in NAMES.items()}


def fill(tensors, shards, values):
    for shard in shards:
        box = shard.box
        where = tuple(slice(a, b) for a, b in zip(box.start, box.stop))
        shard.view(tensors).copy_(values[box.name][where])


def move(tensors):
    '''Have the storages lie elsewhere, as after a rank gave up its memory.'''
    for tensor in tensors.values():
        storage, kept = tensor.untyped_storage(), tensor.clone()
        size = storage.nbytes()
        storage.resize_(0)
        spare.append(torch.zeros(size, dtype=torch.uint8))
        storage.resize_(size)
        tensor.copy_(kept)


spare = []


def open_executors(pull, dtype="bfloat16"):
    store, link = make_link(2, 2, bucket_bytes=400)
    link = replace(link, pull=pull)
    ends = open_ends(link)
    shards = [shards_of(rank, "trainer", dtype) for rank in range(2)]
    shards += [shards_of(rank, "engine", "bfloat16") for rank in range(2)]
    acts = [
        lambda end=end, own=own: PlanExecutor.meet(end, lambda _: own, select_transport)
        for end, own in zip(ends, shards)
    ]
    return store, shards, run_ranks(acts)


def make_tensors(dtype="bfloat16"):
    dtype = getattr(torch, dtype)
    sizes = {"own": 400, "odd": 20}
    trainers = [{name: torch.zeros(n, dtype=dtype) for name, n in sizes.items()} for _ in range(2)]
    engines = [
        {"w": torch.zeros(400).bfloat16(), "b": torch.zeros(6).bfloat16()} for _ in range(2)
    ]
    return [*trainers, *engines]


def sync(executors, tensors, version):
    deadline_s = time.monotonic() + 60
    return run_ranks([
        lambda executor=executor, own=own: executor.execute(version, own, deadline_s)
        for executor, own in zip(executors, tensors)
    ])


def check(tensors, shards, values):
    for own, held in zip(tensors[2:], shards[2:]):
        wanted = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
        fill(wanted, held, values)
        for name in own:
            assert torch.equal(own[name], wanted[name]), name


def pulls_of(executor):
    return [each for each in executor._transport._transports if isinstance(each, PullTransport)]
"""
EXACT = (
    BEGIN
    + """
store, shards, executors = open_executors(pull=True)
assert all(pulls_of(each) for each in executors)
tensors, other_set = make_tensors(), make_tensors()
for version in range(1, 5):
    values = make_values(version)
    for own, held in zip(tensors[:2], shards[:2]):
        fill(own, held, values)
    # An engine's two sets of parameters take turns.
    targets = tensors[2:] if version % 2 else other_set[2:]
    received = [*tensors[:2], *targets]
    num_sets = [each._bound[-1].number for each in executors[:2] if each._bound]
    sums = sync(executors, received, version)
    check(received, shards, values)
    assert all(len(each) for each in sums[2:]) and not opened
    assert not num_sets or num_sets == [each._bound[-1].number for each in executors[:2]]
    for own in tensors[:2]:
        move(own)
assert [len(table) for each in executors for table in [each._bound]] == [1, 1, 2, 2]
for each in executors:
    each.close()
"""
)
ROUTES = (
    BEGIN
    + """
for pull, dtype in [(False, "bfloat16"), (True, "float32")]:
    store, link = make_link(1, 1, bucket_bytes=400)
    link = replace(link, pull=pull)
    chosen = []

    def select(end, plan, stream):
        transport = select_transport(end, plan, stream)
        chosen.append([type(each).__name__ for each in transport._transports])
        return transport

    box = Box("w", (0,), (64,))
    own = [[Shard(box, "w", 0, (1,), dtype)], [Shard(box, "w", 0, (1,), "bfloat16")]]
    run_ranks([
        lambda end=end, held=held: PlanExecutor.meet(end, lambda _: held, select)
        for end, held in zip(open_ends(link), own)
    ])
    assert chosen == [["SharedMemoryTransport"]] * 2, chosen
"""
)
FAULTS = (
    BEGIN
    + """
store, shards, executors = open_executors(pull=True)
tensors = make_tensors()
for own, held in zip(tensors[:2], shards[:2]):
    fill(own, held, make_values(1))
(pull,) = pulls_of(executors[0])
honest = pull._sum


def change_late(version, number, buckets):
    '''Sum the slices, then change a word before the engine has read it: a torn version.'''
    sums_P = honest(version, number, buckets).clone()
    sums_P[0] += 1
    return sums_P


pull._sum = change_late
with pytest.raises(TransferError, match="bias .0,. to .5,., bound for b, has checksum"):
    sync(executors, tensors, 1)
assert not opened, "storages were left open"
store, shards, executors = open_executors(pull=True)
deadline_s = time.monotonic() + 60
began_s = time.monotonic()
with pytest.raises(TransferError, match="offers version 2, not version 1"):
    run_ranks([
        lambda executor=executor, own=own, i=i: executor.execute(1 if i > 1 else 2, own, deadline_s)
        for i, (executor, own) in enumerate(zip(executors, tensors))
    ])
store, shards, executors = open_executors(pull=True)
export = gpu_ipc.export_memory


def refuse(address):
    raise RuntimeError("CUDA gave no handle: InvalidValue")


gpu_ipc.export_memory = refuse
with pytest.raises(TransferError, match="trainer rank . cannot open its memory .* InvalidValue"):
    sync(executors, tensors, 1)
gpu_ipc.export_memory = export
store, shards, executors = open_executors(pull=True)
executors[0].close()
began_s = time.monotonic()
with pytest.raises(TransferError, match="waited .* for trainer rank 0 to say where version 1 lies"):
    executors[2].execute(1, tensors[2], time.monotonic() + 60)
assert time.monotonic() - began_s < 10
"""
)


@needs_triton
def test_versions_arrive_exactly_from_storages_that_move() -> None:
    run_with_triton(EXACT, TRITON_INTERPRET="1")


@needs_triton
def test_slices_that_are_cast_and_links_without_the_option_keep_their_buckets() -> None:
    run_with_triton(ROUTES, TRITON_INTERPRET="1")


@needs_triton
def test_torn_and_stale_versions_are_refused_and_a_lost_rank_is_named() -> None:
    run_with_triton(FAULTS, TRITON_INTERPRET="1")
