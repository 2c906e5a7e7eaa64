"""Options of another system are taken, and those that nobody takes are left."""

from dataclasses import replace

from mcore_rl.tools.translate.translation import ForeignOptions, says


def test_options_that_nobody_read_are_left() -> None:
    options = ForeignOptions({"a.x": 1, "a.y": 2, "b": None, "c": 3, "d": False}, is_whole=False)
    assert options.take("b", 7) == 7 and options.take("c", 0) == 3
    assert options.below("a.", but=("y",)) == {"x": 1}
    assert options.list_left() == {"a.y": 2, "d": False}
    assert replace(options, is_whole=True).list_left() == {"a.y": 2}


def test_a_value_may_say_nothing() -> None:
    assert says(1) and says("x") and says(0) and not says(None) and not says([]) and not says(False)
