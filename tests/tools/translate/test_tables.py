"""Tables of options make lines, decisions and reasons."""

from mcore_rl.tools.translate.translation import (
    Decision,
    ForeignOptions,
    RecipeLine,
    list_differing,
    longest_prefix,
    translate_renamed,
    translate_switched,
)


def test_renamed_options_have_the_others_default() -> None:
    options = ForeignOptions({"a": 3}, is_whole=False)
    table = {"a": ("x", 1), "b": ("y", 2), "c": ("z", None)}
    assert list(translate_renamed(options, table)) == [
        RecipeLine("x", 3, ("a",)),
        RecipeLine("y", 2, ("b",)),
    ]
    assert not options.list_left()


def test_an_option_behind_a_switch_counts_if_that_is_on() -> None:
    on, off = (ForeignOptions({"use": use}, is_whole=False) for use in (True, False))
    line = RecipeLine("log.x", "theirs", ("project", "use"))
    assert list(translate_switched(on, "use", "project", "log.x", "theirs")) == [line]
    assert not list(translate_switched(off, "use", "project", "log.x", "theirs"))


def test_options_that_differ_are_left_to_the_user() -> None:
    options = ForeignOptions({"a": 3, "b": 1}, is_whole=False)
    table = {"a": (1, "set x"), "b": (1, "set y"), "c": (None, "set z")}
    assert list(list_differing(options, table)) == [Decision("a", 3, "set x")]


def test_the_longest_prefix_counts() -> None:
    table = {"a": "short", "a.b": "long"}
    assert longest_prefix(table, "a.b.c") == "long" and longest_prefix(table, "a.c") == "short"
    assert longest_prefix(table, "b") is None
