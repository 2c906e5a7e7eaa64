"""A translation is written as a recipe that says what each option was made of."""

import yaml

from mcore_rl.tools.translate.systems import write_recipe
from mcore_rl.tools.translate.translation import Decision, RecipeLine, Translation


def test_values_are_read_back_as_they_were() -> None:
    values = {"a": 1e-6, "b": 0.2, "c": True, "d": ["x: y", "z"], "e": "1", "f": 10**20, "g": 3e-5}
    lines = tuple(
        RecipeLine(f"group.{name}", value, ("its.source",)) for name, value in values.items()
    )
    text = write_recipe(Translation(lines, (), ()), "title")
    assert text.startswith("# title\n")
    assert yaml.safe_load(text)["group"] == values
    assert text.count("# its.source") == len(values)


def test_decisions_are_comments_at_the_top() -> None:
    decision = Decision("a.b", None, "some advice that is " + "long " * 40)
    text = write_recipe(Translation((RecipeLine("x.y.z", 1),), (decision,), ()), "title")
    head, _, body = text.partition("defaults:")
    assert "# To decide: a.b (not given): some advice" in head
    assert all(line.startswith("#") and len(line) <= 120 for line in head.splitlines())
    assert yaml.safe_load("defaults:" + body)["x"] == {"y": {"z": 1}}
