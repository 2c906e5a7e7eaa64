"""The handshake of ranks in threads: one plan, recorded or listed layouts, errors with names."""

import json
import mmap
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from mcore_rl.doctor.toy_engine import column_cut, make_tensors, row_cut
from mcore_rl.slices.box import Shard
from mcore_rl.slices.layouts.layout import boxes_of
from mcore_rl.slices.layouts.megatron import MegatronSizes
from mcore_rl.slices.layouts.recorded import RecordedLayouts
from mcore_rl.slices.layouts.sglang_models import SGLangSizes
from mcore_rl.slices.strides import contiguous_strides
from mcore_rl.stream.link_end import LinkEnd
from mcore_rl.stream.plan_handshake import (
    HfTensors,
    MakeShards,
    PlanHandshake,
    RankMachine,
    RankPlan,
    direct_peers,
)
from mcore_rl.stream.routes.channel import machine_id
from mcore_rl.stream.routes.open_memory import OpenMemory
from mcore_rl.stream.routes.transport import TransferError
from mcore_rl.stream.segment import Segment
from mcore_rl.stream.verify import ROWS, XXH3
from mcore_rl.stream.wire import Link, encode_shards
from tests.support.link_ends import make_link, open_ends, run_ranks

NUM_SENDERS = 2
NUM_RECEIVERS = 2
HF = make_tensors()
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 8,
    "vocab_size": 16,
    "tie_word_embeddings": False,
}
TWO_TO_TWO = {"num_senders": NUM_SENDERS, "num_receivers": NUM_RECEIVERS}


def own_shards(end: LinkEnd) -> Sequence[Shard]:
    if end.is_sender:
        return row_cut(HF, end.side_rank, NUM_SENDERS, "float32")[0]
    return column_cut(HF, end.side_rank, NUM_RECEIVERS, "bfloat16")[0]


def planning(end: LinkEnd, make_shards: MakeShards | None = None) -> Callable[[], RankPlan]:
    make_shards = make_shards or (lambda _: own_shards(end))
    return lambda: PlanHandshake(end).run(make_shards)


def plan(link: Link) -> list[RankPlan]:
    return run_ranks([planning(end) for end in open_ends(link)])


def test_both_ends_of_each_pair_plan_the_same_buckets() -> None:
    _store, link = make_link(**TWO_TO_TWO)
    plans = plan(link)
    senders = plans[:NUM_SENDERS]
    receivers = plans[NUM_SENDERS:]
    sent = {(b.source_rank, b.target_rank, b.index): b for p in senders for b in p.buckets}
    received = {(b.source_rank, b.target_rank, b.index): b for p in receivers for b in p.buckets}
    assert sent == received
    for rank, own in enumerate(senders):
        assert {bucket.source_rank for bucket in own.buckets} == {rank}
    for rank, own in enumerate(receivers):
        assert {bucket.target_rank for bucket in own.buckets} == {rank}
        wanted = sum(shard.box.numel for shard in own_shards(open_ends(link)[2 + rank]))
        assert sum(piece.box.numel for b in own.buckets for piece in b.pieces) == wanted
    assert max(bucket.num_bytes for bucket in sent.values()) <= link.bucket_bytes


def test_all_ranks_have_one_digest_which_tells_layouts_apart() -> None:
    _store, link = make_link(**TWO_TO_TWO)
    _same_store, same = make_link(**TWO_TO_TWO)
    _other_store, other = make_link(num_senders=NUM_SENDERS, num_receivers=1)
    digests = [{own.digest for own in plan(each)} for each in (link, same, other)]
    assert [len(digest) for digest in digests] == [1, 1, 1]
    assert digests[0] == digests[1] != digests[2]
    assert all(digest.startswith("listed ") for digest in digests[0])


def test_an_engine_rank_is_told_the_tensors_that_trainer_ranks_hold() -> None:
    _store, link = make_link(**TWO_TO_TWO)
    told: list[HfTensors] = []

    def trace(end: LinkEnd) -> MakeShards:
        def make_shards(hf_tensors: HfTensors) -> Sequence[Shard]:
            if not end.is_sender:
                told.append(hf_tensors)
            return own_shards(end)

        return make_shards

    run_ranks([planning(end, trace(end)) for end in open_ends(link)])
    wanted = {name: (tuple(tensor.shape), "float32") for name, tensor in HF.items()}
    assert told == [wanted, wanted]


def test_recorded_layouts_that_are_wrong_are_replaced_by_lists(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorded = RecordedLayouts(
        CONFIG, "float32", MegatronSizes(padded_vocab=16), SGLangSizes(1, 2, 1, 1, 1)
    )
    _store, link = make_link(**TWO_TO_TWO)
    _plain_store, plain = make_link(**TWO_TO_TWO)
    digests = {own.digest for own in plan(replace(link, layouts=recorded.encode()))}
    assert digests == {own.digest for own in plan(plain)}
    assert "the recorded layouts are wrong for trainer rank 0: " in caplog.text


def test_trainer_ranks_plan_while_an_engine_rank_traces() -> None:
    recorded = RecordedLayouts(
        CONFIG, "float32", MegatronSizes(padded_vocab=16, dp=2), SGLangSizes(1, 2, 1, 1, 1)
    )
    _store, link = make_link(**TWO_TO_TWO)

    def make_shards(end: LinkEnd) -> MakeShards:
        layout = recorded.source() if end.is_sender else recorded.target()

        def trace(_: HfTensors) -> Sequence[Shard]:
            if not end.is_sender:
                late_s = time.monotonic() + link.timeout_s
                end.store.collect("recorded plan", range(2), link.names, end.name, late_s)
            return [
                Shard(box, box.name, 0, contiguous_strides(box.shape), dtype)
                for box, dtype in boxes_of(layout, end.side_rank)
            ]

        return trace

    ends = open_ends(replace(link, layouts=recorded.encode()))
    plans = run_ranks([planning(end, make_shards(end)) for end in ends])
    assert len({own.digest for own in plans}) == 1
    assert plans[0].digest.startswith("recorded ")
    sent, received = (
        sorted(str((b.source_rank, b.target_rank, b)) for own in side for b in own.buckets)
        for side in (plans[:2], plans[2:])
    )
    assert sent == received


def test_a_rank_whose_shards_cannot_be_had_is_named_at_all_ranks() -> None:
    _store, link = make_link(timeout_s=5.0)
    sender, receiver = open_ends(link)
    errors: list[Exception] = []

    def fail(_: HfTensors) -> Sequence[Shard]:
        raise ValueError("w2 is covered twice")

    def act(run: Callable[[], RankPlan]) -> None:
        try:
            run()
        except (ValueError, TransferError) as error:
            errors.append(error)

    run_ranks([lambda: act(planning(sender)), lambda: act(planning(receiver, fail))])
    assert {str(error) for error in errors} == {
        "w2 is covered twice",
        "rank 0 of engine engine-0 failed: w2 is covered twice",
    }


def test_a_peer_that_planned_otherwise_is_named_before_a_byte_moves() -> None:
    _store, link = make_link(timeout_s=5.0)
    sender, receiver = open_ends(link)
    receiver.store.publish("layout", 1, encode_shards(column_cut(HF, 0, 1, "bfloat16")[0]))
    receiver.store.publish("machine", 1, json.dumps([machine_id(), [XXH3]]).encode())
    receiver.store.publish("plan", 1, json.dumps({"0": "otherwise"}).encode())
    with pytest.raises(
        TransferError,
        match=r"trainer rank 0 and rank 0 of engine engine-0 made different plans .* otherwise$",
    ):
        PlanHandshake(sender).run(lambda _: row_cut(HF, 0, 1, "float32")[0])


@pytest.mark.parametrize("theirs", [(XXH3, ROWS), (ROWS,), ("later", ROWS)])
def test_ranks_take_the_first_kind_of_checksum_that_all_compute(theirs: tuple[str, ...]) -> None:
    _store, link = make_link(timeout_s=20.0)
    sender, receiver = open_ends(link)
    shards = column_cut(HF, 0, 1, "bfloat16")[0]
    receiver.store.publish("layout", 1, encode_shards(shards))
    receiver.store.publish("machine", 1, json.dumps([machine_id(), theirs]).encode())

    def run() -> str:
        return PlanHandshake(sender).run(lambda _: row_cut(HF, 0, 1, "float32")[0]).sums

    def answer() -> str:
        """Agree with whatever the sender planned."""
        plan = receiver.store.collect("plan", [0], link.names, "test", time.monotonic() + 20)
        digest = json.loads(plan[0])["1"]
        receiver.store.publish("plan", 1, json.dumps({"0": digest}).encode())
        return XXH3 if XXH3 in theirs else ROWS

    taken, expected = run_ranks([run, answer])
    assert taken == expected


def test_ranks_without_a_common_kind_of_checksum_are_named() -> None:
    _store, link = make_link(timeout_s=20.0)
    sender, receiver = open_ends(link)
    shards = column_cut(HF, 0, 1, "bfloat16")[0]
    receiver.store.publish("layout", 1, encode_shards(shards))
    receiver.store.publish("machine", 1, json.dumps([machine_id(), ["later"]]).encode())
    with pytest.raises(
        TransferError,
        match=r"no kind of checksum in common .*rank 0 of engine engine-0: later\); run one",
    ):
        PlanHandshake(sender).run(lambda _: row_cut(HF, 0, 1, "float32")[0])


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_ranks_of_one_machine_may_write_into_an_engine_rank_that_opens_its_memory() -> None:
    _store, link = make_link(**TWO_TO_TWO)
    *ends, last = open_ends(link)
    memory = OpenMemory([Segment(mmap.PAGESIZE), Segment(mmap.PAGESIZE)])
    plans = run_ranks([planning(end) for end in (*ends, replace(last, memory=memory))])
    into_last = {3: memory.name}
    assert [own.direct for own in plans] == [into_last, into_last, {}, {0: "", 1: ""}]


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        (RankMachine("here", [XXH3], writes=True), {0: ""}),
        (RankMachine("elsewhere", [XXH3], writes=True), {}),
        (RankMachine("here", [XXH3], writes=False), {}),
    ],
)
def test_only_trainer_ranks_of_the_machine_that_have_a_compiler_write(
    trainer: RankMachine, expected: dict[int, str]
) -> None:
    engine = RankMachine("here", [XXH3], memory="socket")
    assert direct_peers([trainer, engine], 1, 1) == expected
    assert direct_peers([trainer, engine], 1, 0) == dict.fromkeys(
        (1,) if expected else (), "socket"
    )
