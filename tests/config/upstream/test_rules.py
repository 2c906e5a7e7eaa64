"""Rules name real fields of upstream; every reason can be shown to a user."""

import pytest

from mcore_rl.config.upstream import (
    TO_DDP,
    TO_ENGINES,
    TO_OPTIMIZER,
    TO_SERVED,
    TO_TRANSFORMER,
    OpenGroup,
)
from mcore_rl.config.upstream.fields import read_fields
from mcore_rl.config.upstream.owned import Rules, with_reason

OWNERS = {"parallel": "parallel", "optimizer": "train.optimizer", "engine": "rollout"}


@pytest.mark.parametrize("kind", [TO_TRANSFORMER, TO_OPTIMIZER, TO_DDP, TO_ENGINES, TO_SERVED])
def test_rules_are_about_fields_that_upstream_has(kind: OpenGroup) -> None:
    fields = read_fields(kind.upstream)
    rules = kind.rules
    assert not {name for name in (*rules.refused, *rules.values) if name not in fields}
    for prefix in rules.prefixes:
        assert any(name.startswith(prefix) for name in fields), prefix
    for reason in (*rules.refused.values(), *rules.prefixes.values()):
        assert "{" not in reason.format(**OWNERS)
    assert not rules.refused.keys() & rules.values.keys()


def test_refusals_by_name_and_by_beginning() -> None:
    rules = Rules(with_reason("why", "a", "b"), prefixes={"x_": "all of them"})
    assert rules.refusal("a") == rules.refusal("b") == "why"
    assert rules.refusal("x_y") == "all of them"
    assert rules.refusal("c") is None
