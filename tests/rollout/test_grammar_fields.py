"""Fields that need a grammar; test_field_gate.py lists those of each API."""

import pytest

from mcore_rl.rollout.request_fields import FieldError, refuse_grammars


def test_a_constraint_is_refused_with_the_way_to_get_it() -> None:
    with pytest.raises(FieldError, match=r"^regex='a\+' constrains .*--grammar-backend xgrammar"):
        refuse_grammars({"sampling_params": [{}, {"regex": "a+"}]})
    refuse_grammars({"tool_choice": "auto", "regex": None})
