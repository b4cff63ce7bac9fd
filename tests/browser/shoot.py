"""The demo in a real headless Chromium: serve it, use it as a person would, take its pictures (`shoot.py OUT`)."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
LAPTOP, SMALL, PHONE = ({"width": w, "height": h} for w, h in ((1440, 844), (1366, 768), (390, 844)))
PATIENCE = 180  # seconds; a busy machine must not fail a test


def missing() -> str | None:
    """Why there is no browser to drive, or None."""
    if chromium() is None:
        return "chromium is not installed (apt-get install chromium)"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed (pip install playwright)"
    return None


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextlib.contextmanager
def serve(*options: str) -> Iterator[str]:
    """`mmspec demo` with these options in a process of its own; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "mmspec.app.cli", "demo", "--port", str(port), *options]
    server = subprocess.Popen(command, env=environment, cwd=ROOT)
    try:
        yield _ready(server, f"http://127.0.0.1:{port}/")
    finally:
        server.terminate()
        server.wait(30)


def _ready(server: subprocess.Popen, address: str) -> str:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(address, timeout=10).close()
            return address
        time.sleep(0.5)
    raise RuntimeError(f"the demo does not answer at {address}; exit code {server.poll()}")


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=chromium(), args=FLAGS)
        try:
            yield running
        finally:
            running.close()


class Visitor:
    """One tab of the browser on the demo; what it asked of other machines, and what went wrong in it, is kept."""

    def __init__(self, browser: Any, address: str, size: dict[str, int], dark: bool = False) -> None:
        self.context = browser.new_context(viewport=size, color_scheme="dark" if dark else "light")
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * PATIENCE)
        self.outside: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self._note(request.url, address))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("requestfinished", self._failed)
        self.page.goto(address + ("?__theme=dark" if dark else "?__theme=light"))
        self.page.wait_for_selector("#mm-caption-run")

    def _note(self, url: str, address: str) -> None:
        if not url.startswith((address, "data:", "blob:")):
            self.outside.append(url)

    def _failed(self, request: Any) -> None:
        """An event that the server could not answer; what a visitor did wrong is no such error."""
        answer = request.response()
        if answer is not None and answer.status >= 500:
            self.errors.append(f"{answer.status} {answer.url}")

    def close(self) -> None:
        self.context.close()

    def open(self, tab: str) -> None:
        """Show a tab; on a narrow screen the last ones are in a menu."""
        found = self.page.get_by_role("tab", name=tab, exact=True)
        if found.is_visible():
            found.click()
        else:
            self.page.locator(".overflow-menu > button").first.click()
            self.page.locator(".overflow-dropdown button", has_text=tab).first.click()

    def pick(self, label: str, option: str) -> None:
        """Choose in a dropdown."""
        self.page.get_by_label(label).first.click()
        self.page.get_by_role("option", name=option, exact=True).click()

    def set(self, label: str, number: float) -> None:
        """Write into the number field of a slider."""
        self.page.get_by_label(f"number input for {label}").fill(str(number))

    def choose(self, picture: int = 0) -> None:
        """Click one of the example pictures and wait until it is shown."""
        shown = "document.querySelector('#mm-image img')?.src"
        before = self.page.evaluate(shown) if picture else None
        self.page.locator("#mm-image-examples button.gallery-item").nth(picture).click()
        self.page.wait_for_selector("#mm-image img")
        self.page.wait_for_function(f"before => {shown} !== before", arg=before)  # another one stood there

    def upload(self, path: Path) -> None:
        self.page.set_input_files("#mm-image input[type=file]", str(path))
        self.page.wait_for_selector("#mm-image img", state="attached")

    def upload_video(self, path: Path) -> None:
        self.page.get_by_label("Video", exact=True).first.check()
        self.page.wait_for_selector("#mm-video input[type=file]", state="attached")
        self.page.set_input_files("#mm-video input[type=file]", str(path))
        self.page.wait_for_selector("#mm-video video", state="attached")

    def ask(self, prompt: str) -> None:
        self.page.fill("#mm-prompt textarea", prompt)

    def press(self, name: str) -> None:
        """One of caption-run, caption-stop; image-run, class-run."""
        self.page.evaluate("document.querySelectorAll('.mm-badge').forEach(one => one.className = 'mm-earlier')")
        self.page.click(f"#mm-{name}")

    def remove_picture(self) -> None:
        self.page.get_by_label("Remove Image").click()
        self.page.wait_for_selector("#mm-image img", state="detached")

    def wait_for(self, selector: str) -> str:
        """The text of what appears there."""
        return str(self.page.wait_for_selector(selector).inner_text())

    def text(self, pane: str) -> str:
        """What stands in the pane of that title, letter by letter."""
        return str(self.page.locator(f"#mm-caption-race [aria-label='{pane}'] .mm-text").text_content())

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())

    def wait_idle(self) -> None:
        """Wait until a run that has shown its result has ended; until then clicks on Run are ignored."""
        self.page.wait_for_timeout(600)

    def replay(self) -> None:
        """Let the replay come to its end."""
        self.page.evaluate("document.getAnimations().forEach(one => one.finish())")

    def bottom(self, selector: str) -> float:
        """Where it ends, in pixels from the top of the page."""
        box = self.page.locator(selector).bounding_box()
        return float(box["y"] + box["height"])

    def take(self, path: Path, whole: bool = False) -> Path:
        """A picture of what is in sight, or of the whole page."""
        self.page.screenshot(path=str(path), full_page=whole)
        return path

    @property
    def too_wide(self) -> bool:
        """Whether the page has to be scrolled sideways."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth > window.innerWidth"))


VIEWS = (("laptop-light", LAPTOP, False), ("small-dark", SMALL, True), ("phone", PHONE, False))
DONE = ":is(.mm-same, .mm-kept, .mm-different, .mm-chance, .mm-lossy)[role=status]"


def shoot(address: str, folder: Path, prompt: str | None = None) -> list[Path]:
    """Every tab as it opens, in the middle of a replay and after it, on two laptops and a phone."""
    folder.mkdir(parents=True, exist_ok=True)
    taken = []
    with browser() as running:
        for name, size, dark in VIEWS:
            visitor = Visitor(running, address, size, dark)
            taken.append(visitor.take(folder / f"demo-opened-{name}.png"))
            for tab, use in (("", _ask), ("image-", _draw), ("continuous-", _sketch), ("results-", _look)):
                use(visitor, prompt, dark)
                taken.append(visitor.take(folder / f"demo-{tab}race-{name}.png"))
                visitor.wait_idle()
                visitor.replay()
                visitor.page.evaluate("scrollTo(0, 0)")
                visitor.page.wait_for_timeout(400)  # transitions
                taken.append(visitor.take(folder / f"demo-{tab}{name}.png", whole=size == PHONE))
            if visitor.outside or visitor.errors:
                raise RuntimeError(f"asked others for {visitor.outside}; errors in the page: {visitor.errors}")
            visitor.close()
    return taken


def _finish(visitor: Visitor, race: str) -> None:
    """Run a race, and wait until its result is shown."""
    visitor.press(f"{race}-run")
    visitor.wait_for(f"#mm-{race}-summary {DONE}")
    visitor.page.wait_for_timeout(250)


def _ask(visitor: Visitor, prompt: str | None, dark: bool) -> None:
    visitor.choose(1)
    if prompt is not None:
        visitor.ask(prompt)
    _finish(visitor, "caption")


def _draw(visitor: Visitor, prompt: str | None, dark: bool) -> None:
    """By light the seed-exact method, by dark a lossy rule."""
    visitor.open("Image")
    if dark:
        visitor.pick("Rule", "scaled(omega=2.0)")
    _finish(visitor, "image")


def _sketch(visitor: Visitor, prompt: str | None, dark: bool) -> None:
    """By light the exact rule, by dark CSpD's."""
    visitor.open("Image, continuous")
    if dark:
        visitor.pick("Rule and drafts", "CSpD, approximate")
    _finish(visitor, "class")


def _look(visitor: Visitor, prompt: str | None, dark: bool) -> None:
    visitor.open("Results")
    visitor.page.wait_for_selector("#mm-results td:visible")
    visitor.page.wait_for_timeout(500)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompt", help="default: the page's own")
    known, options = parser.parse_known_args()  # the rest is for `mmspec demo`
    why = missing()
    if why is not None:
        print(f"shoot.py: {why}", file=sys.stderr)
        return 1
    with serve(*options) as address:
        for path in shoot(address, known.out, known.prompt):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
