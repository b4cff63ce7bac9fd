"""The demo's page in a real Chromium, used as a person would: ask, draw, stop, mistakes, keyboard, phone, results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import clips
import numpy as np
import pytest
import tiny_llamagen
import tiny_llava
from PIL import Image

from mmspec.zoo import scenes
from tests.browser import shoot

_WHY = shoot.missing()
pytestmark = [pytest.mark.skipif(_WHY is not None, reason=str(_WHY)), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("demo")
    (folder / "examples").mkdir()
    (folder / "results").mkdir()
    for i in range(3):
        scenes.render(scenes.draw(np.random.default_rng(i))).save(folder / "examples" / f"{i}.png")
    table = "| method | distribution | speedup | decode only | vs best | forwards | tokens/forward | same image |\n"
    table += "|---" * 8 + "|\n| jacobi+scaled | changed" + " | 1.00x (1.00-1.00)" * 6 + " |\n"
    (folder / "results" / "image.md").write_text(table)
    (folder / "results" / "drafters.md").write_text(table.replace("jacobi+scaled", "ngram"))
    model = tiny_llava.save(folder / "model")
    tiny_llamagen.pipeline(grid=8).save_pretrained(folder / "painter")
    parts = {"model": model, "image-model": folder / "painter", "examples": folder / "examples"}
    options = [f"--{name}={path}" for name, path in {**parts, "results": folder / "results"}.items()]
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
    visitor.press("caption-run")
    assert "identical output: 128 of 128" in visitor.wait_for("#mm-caption-summary .mm-same")
    visitor.wait_idle()
    assert visitor.text("Plain") == visitor.text("mmspec") != ""
    plain, fast = (f"#mm-caption-race [aria-label='{title}'] .mm-text " for title in ("Plain", "mmspec"))
    assert visitor.count(plain + ".mm-plain") == 128 and visitor.count(plain + ".mm-call") == 0
    assert visitor.count(fast + ".mm-own") > 0 < visitor.count(fast + ".mm-drafted")
    gains = visitor.page.locator(fast + ".mm-call").evaluate_all("all => all.map(one => Number(one.dataset.n))")
    assert sum(gains) == 128 and len(gains) < 128


def test_both_sides_move_in_one_view_and_can_be_replayed(visitor: shoot.Visitor) -> None:
    visitor.choose()
    visitor.press("caption-run")
    visitor.wait_for("#mm-caption-summary .mm-same")
    moving = "document.getElementById('mm-caption-race').getAnimations({subtree: true}).map(one => one."
    assert visitor.page.evaluate("new Set(" + moving + "playState)).size") > 0
    starts = visitor.page.evaluate("[...new Set(" + moving + "effect.getTiming().delay))].length")
    assert starts > 10  # tokens appear at moments of their own
    visitor.replay()
    assert visitor.page.evaluate(moving + "playState).every(state => state == 'finished')")
    visitor.page.get_by_role("button", name="Replay slowly").first.click()
    assert visitor.page.evaluate(moving + "playbackRate).every(rate => rate == .25)")
    assert visitor.page.evaluate(moving + "playState).some(state => state == 'running')")
    assert "128 tokens in 128 forwards" in visitor.page.locator("#mm-caption-race .mm-small").first.inner_text()


@pytest.mark.parametrize("size", [shoot.LAPTOP, shoot.SMALL, shoot.PHONE], ids=["844", "768", "phone"])
def test_run_is_in_sight(chromium: object, address: str, size: dict[str, int]) -> None:
    visiting = shoot.Visitor(chromium, address, size)
    visiting.page.wait_for_selector("#mm-image img")
    assert visiting.bottom("#mm-caption-run") <= size["height"]
    visiting.open("Image")
    assert visiting.bottom("#mm-image-run") <= size["height"]
    visiting.close()


def test_stop_ends_a_run_and_the_next_one_works(visitor: shoot.Visitor) -> None:
    visitor.choose()
    visitor.page.get_by_role("button", name="Options").click()
    visitor.set("New tokens", 480)
    visitor.ask("w5 w6")
    visitor.press("caption-run")
    visitor.page.wait_for_selector("#mm-caption-summary :text('Measuring plain')")
    visitor.press("caption-stop")
    visitor.wait_for("#mm-caption-summary :text('Stopped.')")
    visitor.wait_idle()
    visitor.set("New tokens", 8)
    visitor.press("caption-run")
    assert "8 of 8" in visitor.wait_for("#mm-caption-summary .mm-same")


def test_mistakes_are_explained(visitor: shoot.Visitor, tmp_path: Path) -> None:
    visitor.remove_picture()
    visitor.press("caption-run")
    assert "no picture" in visitor.wait_for("#mm-caption-summary [role=alert]")
    visitor.wait_idle()
    visitor.choose()
    visitor.ask("")
    visitor.press("caption-run")
    visitor.wait_for("#mm-caption-summary [role=alert]:text('prompt is empty')")
    visitor.wait_idle()
    visitor.remove_picture()
    huge = tmp_path / "huge.png"
    Image.new("1", (12000, 12000)).save(huge)
    visitor.upload(huge)
    visitor.ask("w5")
    visitor.press("caption-run")
    visitor.wait_for("#mm-caption-summary [role=alert]:text('pixels')")


def test_an_example_then_a_file_that_is_no_picture(visitor: shoot.Visitor, tmp_path: Path) -> None:
    """What an example leaves behind in the server must not open the next upload there."""
    visitor.choose()
    visitor.remove_picture()
    pretender = tmp_path / "page.jpg"
    pretender.write_text("<html><body>no picture</body></html>")
    visitor.upload(pretender)
    visitor.ask("w5")
    visitor.press("caption-run")
    assert "This picture" in visitor.wait_for("#mm-caption-summary [role=alert]")
    visitor.wait_idle()


def test_one_click_shows_the_effect(visitor: shoot.Visitor) -> None:
    visitor.press("caption-run")
    visitor.wait_for("#mm-caption-summary .mm-same")


def test_the_keyboard_is_enough(visitor: shoot.Visitor) -> None:
    visitor.page.get_by_role("button", name="Example 0.png").focus()
    visitor.page.keyboard.press("Enter")
    visitor.page.wait_for_selector("#mm-image img")
    visitor.page.locator("#mm-prompt textarea").focus()
    visitor.page.keyboard.type(" w9")
    visitor.page.keyboard.press("Enter")
    visitor.wait_for("#mm-caption-summary .mm-same")


def test_a_video_shows_the_frames_that_are_read(visitor: shoot.Visitor, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (64, 48), (grey, grey, grey)) for grey in range(0, 240, 20)]
    visitor.upload_video(clips.write_clip(tmp_path / "clip.webm", frames, fps=6, codec="libvpx-vp9"))
    visitor.page.get_by_role("button", name="Options").click()
    visitor.set("Frames", 5)
    visitor.set("New tokens", 8)
    visitor.ask("w5")
    visitor.press("caption-run")
    assert "8 of 8" in visitor.wait_for("#mm-caption-summary .mm-same")
    visitor.page.wait_for_selector(".mm-frames img >> nth=4")


def test_chance_is_compared_where_the_draws_are_the_same(visitor: shoot.Visitor) -> None:
    visitor.choose()
    visitor.page.get_by_role("button", name="Options").click()
    visitor.set("Temperature", 1)
    visitor.set("New tokens", 8)
    visitor.press("caption-run")
    assert "8 of 8" in visitor.wait_for("#mm-caption-summary .mm-same")
    visitor.wait_idle()
    visitor.page.get_by_label("Same draws").uncheck()
    visitor.press("caption-run")
    assert "Sampled" in visitor.wait_for("#mm-caption-summary .mm-chance")


def test_a_picture_is_drawn_twice_and_its_grid_fills(visitor: shoot.Visitor) -> None:
    visitor.open("Image")
    visitor.page.fill("#mm-wish textarea", "a small circle")
    visitor.press("image-run")
    assert "the same picture: 64 of 64" in visitor.wait_for("#mm-image-summary .mm-same")
    visitor.wait_idle()
    plain, fast = (f"#mm-image-race [aria-label='{title}'] " for title in ("Plain", "mmspec"))
    assert visitor.count(plain + ".mm-cells i") == 64 and visitor.count(plain + ".mm-call") == 0
    box = visitor.page.locator(fast + ".mm-canvas").bounding_box()
    assert box["width"] == pytest.approx(box["height"], abs=2)
    assert 0 < visitor.count(fast + ".mm-call") < 64 == visitor.count(fast + ".mm-cells i")
    pictures = [visitor.page.locator(f"{which} img").get_attribute("src") for which in (plain, fast)]
    assert pictures[0] == pictures[1] and str(pictures[0]).startswith("data:image/png")
    mark = "getComputedStyle(document.querySelector('#mm-image-race .mm-call'), '::after')"
    cell = "document.querySelector('#mm-image-race .mm-call').getBoundingClientRect().width"
    assert visitor.page.evaluate(f"(parseFloat({mark}.width) / {cell}) ** 2") < 0.1  # the picture is seen around it


def test_a_lossy_picture_is_named_so(visitor: shoot.Visitor) -> None:
    visitor.open("Image")
    visitor.page.fill("#mm-wish textarea", "a small circle")
    for rule in ("typical(epsilon=0.3, delta=0.05)", "scaled(omega=2.0)"):
        visitor.pick("Rule", rule)
        visitor.press("image-run")
        visitor.wait_for(f"#mm-image-summary:has(:text('{rule}')) .mm-lossy[role=status]")
        assert "in total variation" in visitor.page.locator("#mm-image-summary .mm-lossy").inner_text()
        shown = visitor.page.locator("#mm-image-race").inner_text()
        assert "jacobi, maximal coupling" in shown  # not the seed-exact one
        visitor.wait_idle()


def test_the_results_tab_shows_a_page_at_a_time(visitor: shoot.Visitor) -> None:
    visitor.open("Results")
    visitor.page.wait_for_selector("#mm-results td:text('ngram'):visible")
    visitor.pick("Measurements", "image")
    visitor.page.wait_for_selector("#mm-results td:text('jacobi+scaled'):visible")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_phone_needs_no_scrolling_sideways(chromium: object, address: str, dark: bool) -> None:
    visiting = shoot.Visitor(chromium, address, shoot.PHONE, dark)
    visiting.choose()
    visiting.press("caption-run")
    visiting.wait_for("#mm-caption-summary .mm-same")
    assert not visiting.too_wide
    top = "[...document.querySelectorAll('#mm-caption-race .mm-pane')].map(one => one.getBoundingClientRect().top)"
    plain, fast = visiting.page.evaluate(top)
    assert fast < plain  # of the two, a phone shows mmspec's first
    visiting.open("Image")
    visiting.page.fill("#mm-wish textarea", "a small circle")
    visiting.press("image-run")
    visiting.wait_for("#mm-image-summary .mm-same")
    assert not visiting.too_wide
    visiting.open("Results")
    visiting.page.wait_for_selector("#mm-results td:visible")
    assert not visiting.too_wide
    assert visiting.outside == [] and visiting.errors == []
    visiting.close()
