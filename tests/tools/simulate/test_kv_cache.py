"""Which requests a KV cache has room for."""

from typing import Any, cast

import pytest

from mcore_rl.tools.simulate.kv_cache import (
    CLIP_NEW_TOKENS,
    FIRST_RATIO,
    LEAST_RATIO,
    SHORT_PROMPT_LEN,
    EngineRequest,
    KvCache,
)


def request(prompt: int, max_len: int = 100, num_generated: float = 0.0) -> EngineRequest:
    done: Any = None
    return EngineRequest(prompt, 50, max_len, max_len, done, num_generated=num_generated)


def test_samples_of_a_short_prompt_compute_it_each() -> None:
    cache = KvCache(1000)
    pair = [EngineRequest(1, SHORT_PROMPT_LEN, 9, 9, cast(Any, None)) for _ in range(2)]
    assert [cache.enter(request) for request in pair] == [SHORT_PROMPT_LEN] * 2
    assert cache.free == 1000 - SHORT_PROMPT_LEN, "they keep it once"


def test_where_samples_do_not_wait_those_let_in_together_compute_their_prompt_each() -> None:
    cache = KvCache(1000, share_prompts=False)
    assert [cache.enter(request(1)) for _ in range(3)] == [50, 50, 50]
    assert cache.free == 950, "they keep it once"
    running = [request(1, max_len=100)]
    assert cache.begin_batch(running, 0) == cache.room(running, 0)
    assert [cache.enter(request(prompt)) for prompt in (1, 2, 2)] == [0, 50, 50]


def test_a_prompt_counts_once_and_its_keys_are_computed_once() -> None:
    cache = KvCache(1000)
    assert cache.count_needed(request(1)) == 150
    first, second = request(1), request(1)
    assert (cache.enter(first), cache.enter(second)) == (50, 0)
    assert cache.free == 950 and cache.count_needed(request(1)) == 100
    cache.grow(30)
    first.num_generated = 15
    cache.leave(first)
    assert cache.free == 1000 - 50 - 15
    second.num_generated = 15
    cache.leave(second)
    assert cache.free == 1000
    assert cache.enter(request(1)) == 0, "still cached"
    cache.flush()
    assert cache.enter(request(1, num_generated=7)) == 57, "what was generated is computed again"


def test_running_requests_keep_room_for_a_share_of_what_they_may_generate() -> None:
    cache = KvCache(10_000)
    running = [request(1, max_len=2 * CLIP_NEW_TOKENS)]
    cache.enter(running[0])
    assert cache.room(running, 0) == pytest.approx(9950 - FIRST_RATIO * CLIP_NEW_TOKENS)
    later = cache.room(running, 100_000)
    running[0].began_at = 100_000
    assert cache.room(running, 100_000) == pytest.approx(9950 - LEAST_RATIO * CLIP_NEW_TOKENS)
    assert later > cache.room(running, 100_000), "little is left to generate"


def test_after_a_retraction_more_room_is_kept() -> None:
    cache = KvCache(10_000)
    running = [request(k, max_len=1000) for k in range(4)]
    for each in running:
        cache.enter(each)
    before = cache.room(running, 5000)
    for each in running:
        each.began_at = 4100
    cache.note_retraction(running, 5000)
    expected = (4 * 900 + 4 * 20) / 4001
    assert cache.room(running, 5000) == pytest.approx(9800 - expected * 4 * 100)
    assert before > cache.room(running, 5000) - 4000
