"""The page in a real browser: every tab, follows a run, shows text as text, and is fast enough."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.logs.token_rows import TokenTexts
from mcore_rl.types import EpisodeRecord, Row, Sample, TurnRecord, VersionSpan, WeightVersion
from mcore_rl.types.scores import Scores
from tests.support.browser import Browser, Page
from tests.support.many_samples import write_many_samples
from tests.support.pages import (
    READY,
    TABS,
    browse,
    fill_in,
    open_tab,
    open_view,
    read_texts,
    serve_runs,
    wait_for_index,
)
from tests.support.samples import HeldSampleLog, make_sample

EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


class Words:
    """Stands in for a tokenizer."""

    def batch_decode(self, sequences: list[list[int]]) -> list[str]:
        return [EVIL if token == 6 else f"t{token} " for [token] in sequences]


def make_episode() -> Sample:
    """Return an episode of two turns, sampled from two versions of the weights, with a tool."""
    row = Row(
        token_ids=np.array([1, 2, 5, 3, 6], np.int32),
        is_trained=np.array([False, False, True, False, True]),
        logprobs=np.array([0, 0, -0.5, 0, -4], np.float32),
        turn_T=np.array([-1, -1, 0, -1, 1], np.int16),
        versions=(VersionSpan(2, 3, WeightVersion(7)), VersionSpan(4, 5, WeightVersion(8))),
    )
    call = {"function": {"name": "calculator", "arguments": '{"a": 1}'}}
    asked = {"role": "assistant", "content": EVIL, "tool_calls": [call]}
    first = TurnRecord(0, None, "", ({"role": "user", "content": EVIL},), asked, 1, "stop", 0.25)
    told = ({"role": "tool", "content": EVIL},)
    answer = {"role": "assistant", "content": "done"}
    second = TurnRecord(1, 0, "", told, answer, 1, "stop", 0.5, ("ok",))
    episode = EpisodeRecord((row,), (first, second), "done", 0.75, detail=EVIL)
    return replace(make_sample(3, EVIL), episode=episode)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs; the second has texts that would be programs if the page took them for HTML."""
    folder = tmp_path_factory.mktemp("pages")
    for number, name in enumerate(("plain", "odd")):
        options: dict[str, Any] = {"to_texts": TokenTexts(Words()), "token_samples": 4}
        with HeldSampleLog(folder / name, console=False, **options) as log:
            for step in range(1, 31):
                log.log(step, {"reward/mean": step / 60 + number / 10, EVIL: 1.0})
                samples = [make_sample(0, "1"), make_sample(0, "2"), make_episode()]
                errors = ["", "", EVIL]
                scores = Scores([1.0, 0.0, float("nan")], {"right": [1.0, 0.0, 0.0]}, errors)
                log.log_held(step, samples, replace(scores, advantages_N=[0.7, -0.7, 0.0]))
        (folder / name / "logs").mkdir()
        (folder / name / "logs" / "controller.log").write_text(
            "2026-11-28 17:01:01,000 INFO mcore_rl.logs.logger: step 1: rollout\n"
            f"2026-11-28 17:01:03,000 WARNING mcore_rl.run: {EVIL}\n"
        )
        (folder / name / "config.yaml").write_text(
            f"run: {{steps: 30}}\ntrain: {{optimizer: {{lr: 0.{number + 1}}}}}\n"
            f'model: {{path: "{EVIL.replace(chr(34), chr(92) + chr(34))}"}}\n'
        )
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browse(tmp_path_factory.mktemp("profile")) as started:
        yield started


def test_texts_of_samples_are_never_taken_for_html(folder: Path, browser: Browser) -> None:
    with serve_runs(folder / "odd") as server:
        wait_for_index(server)
        page = open_view(browser, server)
        page.run("document.title = 'mine'")
        for tab in TABS:
            open_tab(page, tab)
        open_tab(page, "curves")
        fill_in(page, {"metric-search": "script"})
        page.run("document.querySelector('.chip').click()")
        page.wait("document.querySelectorAll('figure').length === 2")
        open_tab(page, "samples")
        fill_in(page, {"text": "script"})
        page.wait("document.getElementById('found')?.dataset.total === '30'")
        page.run("document.querySelector('tr.row').click()")
        page.wait("document.querySelector('#tokens')")
        texts = read_texts(page, ".detail .text-block")
        assert sum(EVIL in text for text in texts) >= 4, texts
        assert EVIL in read_texts(page, ".token")
        assert page.run("document.querySelectorAll('main script, main img').length") == 0
        assert page.run("document.title") == "mine"
        assert page.errors == []


def test_an_episode_has_turns_calls_tokens_and_versions(folder: Path, browser: Browser) -> None:
    with serve_runs(folder / "plain") as server:
        wait_for_index(server)
        page = open_view(browser, server)
        open_tab(page, "samples")
        fill_in(page, {"text": "done"})
        page.wait("document.getElementById('found')?.dataset.total === '30'")
        page.run("document.querySelector('tr.row').click()")
        page.wait("document.querySelector('#tokens')")
        roles = [text.partition(" ·")[0] for text in read_texts(page, ".turn > .role")]
        assert roles == ["user", "assistant", "tool", "assistant"]
        detail = "\n".join(read_texts(page, ".detail"))
        assert 'calculator({"a": 1})' in detail
        assert "turn 2 · 1 tokens · stop · reward 0.5 · calls: ok" in detail
        assert "made of right 0" in detail
        assert len(read_texts(page, ".token.untrained")) == 3
        versions = "[...document.querySelectorAll('.token:not(.untrained)')]"
        assert page.run(f"{versions}.map((each) => each.dataset.version)") == ["7", "8"]
        colors = page.run(f"{versions}.map((each) => each.style.background)")
        assert len(set(colors)) == 2, "log-probs of -0.5 and -4"
        titles = page.run(f"{versions}.map((each) => each.title)")
        assert titles[1] == "log-prob -4 (p 0.01832), weights 8, turn 2"


def test_runs_are_compared_by_curves_and_options(folder: Path, browser: Browser) -> None:
    with serve_runs(folder / "plain", folder / "odd") as server:
        wait_for_index(server)
        page = open_view(browser, server)
        [caption] = read_texts(page, "figure[data-metric='reward/mean'] figcaption b")
        assert caption == "reward/mean"
        page.wait("document.querySelector('canvas').width > 300")
        colors = (
            "(() => { const c = document.querySelector('canvas'); const data ="
            " c.getContext('2d').getImageData(0, 0, c.width, c.height).data; const found = new"
            " Set(); for (let k = 0; k < data.length; k += 4) if (data[k + 3] === 255)"
            " found.add(data.slice(k, k + 3).join()); return [...found]; })()"
        )
        assert {"76,120,168", "245,133,24"} <= set(page.run(colors)), "a line of each run"
        open_tab(page, "config")
        rows = read_texts(page, "#options tbody tr")
        assert rows == ["train.optimizer.lr0.10.21e-06"]
        open_tab(page, "groups")
        assert read_texts(page, ".group:first-of-type td.number.good, td.number.bad")[:2] == [
            *("0.7", "-0.7")
        ]
        page.run("document.querySelector('.group tr.row').click()")
        page.wait("document.querySelector('.detail')?.textContent.includes('advantage 0.7')")
        assert page.run("document.getElementById('prompt').value") == "0"
        page.wait("document.getElementById('found').dataset.total === '60'")


def test_a_page_follows_a_run(tmp_path: Path, browser: Browser) -> None:
    with HeldSampleLog(tmp_path, console=False) as log:
        log.log(1, {"reward/mean": 0.0})
        with serve_runs(tmp_path) as server:
            wait_for_index(server)
            page = open_view(browser, server)
            assert "step 1, 0 samples" in page.run("document.body.innerText")
            log.log(2, {"reward/mean": 0.5})
            log.log_held(2, [make_sample(0, "new")], Scores([1.0]))
            page.wait("document.body.innerText.includes('step 2, 1 samples')")


@pytest.mark.slow
def test_100_000_samples_are_shown_in_2_s_and_filtered_in_half_a_second(
    tmp_path: Path, browser: Browser
) -> None:
    write_many_samples(tmp_path, 100_000)
    with serve_runs(tmp_path) as server:
        page = browser.open_page()
        page.resize(1280, 800)
        start = time.monotonic()
        page.open(server.url)
        page.wait(f"{READY} && document.querySelector('canvas')?.width > 300")
        first_s = time.monotonic() - start
        wait_for_index(server)
        open_tab(page, "samples")
        page.wait("document.getElementById('found')?.dataset.total === '100000'")
        filters: list[tuple[dict[str, str], int]] = [
            ({"min_reward": "0.5"}, 50_000),
            ({"min_length": "5", "first_step": "1500"}, 0),
            ({"min_length": "4", "first_step": "1500"}, 4064),
            ({"text": "needle 99999"}, 1),
            ({"text": "hay"}, 100_000),
        ]
        slowest = max(measure_filter(page, fields, total) for fields, total in filters)
        print(f"first view {first_s:.2f} s, slowest filter {slowest:.2f} s")
        assert first_s < 2.0
        assert slowest < 0.5


def measure_filter(page: Page, fields: dict[str, str], total: int) -> float:
    """Return the seconds until the page shows `total` samples: of three tries, the fastest."""
    tries = []
    for _ in range(3):
        # A filter that nothing passes, so that the number has to change.
        fill_in(page, {**dict.fromkeys(fields, ""), "max_length": "-1" if total else ""})
        page.wait(f"document.getElementById('found').dataset.total !== '{total}'")
        start = time.monotonic()
        fill_in(page, {**fields, "max_length": ""})
        page.wait(f"document.getElementById('found').dataset.total === '{total}'")
        tries.append(time.monotonic() - start)
    fill_in(page, dict.fromkeys(fields, ""))
    page.wait("document.getElementById('found').dataset.total === '100000'")
    return min(tries)
