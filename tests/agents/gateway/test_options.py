"""Bounds of a gateway."""

import pytest

from mcore_rl.agents.gateway.admission import GatewayOptions


def test_bounds_must_be_positive_and_all_interfaces_need_a_name():
    with pytest.raises(ValueError, match=r"GatewayOptions\.answer_s=0"):
        GatewayOptions(answer_s=0)
    with pytest.raises(ValueError, match="set public_host"):
        GatewayOptions(host="0.0.0.0")
    assert GatewayOptions(host="0.0.0.0", public_host="node1").public_host == "node1"
