"""The demo's page in a real Chromium, used as a person would: run, compare, stop, mistakes, keyboard, phone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_llava
from browser import shoot
from PIL import Image

from mmspec.zoo import scenes

_WHY = shoot.missing()
pytestmark = [pytest.mark.skipif(_WHY is not None, reason=str(_WHY)), pytest.mark.timeout(1800)]

RECORD = {
    "suite": "scenes", "method": "eagle", "batch": 1, "temperature": 0.0, "prompt": "long", "speedup_e2e": 2.1,
    "speedup_decode": 2.6, "tokens_per_target_call": 3.4, "accepted_per_call": 2.4, "identical_rate": 1.0, "n": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("demo")
    (folder / "examples").mkdir()
    (folder / "results").mkdir()
    for i in range(3):
        scenes.render(scenes.draw(np.random.default_rng(i))).save(folder / "examples" / f"{i}.png")
    records = [RECORD, {**RECORD, "method": "ngram", "speedup_e2e": 1.2}]
    content = {"provenance": {"commit": "abc", "device": "cpu"}, "records": records}
    (folder / "results" / "one.json").write_text(json.dumps(content))
    model = tiny_llava.save(folder / "model")
    options = ["--model", str(model), "--examples", str(folder / "examples"), "--results", str(folder / "results")]
    with shoot.serve(*options) as found:
        yield found


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    with shoot.browser() as running:
        yield running


@pytest.fixture
def visitor(chromium: object, address: str) -> Iterator[shoot.Visitor]:
    visiting = shoot.Visitor(chromium, address, shoot.LAPTOP)
    yield visiting
    visiting.close()
    assert visiting.outside == [] and visiting.errors == []


def test_a_run_fills_both_panes_and_says_that_they_are_the_same(visitor: shoot.Visitor) -> None:
    visitor.choose()
    visitor.ask("w5 w6 w7 w5 w6")
    visitor.press("run")
    assert "identical output: 128 of 128" in visitor.wait_for("#mm-summary .mm-same")
    visitor.wait_idle()
    assert visitor.text("plain") == visitor.text("fast") != ""
    assert visitor.count("#mm-plain-pane .mm-text .mm-plain") == 128
    assert visitor.count("#mm-fast-pane .mm-text .mm-own") > 0 < visitor.count("#mm-fast-pane .mm-text .mm-d1")


def test_stop_ends_a_run_and_the_next_one_works(visitor: shoot.Visitor) -> None:
    visitor.choose()
    visitor.page.get_by_role("button", name="Options").click()
    visitor.page.get_by_label("number input for New tokens").fill("400")
    visitor.ask("w5 w6")
    visitor.press("run")
    visitor.page.wait_for_selector("#mm-plain-pane .mm-text .mm-t")
    visitor.press("stop")
    visitor.page.wait_for_selector("#mm-fast-pane .mm-state:text('stopped')")
    visitor.wait_idle()
    visitor.page.get_by_label("number input for New tokens").fill("8")
    visitor.press("run")
    assert "8 of 8" in visitor.wait_for("#mm-summary .mm-same")


def test_mistakes_are_explained(visitor: shoot.Visitor, tmp_path: Path) -> None:
    visitor.press("run")
    assert "no picture" in visitor.wait_for("#mm-summary [role=alert]")
    visitor.wait_idle()
    visitor.choose()
    visitor.ask("")
    visitor.press("run")
    visitor.wait_for("#mm-summary [role=alert]:text('prompt is empty')")
    visitor.wait_idle()
    visitor.press("clear")
    visitor.page.wait_for_selector("#mm-image img", state="detached")
    huge = tmp_path / "huge.png"
    Image.new("1", (12000, 12000)).save(huge)
    visitor.upload(huge)
    visitor.ask("w5")
    visitor.press("run")
    assert "pixels" in visitor.wait_for("#mm-summary [role=alert]:text('picture')")


def test_the_keyboard_is_enough(visitor: shoot.Visitor) -> None:
    visitor.page.locator("#mm-examples button.gallery-item").first.focus()
    visitor.page.keyboard.press("Enter")
    visitor.page.wait_for_selector("#mm-image img")
    visitor.page.locator("#mm-prompt textarea").focus()
    visitor.page.keyboard.type(" w9")
    visitor.page.keyboard.press("Enter")
    visitor.wait_for("#mm-summary .mm-same")


def test_chance_is_not_compared(visitor: shoot.Visitor) -> None:
    visitor.choose()
    visitor.page.get_by_role("button", name="Options").click()
    visitor.page.get_by_label("number input for Temperature").fill("1")
    visitor.page.get_by_label("number input for New tokens").fill("8")
    visitor.press("run")
    assert "Drawn at random" in visitor.wait_for("#mm-summary .mm-chance")


def test_the_drafters_tab_filters(visitor: shoot.Visitor) -> None:
    visitor.page.get_by_role("tab", name="Drafters").click()
    visitor.wait_for("#mm-bench .mm-bars")
    assert visitor.count("#mm-bench .mm-bars li") == 2
    visitor.page.get_by_label("Method").click()
    visitor.page.get_by_role("option", name="ngram").click()
    visitor.page.wait_for_function("document.querySelectorAll('#mm-bench .mm-bars li').length === 1")
    assert "ngram" in visitor.page.locator("#mm-bench .mm-bars li").inner_text()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_phone_needs_no_scrolling_sideways(chromium: object, address: str, dark: bool) -> None:
    visiting = shoot.Visitor(chromium, address, shoot.PHONE, dark)
    visiting.choose()
    visiting.press("run")
    visiting.wait_for("#mm-summary .mm-same")
    assert not visiting.too_wide
    visiting.page.get_by_role("tab", name="Drafters").click()
    visiting.wait_for("#mm-bench .mm-bars")
    assert not visiting.too_wide
    visiting.close()
