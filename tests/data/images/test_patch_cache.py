"""The cache never holds more bytes than allowed, and forgets what was used longest ago."""

from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.data.images.batch import PatchCache


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 7)), max_size=30))
def test_bytes_are_bounded(puts: list[tuple[int, int]]) -> None:
    cache: PatchCache[int] = PatchCache(10)
    sizes: dict[int, int] = {}
    for key, num_bytes in puts:
        cache.put(key, num_bytes, num_bytes)
        sizes[key] = num_bytes
        assert cache.get(key) == num_bytes
        kept = {key: size for key, size in sizes.items() if cache.get(key) is not None}
        assert cache.num_bytes == sum(kept.values()) <= 10
        assert len(cache) == len(kept)


def test_the_least_recently_used_goes_first() -> None:
    cache: PatchCache[str] = PatchCache(2)
    cache.put("a", "a", 1)
    cache.put("b", "b", 1)
    cache.get("a")
    cache.put("c", "c", 1)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == ("a", None, "c")


def test_a_value_that_never_fits_is_not_kept() -> None:
    cache: PatchCache[str] = PatchCache(2)
    cache.put("a", "a", 1)
    cache.put("b", "b", 3)
    assert (cache.get("a"), cache.get("b")) == ("a", None)
