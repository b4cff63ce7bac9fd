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
LAPTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
PATIENCE = 600  # seconds; a busy machine must not fail a test


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
        self.page.goto(address + ("?__theme=dark" if dark else "?__theme=light"))
        self.page.wait_for_selector("#mm-run")

    def _note(self, url: str, address: str) -> None:
        if not url.startswith((address, "data:", "blob:")):
            self.outside.append(url)

    def close(self) -> None:
        self.context.close()

    def choose(self, picture: int = 0) -> None:
        """Click one of the example pictures and wait until it is shown."""
        self.page.locator("#mm-examples button.gallery-item").nth(picture).click()
        self.page.wait_for_selector("#mm-image img")

    def upload(self, path: Path) -> None:
        self.page.set_input_files("#mm-image input[type=file]", str(path))
        self.page.wait_for_selector("#mm-image img", state="attached")

    def ask(self, prompt: str) -> None:
        self.page.fill("#mm-prompt textarea", prompt)

    def press(self, name: str) -> None:
        """One of run, stop, clear."""
        self.page.click(f"#mm-{name}")

    def wait_for(self, selector: str) -> str:
        """The text of what appears there."""
        return str(self.page.wait_for_selector(selector).inner_text())

    def text(self, pane: str) -> str:
        """What stands in the plain or the fast pane, letter by letter."""
        return str(self.page.locator(f"#mm-{pane}-pane .mm-text").text_content())

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())

    def wait_idle(self) -> None:
        self.page.wait_for_selector("#mm-run:not([disabled])")

    @property
    def too_wide(self) -> bool:
        """Whether the page has to be scrolled sideways."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth > window.innerWidth"))


VIEWS = (("laptop-light", LAPTOP, False), ("laptop-dark", LAPTOP, True), ("phone", PHONE, False))


def shoot(address: str, folder: Path, prompt: str | None) -> list[Path]:
    """A finished run on a laptop, light and dark, and on a phone; and the Drafters tab."""
    folder.mkdir(parents=True, exist_ok=True)
    taken = []
    with browser() as running:
        for name, size, dark in VIEWS:
            visitor = Visitor(running, address, size, dark)
            visitor.choose(1)
            if prompt is not None:
                visitor.ask(prompt)
            visitor.press("run")
            visitor.wait_for("#mm-summary .mm-same, #mm-summary .mm-different")
            visitor.wait_idle()
            taken += _picture(visitor, folder / f"demo-{name}.png", whole=size == PHONE)
            visitor.page.get_by_role("tab", name="Drafters").click()
            visitor.wait_for("#mm-bench")
            taken += _picture(visitor, folder / f"demo-drafters-{name}.png", whole=size == PHONE)
            visitor.close()
    return taken


def _picture(visitor: Visitor, path: Path, whole: bool) -> list[Path]:
    visitor.page.wait_for_timeout(400)  # transitions
    visitor.page.screenshot(path=str(path), full_page=whole)
    return [path]


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
