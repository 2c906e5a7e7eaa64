"""Starts of CartPole, for a tiny policy that reads four words and answers with one.

    <|user|> x3 v3 a4 w5 <|assistant|> right

The words say in which range position, velocity, angle and angular velocity lie; the recipe
`tiny_agent_cartpole` has the ranges. Nothing is demonstrated: the policy finds by itself that left
and right are answers, and which of them keeps the pole upright.
"""

import random
from pathlib import Path
from typing import Any

from mcore_rl.data.rows import prompt_row, write_parquet
from mcore_rl.tasks.tiny_models import make_vocabulary, write_tiny_model

NUM_TRAIN = 2000
NUM_HELD_OUT = 20
LABELS = "xvaw"
"""Position, velocity, angle and angular velocity, as agents.options.labels of the recipe."""
NUM_RANGES = 10
"""Ranges that a number may lie in, at most."""
ACTIONS = ("left", "right")
SIZES: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_experts": 4,
    "head_dim": 16,
}
"""One layer is enough for a policy that weighs four words, and engines answer faster."""


def prepare_cartpole(out_dir: Path, seed: int = 0) -> None:
    """Write {train,heldout}.parquet and model/ (config.json and tokenizer) to `out_dir`.

    A row is a start: extra_info.seed is what the game is reset with. No held-out start is trained
    on.
    """
    starts = random.Random(seed).sample(range(2**31), NUM_TRAIN + NUM_HELD_OUT)
    for name, own in (("heldout", starts[:NUM_HELD_OUT]), ("train", starts[NUM_HELD_OUT:])):
        rows = []
        for index, start in enumerate(own):
            row = prompt_row("", "", "cartpole", name, index)
            row["extra_info"]["seed"] = start
            rows.append(row)
        write_parquet(rows, out_dir / f"{name}.parquet")
    write_tiny_model(out_dir / "model", vocabulary(), **SIZES)
    print(f"{NUM_TRAIN} training and {NUM_HELD_OUT} held-out starts in {out_dir}")


def vocabulary() -> list[str]:
    """Return special tokens, words of observations and actions; a token's id is its index."""
    words = {f"{label}{number}" for label in LABELS for number in range(NUM_RANGES)}
    return make_vocabulary(0, {*words, *ACTIONS})
