"""An entry names the function that replaces, or the module whose lines do."""

from mcore_rl.device.replaced.entry import Patch


def test_an_entry_is_named_after_its_function_or_its_module() -> None:
    assert Patch("a.b:c", ("x.y",), "", "").function == "c"
    assert Patch("a:", ("x.y",), "", "").function == "a"
