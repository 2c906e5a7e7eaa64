"""docs/options.md is what `make options-doc` writes."""

from mcore_rl.tools.options import list_options, make_page
from tests.support.policy import ROOT


def test_the_page_of_options_is_current() -> None:
    written = (ROOT / "docs/options.md").read_text()
    assert written == make_page(list_options()), "run make options-doc"
