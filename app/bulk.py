"""The captioning run itself: open images, ask the engine, write; a failure is one image's and never ends the run."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image
from tqdm import tqdm

from mmspec.app import media
from mmspec.app.journal import digest
from mmspec.app.outputs import Outputs, UnwritableTextError
from mmspec.app.plan import Settings

if TYPE_CHECKING:  # torch is imported only once it is clear that there is something to caption
    from mmspec.app.compare import Comparison
    from mmspec.app.engine import Captions, Engine

PATIENCE = 5  # images on which a model that has never answered may fail before the run is given up


class ModelFailsError(Exception):
    """The model fails on image after image, so the images are not to blame."""


@dataclass(frozen=True)
class Item:
    """One opened image: where it lies, the digest of its bytes, the picture."""

    path: Path
    content: str
    picture: Image.Image


class Run:
    """The captions of one run: opens images, asks the engine, writes what it says."""

    def __init__(self, engine: Engine, outputs: Outputs, settings: Settings, max_pixels: int = media.MAX_PIXELS):
        self.engine, self.outputs, self.settings, self.max_pixels = engine, outputs, settings, max_pixels
        self.comparison: Comparison | None = None
        self.captions = self.tokens = self.failed = 0
        self.seconds = 0.0  # wall time without the comparison
        self._held: list[tuple[Item, Exception]] = []  # failures of a model that has not answered yet

    def caption(self, images: list[Path], batch_size: int) -> None:
        """Caption all images, batch by batch."""
        begun = time.perf_counter()
        with tqdm(total=len(images), unit="image", disable=None, dynamic_ncols=True) as bar:
            for number, first in enumerate(range(0, len(images), batch_size)):
                paths = images[first : first + batch_size]
                items = [item for path in paths if (item := self._open(path))]
                if items:
                    self._answer(number, items)
                self.seconds = time.perf_counter() - begun
                if self.comparison is not None:
                    self.seconds -= self.comparison.extra_seconds
                bar.set_postfix_str(f"{self.tokens / self.seconds:.0f} tokens/s", refresh=False)
                bar.update(len(paths))
        self._let_go()

    def _open(self, path: Path) -> Item | None:
        content = ""
        try:
            data = media.read(path)
            content = digest(data)
            return Item(path, content, media.decode(data, path, self.max_pixels))
        except media.MediaError as error:
            self._fail(path, content, error)
            return None

    def _answer(self, number: int, items: list[Item]) -> None:
        """Caption one batch; if that fails, each of its images alone, so that only the guilty one is lost."""
        try:
            answers = self._ask(number, items)
        except Exception as error:  # out of memory, an image the processor refuses: the run goes on
            if len(items) > 1:
                for item in items:
                    self._answer(-1, [item])
                return
            self._held.append((items[0], error))
            if self.captions:
                self._let_go()
            elif len(self._held) == PATIENCE:
                reason = f"{type(error).__name__}: {error}"
                raise ModelFailsError(f"the model fails on every image. {reason}") from error
            return
        self._keep(items, answers)

    def _ask(self, number: int, items: list[Item]) -> Captions:
        pictures = [item.picture for item in items]
        if self.settings.seed is not None:
            self.engine.seed(int(digest(f"{self.settings.seed} {items[0].content}".encode())[:12], 16))
        if self.comparison is not None:
            return self.comparison.caption(number, pictures, self.settings.prompt)
        return self.engine.caption(pictures, self.settings.prompt)

    def _keep(self, items: list[Item], answers: Captions) -> None:
        for item, text, tokens in zip(items, answers.texts, answers.tokens, strict=True):
            facts = self._facts(item.path, item.content) | asdict(self.settings)
            facts |= {"tokens": tokens, "seconds": round(answers.seconds / len(items), 4)}
            try:
                self.outputs.write(item.path, text, facts)
            except UnwritableTextError as error:
                self.failed += 1
                tqdm.write(f"failed: {plain(str(error))}", file=sys.stderr)
            self.captions += 1
            self.tokens += tokens
            tqdm.write(f"{plain(self.outputs.name(item.path))}: {plain(text)}")
        self._let_go()

    def _let_go(self) -> None:
        for item, error in self._held:
            self._fail(item.path, item.content, error)
        self._held.clear()

    def _fail(self, path: Path, content: str, error: Exception) -> None:
        self.failed += 1
        self.outputs.fail(path, error, self._facts(path, content))
        tqdm.write(f"failed: {plain(str(error)) or type(error).__name__}", file=sys.stderr)

    def _facts(self, path: Path, content: str) -> dict[str, Any]:
        return {"key": self.settings.key(content), "sha256": content, "folder": self.outputs.origin}


def plain(text: str) -> str:
    """Text safe for a terminal: on one line, and without the control sequences a file name or a model may hold."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
