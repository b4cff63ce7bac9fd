"""An output folder elsewhere (s3://, gs://, hf://): written on this disk, and put there file by file."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from mmspec.app.caption.finals import FAILURES, LOG, SHARD, OutputError, noted
from mmspec.app.caption.formats import NAMES
from mmspec.app.caption.journal import digest
from mmspec.app.caption.outputs import STATE
from mmspec.app.caption.settings import FILE
from mmspec.app.files import stamp, write_whole
from mmspec.app.media.remote import filesystem, unreachable

EVERY = 300.0  # seconds between two checkpoints
LOGS = (".jsonl", ".log")  # in STATE: files that only grow
KEPT = (*LOGS, ".yaml")  # of STATE, what is put there; locks and halves stay here


class Mirror:
    """A folder elsewhere, and the one on this disk that is kept like it.

    The journals are the truth: they go first, and a run on another machine fetches them before it begins. One run at a
    time writes to a folder, or several with a --shard each.

    Attributes:
        folder: on this disk, the same for every run with this address.
        tars: that are there; they are not fetched, for a run that makes some makes all anew.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self.fs, self.root = filesystem(self.address)
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.folder = home / "mmspec" / "captions" / digest(self.address.encode())[:16]
        self.tars: list[str] = []
        self._there: dict[str, str | None] = {}  # names → stamps of what is the same on both sides

    def pull(self, extension: str = ".txt") -> None:
        """Fetch what a run looks at and is not here; of a journal that both sides have written to, both parts.

        Args:
            extension: of caption files.

        Raises MediaError: it cannot be reached.
        """
        sizes = self.fetch_logs()
        for name, size in sizes.items():
            path = self.folder / name
            if _looked_at(name, extension):
                if not path.is_file() or path.stat().st_size != size:
                    write_whole(path, self._read(name))
                self._there[name] = stamp(path)
        self.tars = [name for name in sizes if SHARD.fullmatch(name)]
        ours = noted(self.folder / STATE / LOG)
        self._there |= {name: "" for name in self.tars if name in ours}

    def fetch_logs(self) -> dict[str, int]:
        """Fetch what others have added to the journals; the sizes of all files there, by name.

        Raises MediaError: it cannot be reached.
        """
        try:
            self.fs.invalidate_cache()
            there = self.fs.find(self.root, detail=True) if self.fs.exists(self.root) else {}
        except Exception as error:  # each of the libraries has errors of its own
            raise unreachable(self.address, error) from error
        sizes = {path.removeprefix(self.root).lstrip("/"): facts.get("size") for path, facts in there.items()}
        for name in filter(_log, sizes):
            self._grown(name, self.folder / name)
        return sizes

    def _read(self, name: str) -> bytes:
        try:
            return self.fs.cat_file(f"{self.root}/{name}")  # type: ignore[no-any-return]
        except Exception as error:
            raise unreachable(self.address, error) from error

    def push(self) -> None:
        """Put there what has changed here, the journals first, and remove what a run has removed.

        Raises OutputError: something cannot be put there; it stays on this disk.
        """
        here, folders = dict(self._files()), set[str]()
        try:
            for name in sorted(here, key=lambda name: not name.startswith(STATE)):
                now = stamp(here[name])
                if self._there.get(name) != now:
                    place = f"{self.root}/{name}"
                    if (folder := place.rpartition("/")[0]) not in folders:
                        self.fs.makedirs(folder, exist_ok=True)
                        folders.add(folder)
                    self.fs.put_file(str(here[name]), place)
                    self._there[name] = now
            for name in [name for name in self._there if name not in here and not _log(name)]:
                self.fs.rm_file(f"{self.root}/{name}")
                del self._there[name]
        except Exception as error:  # each of the libraries has errors of its own
            raise OutputError(
                f"cannot write to {self.address} ({type(error).__name__}: {error}); all captions are in {self.folder}, "
                "and the same command goes on"
            ) from error

    @contextlib.contextmanager
    def kept_up(self, every: float = EVERY) -> Iterator[None]:
        """Inside, what has changed is put there now and then, and all of it at the end, however that comes."""
        over = threading.Event()

        def work() -> None:
            while not over.wait(every):
                self._try()

        thread = threading.Thread(target=work, name="mmspec-mirror", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            over.set()
            thread.join()
            self._try()
            raise
        over.set()
        thread.join()
        self.push()
        print(f"all of it is in {self.address}")

    def _try(self) -> None:
        """Put there what can be; what cannot is said."""
        try:
            self.push()
        except OutputError as error:
            print(f"note: {error}", file=sys.stderr, flush=True)

    def _files(self) -> Iterator[tuple[str, Path]]:
        """What belongs there, by name."""
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            state = path.parent == self.folder / STATE and path.suffix in KEPT
            if (state or not any(part.startswith(".") for part in name.split("/"))) and path.is_file():
                yield name, path

    def _grown(self, name: str, path: Path) -> None:
        """A file of lines that is there and differs here, or is missing: the longer one, or both where they part."""
        theirs = self._read(name)
        ours = path.read_bytes() if path.is_file() else b""
        if ours.startswith(theirs):
            if ours == theirs:
                self._there[name] = stamp(path)
            return
        if theirs.startswith(ours):
            write_whole(path, theirs)
            self._there[name] = stamp(path)
        elif path.suffix == ".log":  # names, each of which may be there twice
            write_whole(path, theirs.removesuffix(b"\n") + b"\n" + ours)
        else:  # a journal is known by what is in it, not by its name
            write_whole(path.with_stem(f"{path.stem}-{digest(ours)[:8]}"), ours)
            write_whole(path, theirs)
            self._there[name] = stamp(path)


def push_to_hub(folder: Path, repo: str) -> str:
    """Upload an output folder, without its journals, as a data set of the Hub, private where it is new; its address.

    Raises OutputError: no such name, no token that may write there, no network.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        made = hub.create_repo(repo, repo_type="dataset", private=True, exist_ok=True)
        hub.upload_folder(
            folder_path=folder, repo_id=made.repo_id, repo_type="dataset", ignore_patterns=[".*", "*/.*"],
            commit_message="Captions by mmspec",
        )  # fmt: skip
    except (OSError, ValueError) as error:  # the Hub's errors are among the former, wrong names among the latter
        raise OutputError(f"cannot upload to {repo} ({error}); all captions are in {folder}") from error
    return str(made)


def _log(name: str) -> bool:
    return name.startswith(f"{STATE}/") and name.endswith(LOGS) and name.count("/") == 1


def _looked_at(name: str, extension: str) -> bool:
    """Whether a run reads a file of that name in its output folder, or may replace it."""
    hidden = any(part.startswith(".") for part in name.split("/"))  # .. as well
    return not hidden and (name in (FAILURES, FILE, *NAMES.values()) or name.endswith(extension))
