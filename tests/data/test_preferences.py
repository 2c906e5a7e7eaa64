"""Preference files become batches of chosen and rejected conversations by turns."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.data.preferences import (
    PreferenceStream,
    batches_of,
    conversations,
    load_pairs,
    preference_row,
)
from mcore_rl.tasks.arithmetic import make_tokenizer

PROMPT = [{"role": "user", "content": "Ada has 3 apples"}]


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


FORMS = [
    {"prompt": PROMPT, "chosen": answer("3 + 4 = 7"), "rejected": answer("3")},
    {"prompt": PROMPT, "chosen": "3 + 4 = 7", "rejected": "3"},
    {"prompt": "Ada has 3 apples", "chosen": "3 + 4 = 7", "rejected": answer("3")},
    {"chosen": PROMPT + answer("3 + 4 = 7"), "rejected": PROMPT + answer("3")},
    {"prompt": "unread", "chosen": PROMPT + answer("3 + 4 = 7"), "rejected": PROMPT + answer("3")},
    preference_row(PROMPT, "3 + 4 = 7", "3"),
]


def write(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


@pytest.mark.parametrize("row", FORMS, ids=range(len(FORMS)))
def test_every_form_is_the_same_two_conversations(row: dict[str, Any]) -> None:
    assert conversations(row, "here") == (PROMPT + answer("3 + 4 = 7"), PROMPT + answer("3"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": PROMPT, "chosen": "3"}, "here lacks `rejected`; it has chosen, prompt"),
        ({"chosen": "3", "rejected": "4"}, "here lacks `prompt`"),
        (
            {"prompt": PROMPT, "chosen": PROMPT, "rejected": "4"},
            "here: `chosen` must end with the assistant's",
        ),
        (
            {"prompt": PROMPT, "chosen": "3", "rejected": []},
            "here: `rejected` must end with the assistant's",
        ),
        (
            {
                "chosen": PROMPT + answer("3"),
                "rejected": [{"role": "user", "content": "Ben"}, *answer("4")],
            },
            "here: `chosen` and `rejected` answer different prompts",
        ),
    ],
)
def test_a_row_that_is_no_pair_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        conversations(row, "here")


def test_batches_hold_pairs_by_turns_and_go_on_after_a_restart(tmp_path: Path) -> None:
    rows = [preference_row(PROMPT, f"{i} + {i} = {2 * i}", str(i)) for i in range(8)]
    dropped = [preference_row(PROMPT, "3 " * 9, "3"), preference_row(PROMPT, "4", "4")]
    pairs = load_pairs(write(tmp_path, [*rows, *dropped]), make_tokenizer(), max_len=12)
    assert len(pairs) == 8
    first, second = PreferenceStream(pairs, 0), PreferenceStream(pairs, 0)
    batch = first.next_batch(6)
    assert batch.lens_N == (12, 8) * 3
    assert batch.loss_mask_T.tolist() == ([False] * 6 + [True] * 6 + [False] * 6 + [True] * 2) * 3
    assert batch.loss_weights_T is not None
    assert batch.loss_weights_T.tolist() == batch.loss_mask_T.float().tolist()
    second.load_state_dict(first.state_dict())
    assert first.next_batch(12).token_ids_T.tolist() == second.next_batch(12).token_ids_T.tolist()
    assert [len(part.lens_N) for part in batches_of(pairs, 3)] == [6, 6, 4]
    with pytest.raises(
        ValueError, match=r"none of 10 rows is a pair of different .* dpo.max_len=7 tokens"
    ):
        load_pairs(write(tmp_path, [*rows, *dropped]), make_tokenizer(), max_len=7)
