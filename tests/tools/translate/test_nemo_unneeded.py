"""Options that a recipe does without have a reason, and the table has no others."""

from mcore_rl.tools.translate.nemo_unneeded import UNNEEDED, reason_of
from tests.tools.translate.peer_options import NEMO

OF_LATER_VERSIONS = {"policy.generation.refit_cfg", "ppo.async_ppo"}


def test_the_longest_name_decides() -> None:
    assert reason_of("policy.megatron_cfg.peft.dim") == "read with peft.enabled only"
    assert reason_of("policy.megatron_cfg.sequence_parallel") == UNNEEDED["policy.megatron_cfg"]
    assert reason_of("grpo.nonsense") is None


def test_every_entry_is_an_option() -> None:
    names = {name for group in NEMO.values() for name in group}
    # PPO's group has most of GRPO's options.
    names |= {name.replace("grpo.", "ppo.", 1) for name in names if name.startswith("grpo.")}
    names |= {name.replace("ppo.", "grpo.", 1) for name in names if name.startswith("ppo.")}
    idle = {entry for entry in UNNEEDED if not any(name.startswith(entry) for name in names)}
    assert idle <= OF_LATER_VERSIONS
