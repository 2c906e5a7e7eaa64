"""Pages show the layers that import-linter checks."""

from pathlib import Path

import pytest

from tests.support.layers import PAGES, ROOMS, cut_layers, draw_layers, read_layers
from tests.support.policy import ROOT, read


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_shows_the_layers_of_pyproject(page: Path) -> None:
    _, drawn, _ = cut_layers(read(page))
    assert drawn == draw_layers(), "run `make layers`"


def test_every_folder_of_the_package_is_in_a_layer_and_described() -> None:
    rooms = {room for _, layer in read_layers() for room in layer}
    folders = {path.parent.name for path in (ROOT / "mcore_rl").glob("*/__init__.py")}
    assert rooms == {*folders, "cli", "api"}
    assert rooms <= ROOMS.keys()
