"""NeMo-RL's optimizers and schedules as options of a recipe."""

from typing import Any

import pytest

from mcore_rl.tools.translate.nemo_rl import SCHEDULES
from tests.tools.translate.accounts import decided, values
from tests.tools.translate.peer_options import nemo

GROUP = "policy__megatron_cfg"


def of(**given: Any) -> dict[str, Any]:
    return values(nemo(**given))


@pytest.mark.parametrize("style", SCHEDULES)
def test_megatrons_optimizer_and_schedule(style: str) -> None:
    given: dict[str, Any] = {
        f"{GROUP}__optimizer__lr": 1e-5,
        f"{GROUP}__optimizer__min_lr": 1e-6,
        f"{GROUP}__scheduler__lr_decay_style": style,
        f"{GROUP}__scheduler__lr_warmup_iters": 7,
    }
    found = of(**given)
    wanted = {"lr": 1e-5, "schedule": style, "warmup_steps": 7, "clip_grad": 1.0}
    assert {name: found[f"train.optimizer.{name}"] for name in wanted} == wanted
    # Megatron's constant schedule never falls.
    least = None if style == "constant" else 1e-6
    assert found.get("train.optimizer.min_lr") == least


def test_torchs_optimizer() -> None:
    given: dict[str, Any] = {"policy__optimizer__kwargs__betas": [0.8, 0.9]}
    found = of(**given, policy__optimizer__kwargs__lr=1e-4, policy__max_grad_norm=0.5)
    assert found["train.optimizer.lr"] == 1e-4 and found["train.optimizer.beta1"] == 0.8
    assert found["train.optimizer.clip_grad"] == 0.5
    assert "policy.scheduler" in decided(nemo(policy__scheduler=[{"name": "x"}]))
    assert "policy.optimizer.name" in decided(nemo(policy__optimizer__name="torch.optim.SGD"))


def test_an_optimizer_on_the_host_is_refused_with_the_reason() -> None:
    name = f"{GROUP}__optimizer__optimizer_cpu_offload"
    translation = nemo(**{name: True})
    [advice] = [d.advice for d in translation.decisions if d.source == name.replace("__", ".")]
    assert "copies that it keeps on the host" in advice
    style = f"{GROUP}__scheduler__lr_decay_style"
    assert style.replace("__", ".") in decided(nemo(**{style: "WSD"}))
