"""Options that a recipe does without have a reason, and the tables have no others."""

from mcore_rl.tools.translate.slime_unneeded import CONFIG, OF_MEGATRON, OF_SLIME, reason_of
from tests.tools.translate.peer_options import SLIME

OF_OTHER_DEFINITIONS = {
    "--spec",
    "--use-gated-attention",
    "--post-self-attn-",
    "--post-mlp-",
    "--router-",
    "--sglang-router-",
    "--sglang-enable-dp-attention",
    "--fp16",
    "--bf16",
    "--lora-",
    "--target-modules",
    "--megatron-to-hf-mode",
    "--qkv-format",
}
"""slime's patches of Megatron, its router, SGLang, the dtypes and miles, a fork, declare them."""


def test_reasons_are_by_name_or_by_a_prefix_that_ends_with_a_dash() -> None:
    assert reason_of("--update-weight-mode") == OF_SLIME["--update-weight-"]
    assert reason_of("--load") == OF_SLIME["--load"] and reason_of("--load-other") is None
    assert reason_of("--hidden-size") == CONFIG
    assert reason_of("--nonsense") is None


def test_every_entry_is_an_option() -> None:
    names = {name for group in SLIME.values() for name in group}
    idle = {
        entry
        for entry in {**OF_MEGATRON, **OF_SLIME}
        if entry not in names
        and not (entry.endswith("-") and any(name.startswith(entry) for name in names))
    }
    assert idle <= OF_OTHER_DEFINITIONS
