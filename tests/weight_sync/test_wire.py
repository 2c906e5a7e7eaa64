"""Everything that travels as bytes comes back as it was."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.weight_sync.wire import (
    Command,
    Link,
    Report,
    StageRequest,
    decode_command,
    decode_report,
    decode_shards,
    decode_stage_request,
    encode_command,
    encode_report,
    encode_shards,
    encode_stage_request,
)
from mcore_rl.weights.box import Box, Shard

LINK = Link("http://10.0.0.1:30000", "10.0.0.2", 4321, "a key", 2, 4, 1 << 20, 60.0)
RELAY_LINK = replace(LINK, engine="b", num_senders=4, relay=LINK.engine)
SHARDS = (
    Shard(Box("a", (0, 4), (2, 8)), "fused", 12, (4, 1), "bfloat16"),
    Shard(Box("b", (3,), (7,)), "norm", 0, (1,), "float32"),
)

sizes = st.lists(st.integers(0, 2**40), min_size=1, max_size=4).map(tuple)
shards = st.builds(
    Shard,
    box=sizes.map(lambda shape: Box("w", shape, tuple(size + 1 for size in shape))),
    tensor=st.text(max_size=8),
    offset=st.integers(0, 2**40),
    strides=sizes,
    dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]),
)


@pytest.mark.parametrize("layout", [SHARDS, ()])
def test_layouts(layout: tuple[Shard, ...]) -> None:
    assert decode_shards(encode_shards(layout)) == layout


@settings(max_examples=25)
@given(layout=st.lists(shards, max_size=5).map(tuple))
def test_layouts_of_any_shape(layout: tuple[Shard, ...]) -> None:
    assert decode_shards(encode_shards(layout)) == layout


@pytest.mark.parametrize("command", [Command(LINK, "connect"), Command(LINK, "swap", 17)])
def test_commands(command: Command) -> None:
    assert decode_command(encode_command(command)) == command


@pytest.mark.parametrize(
    "request_",
    [
        StageRequest(3),
        StageRequest(3, receive_link=RELAY_LINK),
        StageRequest(3, forward_link=RELAY_LINK),
        StageRequest(3, receive_link=LINK, forward_link=RELAY_LINK),
    ],
)
def test_stage_requests(request_: StageRequest) -> None:
    assert decode_stage_request(encode_stage_request(request_)) == request_


def test_reports() -> None:
    report = Report("trainer rank 1", "abc", 5, 1, 0.5, error="no", peer_lost=True, missing=True)
    assert decode_report(encode_report(report)) == report


def test_ranks_are_named_by_what_they_are() -> None:
    assert tuple(replace(LINK, num_receivers=1).names) == (
        "trainer rank 0",
        "trainer rank 1",
        "rank 0 of engine http://10.0.0.1:30000",
    )
    assert tuple(replace(RELAY_LINK, num_senders=1, num_receivers=1).names) == (
        "rank 0 of engine http://10.0.0.1:30000",
        "rank 0 of engine b",
    )


@pytest.mark.parametrize("name", ["num_senders", "num_receivers", "bucket_bytes", "timeout_s"])
def test_a_link_without_ranks_bytes_or_time_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"http://.*: {name}=0 must be greater than 0"):
        replace(LINK, **{name: 0})
