"""Images of an overlong prompt are shrunk as little as possible, and placeholders expanded."""

from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.data.images.encoded import expand_placeholders, limit_that_fits


@given(
    st.lists(st.integers(1, 50), max_size=5),
    st.integers(-5, 200),
    st.integers(1, 10),
    st.integers(1, 60),
)
def test_the_limit_is_the_largest_that_fits(
    sizes: list[int], budget: int, least: int, most: int
) -> None:
    def total(limit: int) -> int:
        return sum(min(size, limit) for size in sizes)

    found = limit_that_fits(
        lambda image, limit: min(sizes[image], limit), len(sizes), budget, least, most
    )
    allowed = range(least, max(least, most) + 1)
    fitting = [limit for limit in allowed if total(limit) <= budget]
    assert found == max(fitting, default=None)


@given(st.lists(st.integers(0, 3), max_size=20), st.data())
def test_placeholders_are_expanded_in_order(ids: list[int], data: st.DataObject) -> None:
    counts = [data.draw(st.integers(1, 4)) for _ in range(ids.count(2))]
    out = expand_placeholders(ids, 2, counts)
    assert [token for token in out if token != 2] == [token for token in ids if token != 2]
    assert out.count(2) == sum(counts)
    runs = iter(counts)
    again = [token for each in ids for token in [each] * (next(runs) if each == 2 else 1)]
    assert out == again
