"""Decides how far the images of an overlong prompt are shrunk, so that it fits whole.

text 40, images 300 + 20 + 90 tokens, at most 200 in all
budget of the images: 160  -->  limit 70 tokens each: 70 + 20 + 70
"""

from collections.abc import Callable, Sequence


def limit_that_fits(
    num_tokens: Callable[[int, int], int], num_images: int, budget: int, least: int, most: int
) -> int | None:
    """Return the largest limit of tokens per image at which all images take at most `budget`.

    None if they do not fit even at `least`.

    num_tokens   (image, limit) -> tokens of the image if it is shrunk to `limit` tokens; it does
                 not fall as the limit rises
    most         the limit that shrinks no image
    """

    def fits(limit: int) -> bool:
        return sum(num_tokens(image, limit) for image in range(num_images)) <= budget

    most = max(least, most)
    if fits(most):
        return most
    if not fits(least):
        return None
    low = least
    high = most
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def expanded(token_ids: Sequence[int], placeholder_id: int, counts: Sequence[int]) -> list[int]:
    """Return token ids in which the i-th placeholder stands `counts[i]` times.

    The number of placeholders must be that of `counts`.
    """
    out: list[int] = []
    remaining = iter(counts)
    for token in token_ids:
        out.extend([token] * (next(remaining) if token == placeholder_id else 1))
    assert next(remaining, None) is None, "more counts than placeholders"
    return out
