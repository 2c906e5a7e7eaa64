"""The handshake of ranks in threads: one plan, recorded or listed layouts, errors with names."""

import mmap
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from mcore_rl.tools.doctor.toy_engine import column_cut, make_tensors, row_cut
from mcore_rl.weight_sync.buckets import Bucket
from mcore_rl.weight_sync.link_end import LinkEnd, OpenMemory, publish_facts
from mcore_rl.weight_sync.link_store import LISTED_PLAN, RECORDED_PLAN, PlanAnswer, make_rank_key
from mcore_rl.weight_sync.plan_handshake import (
    Drafts,
    HfTensors,
    MakeShards,
    PlanHandshake,
    RankPlan,
)
from mcore_rl.weight_sync.roster import RankFacts, make_roster
from mcore_rl.weight_sync.store.client import RemoteClient
from mcore_rl.weight_sync.transports.host.segment import Segment
from mcore_rl.weight_sync.verify import XXH3
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weight_sync.wire import Link, encode_shards
from mcore_rl.weights.box import Shard, contiguous_strides
from mcore_rl.weights.layouts.layout import list_boxes
from mcore_rl.weights.layouts.listed import RecordedLayouts
from mcore_rl.weights.layouts.megatron import MegatronSizes
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from tests.support.link_ends import HOST, make_link, open_ends, run_ranks

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


def recorded(num_senders: int) -> RecordedLayouts:
    trainer = MegatronSizes(padded_vocab=16, dp=num_senders)
    return RecordedLayouts(CONFIG, "float32", trainer, SGLangSizes(1, 2, 1, 1, 1))


RECORDED = recorded(NUM_SENDERS)
TWO_TO_TWO = {"num_senders": NUM_SENDERS, "num_receivers": NUM_RECEIVERS}


def own_shards(end: LinkEnd) -> Sequence[Shard]:
    if end.is_sender:
        return row_cut(HF, end.side_rank, NUM_SENDERS, "float32")[0]
    return column_cut(HF, end.side_rank, NUM_RECEIVERS, "bfloat16")[0]


def planning(end: LinkEnd, make_shards: MakeShards | None = None) -> Callable[[], RankPlan]:
    return PlanHandshake(end, make_shards or (lambda _: own_shards(end))).run


def buckets_of(own: RankPlan) -> list[Bucket]:
    return [planned.bucket for planned in own.buckets]


def key_of(bucket: Bucket) -> tuple[int, int, int]:
    return bucket.source_rank, bucket.target_rank, bucket.index


def plan(link: Link) -> list[RankPlan]:
    return run_ranks([planning(end) for end in open_ends(link)])


def test_both_ends_of_each_pair_plan_the_same_buckets() -> None:
    _store, link = make_link(**TWO_TO_TWO)
    plans = plan(link)
    senders = plans[:NUM_SENDERS]
    receivers = plans[NUM_SENDERS:]
    sent = {key_of(b): b for own in senders for b in buckets_of(own)}
    received = {key_of(b): b for own in receivers for b in buckets_of(own)}
    assert sent == received
    for rank, own in enumerate(senders):
        assert {bucket.source_rank for bucket in buckets_of(own)} == {rank}
    for rank, own in enumerate(receivers):
        assert {bucket.target_rank for bucket in buckets_of(own)} == {rank}
        wanted = sum(shard.box.numel for shard in own_shards(open_ends(link)[2 + rank]))
        assert sum(piece.box.numel for b in buckets_of(own) for piece in b.pieces) == wanted
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


def recorded_shards(end: LinkEnd) -> Sequence[Shard]:
    layout = RECORDED.source() if end.is_sender else RECORDED.target()
    return [
        Shard(box, box.name, 0, contiguous_strides(box.shape), dtype)
        for box, dtype in list_boxes(layout, end.side_rank)
    ]


def test_trainer_ranks_plan_while_an_engine_rank_traces() -> None:
    store, link = make_link(**TWO_TO_TWO)
    keys = [make_rank_key(RECORDED_PLAN, rank) for rank in range(NUM_SENDERS)]

    def make_shards(end: LinkEnd) -> MakeShards:
        def trace(_: HfTensors) -> Sequence[Shard]:
            assert end.is_sender or store.client.wait(keys, link.timeout_s)
            return recorded_shards(end)

        return trace

    ends = open_ends(replace(link, layouts=RECORDED.encode()))
    plans = run_ranks([planning(end, make_shards(end)) for end in ends])
    assert len({own.digest for own in plans}) == 1
    assert plans[0].digest.startswith("recorded ")
    sent, received = (
        sorted((*key_of(b), str(b)) for own in side for b in buckets_of(own))
        for side in (plans[:2], plans[2:])
    )
    assert sent == received


def test_a_rank_reuses_its_draft_for_a_link_with_equal_layouts_hosts_and_sums() -> None:
    drafts = Drafts()
    found = []
    for machines in ("aabb", "aacc", "aaba", "aabb"):
        _store, link = make_link(**TWO_TO_TWO)
        roster = make_roster([RankFacts(machine, (XXH3,)) for machine in machines], link)
        link = replace(link, layouts=RECORDED.encode())
        end = LinkEnd.open(link, 1, HOST, roster=roster)
        handshake = PlanHandshake(end, lambda _, end=end: recorded_shards(end), drafts)
        answer = handshake.answer()
        found.append((answer, handshake.conclude("").buckets))
    away, elsewhere, shared, again = found
    assert away[1] is elsewhere[1] is again[1] is not shared[1]
    assert away[0] is elsewhere[0] is again[0] != shared[0]


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


def test_a_peer_that_planned_otherwise_is_named_at_all_ranks_before_a_byte_moves() -> None:
    _store, link = make_link(timeout_s=20.0)
    sender, receiver = open_ends(link)

    def answer_otherwise() -> None:
        publish_facts(receiver)
        for topic, answer in (
            (RECORDED_PLAN, PlanAnswer("none")),
            (LISTED_PLAN, PlanAnswer.make({0: "0" * 64})),
        ):
            receiver.store.publish(topic, 1, answer.encode())
        lists = encode_shards(column_cut(HF, 0, 1, "bfloat16")[0])
        receiver.store.publish("layout", 1, lists)

    def run() -> str:
        shards = row_cut(HF, 0, 1, "float32")[0]
        with pytest.raises(TransferError) as caught:
            PlanHandshake(sender, lambda _: shards).run()
        return str(caught.value)

    error, _ = run_ranks([run, answer_otherwise])
    assert error is not None and re.fullmatch(
        r"trainer rank 0 and rank 0 of engine engine-0 made different plans for their pair:"
        r" [0-9a-f]{16}, 0{16}",
        error,
    )


@pytest.mark.parametrize("num_senders", [2, 32])
def test_a_rank_makes_as_many_requests_however_many_ranks_there_are(
    num_senders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_requests: Counter[int] = Counter()
    ask = RemoteClient._ask

    def count(self: RemoteClient, *request: bytes) -> list[bytes]:
        num_requests[id(self)] += 1
        return ask(self, *request)

    monkeypatch.setattr(RemoteClient, "_ask", count)
    store, link = make_link(num_senders=num_senders, num_receivers=2, timeout_s=60.0)
    ends = open_ends(replace(link, layouts=recorded(num_senders).encode()))

    def shards_of(end: LinkEnd) -> MakeShards:
        layout = recorded(num_senders).source() if end.is_sender else RECORDED.target()
        return lambda _: [
            Shard(box, box.name, 0, contiguous_strides(box.shape), dtype)
            for box, dtype in list_boxes(layout, end.side_rank)
        ]

    plans = run_ranks([planning(end, shards_of(end)) for end in ends])
    assert {own.digest.split()[0] for own in plans} == {"recorded"}
    # It publishes facts and an answer, and reads the roster and the verdict.
    assert [num_requests[id(end.store.client)] for end in ends] == [4] * len(ends)
    assert store.num_keys == 2


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_ranks_of_one_machine_may_write_into_an_engine_rank_that_opens_its_memory() -> None:
    _store, link = make_link(**TWO_TO_TWO)
    *ends, last = open_ends(link)
    memory = OpenMemory([Segment(mmap.PAGESIZE), Segment(mmap.PAGESIZE)])
    plans = run_ranks([planning(end) for end in (*ends, replace(last, memory=memory))])
    into_last = {3: memory.name}
    assert [own.direct for own in plans] == [into_last, into_last, {}, {0: "", 1: ""}]
