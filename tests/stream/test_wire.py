"""What travels as bytes comes back as it was."""

import pytest

from mcore_rl.slices.box import Box, Shard
from mcore_rl.stream.wire import (
    Command,
    Link,
    Report,
    decode_command,
    decode_report,
    decode_shards,
    encode_command,
    encode_report,
    encode_shards,
)

LINK = Link("http://10.0.0.1:30000", "10.0.0.2", 4321, 2, 4, 1 << 20, 60.0)
SHARDS = (
    Shard(Box("a", (0, 4), (2, 8)), "fused", 12, (4, 1), "bfloat16"),
    Shard(Box("b", (3,), (7,)), "norm", 0, (1,), "float32"),
)


@pytest.mark.parametrize("shards", [SHARDS, ()])
def test_layouts(shards: tuple[Shard, ...]) -> None:
    assert decode_shards(encode_shards(shards)) == shards


@pytest.mark.parametrize("command", [Command(LINK, "connect"), Command(LINK, "swap", 17)])
def test_commands(command: Command) -> None:
    assert decode_command(encode_command(command)) == command


def test_reports() -> None:
    report = Report("trainer rank 1", "abc", 5, 1, 0.5, error="no", peer_lost=True)
    assert decode_report(encode_report(report)) == report


def test_a_link_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"http://e: num_receivers=0 must be greater than 0"):
        Link("http://e", "localhost", 1, 1, 0, 1, 1.0)
