"""The pictures of the page that the documents show can be drawn from a run's folder."""

from pathlib import Path

import pytest
from PIL import Image

from mcore_rl.logs.token_rows import TokenTexts
from mcore_rl.types.scores import Scores
from tests.support.browser import find_browser
from tests.support.samples import HeldSampleLog, make_sample
from tests.support.view_picture import SUBTRACTION, WIDTH, draw_pictures


class Words:
    """Stands in for a tokenizer."""

    def batch_decode(self, sequences: list[list[int]]) -> list[str]:
        return [f"t{token} " for [token] in sequences]


@pytest.mark.skipif(find_browser() is None, reason="there is no Chromium (apt-get install)")
def test_pictures_of_a_run_show_its_curves_and_a_wrong_sample(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with HeldSampleLog(
        run_dir, console=False, to_texts=TokenTexts(Words()), token_samples=2
    ) as log:
        for step in range(1, 4):
            log.log(step, {"reward/mean": step / 3, "loss/entropy": 1 / step})
            samples = [make_sample(0, "right"), make_sample(1, f"wrong, Ada {SUBTRACTION} 2")]
            log.log_held(step, samples, Scores([1.0, 0.0]))
    draw_pictures(run_dir, tmp_path)
    for name in ("view.png", "view_curves.png"):
        with Image.open(tmp_path / name) as picture:
            assert picture.width == WIDTH
            colors = picture.convert("RGB").getcolors(WIDTH * picture.height)
            assert colors is not None and len(colors) > 50, "a page, not a blank"
        assert (tmp_path / name).stat().st_size < 300_000
