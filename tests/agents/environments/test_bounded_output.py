"""The beginning and the end of an output are kept."""

from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.agents.environments.command import BoundedOutput


@given(st.lists(st.text("abc", max_size=30)), st.integers(2, 40))
def test_both_ends_are_kept_whatever_the_chunks(chunks, most):
    output = BoundedOutput(most)
    for chunk in chunks:
        output.add(chunk.encode())
    whole = "".join(chunks)
    if len(whole) <= most:
        assert output.text == whole
    else:
        head, tail = whole[: most - most // 2], whole[len(whole) - most // 2 :]
        assert output.text == f"{head}\n[{len(whole) - most} bytes left out]\n{tail}"
