"""A remote output folder (s3://, gs://, hf://): captions are written on this disk and uploaded file by file."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from mmspec.app.caption.formats import NAMES
from mmspec.app.caption.journal import STATE, digest
from mmspec.app.caption.outputs import FAILURES, FILE, SHARD, OutputError
from mmspec.app.files import stamp, write_whole
from mmspec.app.media.remote import filesystem, unreachable

EVERY = 300.0  # seconds between two uploads
LOGS = (".jsonl", ".log")  # files in STATE that only grow; no others in it are uploaded


class Mirror:
    """A remote folder, and its local copy.

    The journals are authoritative: they are uploaded first, and a run on another machine downloads them before it
    begins. Only one run at a time may write to a folder, or several that have a --shard each.

    Attributes:
        folder: the local copy, the same for every run with this address. Tars of other machines are empty files in it,
            since a run that writes tars writes all of them.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self.fs, self.root = filesystem(self.address)
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.folder = home / "mmspec" / "captions" / digest(self.address.encode())[:16]
        self._synced: dict[str, str | None] = {}  # name → local stamp of files that are the same on both sides

    def pull(self) -> None:
        """Download the files that a run reads and that differ here; merge journals that both sides have written to.

        Raises MediaError: it cannot be reached.
        """
        sizes = self.fetch_logs()
        for path in self.folder.glob("webdataset/*.tar"):
            if path.relative_to(self.folder).as_posix() not in sizes:  # another machine has written all tars since
                path.unlink()
        for name, size in sizes.items():
            path, tar = self.folder / name, SHARD.fullmatch(name)
            listed = name in (FAILURES, FILE, *NAMES.values()) or name.endswith(".txt")
            if tar or (listed and not _hidden(name)):  # a run may read or replace it
                if not path.is_file() or path.stat().st_size != size:
                    write_whole(path, b"" if tar else self._read(name))
                self._synced[name] = stamp(path)

    def fetch_logs(self) -> dict[str, int]:
        """Download what others have added to the journals; returns the sizes of all remote files by name.

        Raises MediaError: it cannot be reached.
        """
        try:
            self.fs.invalidate_cache()
            there = self.fs.find(self.root, detail=True) if self.fs.exists(self.root) else {}
        except Exception as error:  # each library has its own errors
            raise unreachable(self.address, error) from error
        sizes = {path.removeprefix(self.root).lstrip("/"): facts.get("size") for path, facts in there.items()}
        for name in filter(_log, sizes):
            self._merge(name, self.folder / name)
        return sizes

    def _read(self, name: str) -> bytes:
        try:
            return self.fs.cat_file(f"{self.root}/{name}")  # type: ignore[no-any-return]
        except Exception as error:
            raise unreachable(self.address, error) from error

    def push(self) -> None:
        """Upload what has changed here, the journals first, and remove remote files that a run has removed here.

        Raises OutputError: an upload failed; the files stay on this disk.
        """
        here = {path.relative_to(self.folder).as_posix(): path for path in sorted(self.folder.rglob("*"))}
        here = {name: path for name, path in here.items() if (_log(name) or not _hidden(name)) and path.is_file()}
        try:
            for name in sorted(here, key=lambda name: not name.startswith(STATE)):
                now = stamp(here[name])
                if self._synced.get(name) != now:
                    place = f"{self.root}/{name}"
                    self.fs.makedirs(place.rpartition("/")[0], exist_ok=True)
                    self.fs.put_file(str(here[name]), place)
                    self._synced[name] = now
            for name in [name for name in self._synced if name not in here and not _log(name)]:
                self.fs.rm_file(f"{self.root}/{name}")
                del self._synced[name]
        except Exception as error:  # each library has its own errors
            raise OutputError(
                f"cannot write to {self.address} ({type(error).__name__}: {error}); all captions are in {self.folder}; "
                "run the same command again to resume"
            ) from error

    @contextlib.contextmanager
    def kept_up(self, every: float = EVERY) -> Iterator[None]:
        """Inside the block, upload changes every `every` seconds, and all of them at the end, also after an error."""
        over = threading.Event()

        def work() -> None:
            while not over.wait(every):
                self._try()

        thread = threading.Thread(target=work, name="mmspec-mirror", daemon=True)
        thread.start()
        last = self._try  # an error of the upload must not hide why the block ends
        try:
            yield
            last = self.push
        finally:
            over.set()
            thread.join()
            last()
        print(f"all files are in {self.address}")

    def _try(self) -> None:
        """Upload changes; print a note if that fails."""
        try:
            self.push()
        except OutputError as error:
            print(f"note: {error}", file=sys.stderr, flush=True)

    def _merge(self, name: str, path: Path) -> None:
        """Download a journal or log: keep the longer one if it continues the other, else keep both files."""
        theirs = self._read(name)
        ours = path.read_bytes() if path.is_file() else b""
        if ours.startswith(theirs):
            if ours == theirs:
                self._synced[name] = stamp(path)
            return
        if not theirs.startswith(ours):  # all journals and logs are read, whatever their names
            write_whole(path.with_stem(f"{path.stem}-{digest(ours)[:8]}"), ours)
        write_whole(path, theirs)
        self._synced[name] = stamp(path)


def push_to_hub(folder: Path, repo: str) -> str:
    """Upload an output folder, without its journals, as a data set on the Hub, private if it is new; returns its URL.

    Raises OutputError: the name is invalid, no token may write to it, or there is no network.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        address = hub.create_repo(repo, repo_type="dataset", private=True, exist_ok=True)
        hub.upload_folder(
            folder_path=folder, repo_id=address.repo_id, repo_type="dataset", ignore_patterns=[".*", "*/.*"],
            commit_message="Captions by mmspec",
        )  # fmt: skip
    except Exception as error:  # no network is an error of whichever HTTP library the Hub's client has
        raise OutputError(f"cannot upload to {repo} ({error}); all captions are in {folder}") from error
    return str(address)


def _log(name: str) -> bool:
    return name.startswith(f"{STATE}/") and name.endswith(LOGS) and name.count("/") == 1


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))  # .. as well
