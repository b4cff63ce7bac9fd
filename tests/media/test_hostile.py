"""Through the Decoder, every hostile file costs only itself, and no process, whatever happens to it, is left behind."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import clips
import hostile_files
import hostile_sources
import numpy as np
import pytest
from PIL import Image

from mmspec import media
from mmspec.app.media import decoder as decoding
from mmspec.app.media import video
from mmspec.app.media.decoder import Decoder, DecoderError
from mmspec.app.media.items import Item, file_source
from mmspec.app.media.video import FramePolicy
from mmspec.media import Media, MediaError, MediaLimits

MEMORY = 2**29
PATIENCE = 300  # seconds, for what a busy machine may delay
SHORT = 6  # seconds, for what never ends; the items between are decoded within them even on a busy machine
ROOT = Path(__file__).parents[2]


def run(decoder: Decoder, items: dict[object, Item]) -> dict[object, Media | MediaError]:
    """All outcomes."""
    found: dict[object, Media | MediaError] = {}
    for ticket, one in items.items():
        decoder.submit(ticket, one)
    while len(found) < len(items):
        for ticket, outcome in decoder.ready(60):
            assert ticket not in found
            found[ticket] = outcome
    return found


def item(data: bytes, kind: str = "image") -> Item:
    return Item("x", kind, hostile_sources.Memory(data))


GOOD = item(hostile_files.plain("RGB", hostile_files.GREEN))


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    with Decoder(1, MediaLimits(seconds=PATIENCE, memory=MEMORY), FramePolicy(), max_side=1000) as made:
        yield made


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hostile")
    return {case.name: hostile_files.place(case, folder) for case in hostile_files.CASES}


def judge(case: hostile_files.Case, outcome: Media | MediaError) -> str:
    """What is wrong with the outcome; empty if it is as it has to be."""
    expected = case.outcome
    if isinstance(outcome, MediaError):
        if not isinstance(expected, str) or not re.search(expected, outcome.reason) or not outcome.what_to_do:
            return f"{case.name!a} failed with {outcome!a}, expected {expected}"
        return ""
    frames = outcome.frames
    if (
        isinstance(expected, str)
        or len(frames) != expected.frames
        or {frame.size for frame in frames} != {expected.size}
    ):
        return f"{case.name!a} gave {frames}, expected {expected}"
    corner = frames[0].getpixel((0, 0))
    if frames[0].mode != "RGB" or (expected.colour and np.abs(np.subtract(corner, expected.colour)).max() > 5):
        return f"{case.name!a} has {corner} in its corner, expected {expected}"
    return ""


def peak_memory(process: int) -> int | None:
    """Bytes that a running process has held at most; None where nobody tells."""
    status = Path(f"/proc/{process}/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else None


def test_the_corpus_gives_right_pictures_or_clear_failures_and_none_stops_the_run(corpus: dict[str, Path]):
    assert len({case.name for case in hostile_files.CASES}) == len(hostile_files.CASES) >= 90
    cases = {case.name: case for case in hostile_files.CASES}
    items = {name: Item(name, case.kind, file_source(corpus[name])) for name, case in cases.items()}
    with Decoder(2, MediaLimits(seconds=PATIENCE, memory=MEMORY), FramePolicy()) as decoder:
        run(decoder, dict.fromkeys(range(4), GOOD))
        processes = [worker.process.pid for worker in decoder._workers]
        found = run(decoder, items)
        assert processes == [worker.process.pid for worker in decoder._workers], "a file killed its process"
        peaks = [peak for peak in map(peak_memory, processes) if peak is not None]
    wrong = [judge(case, found[name]) for name, case in cases.items()]
    assert not any(wrong), "\n".join(filter(None, wrong))
    assert all(peak < MEMORY + 2**28 for peak in peaks)


@pytest.mark.parametrize(
    "case", [case for case in hostile_files.CASES if case.kind == "image"], ids=lambda case: ascii(case.name)
)
def test_the_corpus_in_process(case: hostile_files.Case, corpus: dict[str, Path]):
    try:
        outcome: Media | MediaError = Media((media.load_image(corpus[case.name]),), "")
    except MediaError as error:
        outcome = error
    assert not judge(case, outcome), judge(case, outcome)


REASONS = {
    "segfault": r"crashes the decoder \(SIGSEGV",
    "exit": r"crashes the decoder \(exit code 0",
    "stop": f"takes longer than {SHORT} s",
    "spin": f"takes longer than {SHORT} s",
    "swell": "takes too much memory",
    "raise": "ZeroDivisionError",
    "recurse": "RecursionError",
    "no bytes": "TypeError",
    "unbuildable": "ValueError",
}
MORE_REASONS = {
    "kill": r"crashes the decoder \(SIGKILL",
    "abort": r"crashes the decoder \(SIGABRT",
    "sys.exit": r"crashes the decoder \(exit code 3",
    "interrupt": "crashes the decoder",
    "sleep": f"takes longer than {SHORT} s",
}


@pytest.mark.parametrize("reasons", [REASONS, pytest.param(MORE_REASONS, marks=pytest.mark.full)], ids=["some", "more"])
def test_what_a_source_does_to_its_process_costs_its_item_only(reasons: dict[str, str]):
    items: dict[object, Item] = {}
    for deed in reasons:
        source = hostile_sources.Attack(deed) if deed in hostile_sources.DEEDS else hostile_sources.Unbuildable()
        items |= {deed: Item(deed, "image", source), f"after {deed}": GOOD}
    with Decoder(2, MediaLimits(seconds=SHORT, memory=MEMORY), FramePolicy()) as decoder:
        found = run(decoder, items)
    for ticket, outcome in found.items():
        if ticket in reasons:
            assert isinstance(outcome, MediaError) and outcome.what_to_do, (ticket, outcome)
            assert re.search(reasons[str(ticket)], outcome.reason), (ticket, outcome)
        else:
            assert isinstance(outcome, Media), (ticket, outcome)
            assert outcome.frames[0].getpixel((0, 0)) == hostile_files.GREEN


def test_worker_processes_are_light():
    with Decoder(1, MediaLimits(), FramePolicy()) as fresh:
        found = run(fresh, {0: GOOD, 1: Item("x", "image", hostile_sources.Attack("confess"))})
    assert found[1].reason == "loaded: []"  # no torch, and neither numpy nor FFmpeg before a file needs them


def test_frames_cross_unchanged(decoder: Decoder, tmp_path: Path):
    clip = clips.write_clip(tmp_path / "x.mp4", 20).read_bytes()
    picture = hostile_files.encoded(hostile_files.noise(300, 200), "JPEG")
    found = run(decoder, {"picture": item(picture), "clip": item(clip, "video")})
    expected = {
        "picture": (media.decode(picture, "x"),),
        "clip": video.decode(clip, "x", FramePolicy(), MediaLimits())[0],
    }
    for ticket, frames in expected.items():
        crossed = found[ticket].frames
        assert [(one.mode, one.size, one.tobytes()) for one in crossed] == [
            (one.mode, one.size, one.tobytes()) for one in frames
        ]
    assert found["picture"].content == hashlib.sha256(picture).hexdigest()
    assert found["clip"].seconds == pytest.approx(2.5)


def test_large_pictures_are_made_smaller_before_they_cross(decoder: Decoder):
    large = Image.linear_gradient("L").resize((2100, 1400)).convert("RGB")
    for kind in ("JPEG", "BMP"):
        small = run(decoder, {0: item(hostile_files.encoded(large, kind))})[0].frames[0]
        assert small.size == (1000, 667)
        exact = np.asarray(large.resize(small.size), dtype=int)
        assert np.abs(np.asarray(small) - exact).mean() < 2


def test_limits_are_obeyed(tmp_path: Path):
    (tmp_path / "x.png").write_bytes(bytes(2000))
    with Decoder(1, MediaLimits(max_bytes=1000, max_pixels=63), FramePolicy()) as decoder:
        items = {0: item(bytes(2000)), 1: Item("x", "image", file_source(tmp_path / "x.png")), 2: GOOD}
        found = run(decoder, items)
    assert "over 0" in found[0].reason and "over 0" in found[1].reason and "8 x 8" in found[2].reason
    assert found[1].path == tmp_path / "x.png"


def test_finished_frames_are_limited(decoder: Decoder, monkeypatch: pytest.MonkeyPatch):
    assert decoder.ready(None) == []
    monkeypatch.setattr(decoding, "HELD_BYTES", 0)  # one finished picture is enough to stop for
    for ticket in range(4):
        decoder.submit(ticket, GOOD)
    assert decoder.pending == 4
    begun = time.monotonic()
    while not any(one.done() for one in decoder._pending) and time.monotonic() - begun < PATIENCE:
        time.sleep(0.01)
    time.sleep(0.1)
    assert [ticket for ticket, _ in decoder.ready(0)] == [0] and decoder.pending == 3
    assert len(run(decoder, {})) == 0 and len([outcome for _ in range(3) for outcome in decoder.ready(PATIENCE)]) == 3


def test_a_process_that_dies_while_idle_is_replaced(decoder: Decoder):
    assert isinstance(run(decoder, {0: GOOD})[0], Media)
    for _ in range(2):
        os.kill(decoder._workers[0].process.pid, signal.SIGKILL)
        assert isinstance(run(decoder, {0: GOOD})[0], Media)


def test_an_answer_that_is_there_is_never_too_late(decoder: Decoder, monkeypatch: pytest.MonkeyPatch):
    """On a busy machine our thread may find the answer and the end of its time at once, or the end first."""
    worker, late = decoder._workers[0], []
    assert isinstance(run(decoder, {0: GOOD})[0], Media)

    class Deaf:
        def __init__(self, line):
            self.line = line

        def __getattr__(self, name):
            return getattr(self.line, name)

        def poll(self, seconds):
            found = self.line.poll(seconds)
            late.extend([found] * (seconds > 0))
            return found and seconds == 0

    monkeypatch.setattr(worker, "pipe", Deaf(worker.pipe))
    assert isinstance(run(decoder, {0: GOOD})[0], Media) and late == [True]


def test_processes_that_cannot_start_end_the_run_with_a_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoding, "serve", hostile_sources.refuse_to_start)
    with Decoder(1, MediaLimits(), FramePolicy()) as decoder:
        decoder.submit(0, GOOD)
        with pytest.raises(DecoderError, match=r"before it has started \(exit code 7\).*__main__"):
            decoder.ready(PATIENCE)


ENDINGS = {
    "end": "",
    "raise": "1 / 0",
    "interrupt": "time.sleep(600)",
    "kill": "time.sleep(600)",
    "forget": "os._exit(5)",
}


@pytest.mark.parametrize("ending", [*list(ENDINGS)[:-1], pytest.param("forget", marks=pytest.mark.full)])
def test_nothing_is_left_behind(ending: str, tmp_path: Path):
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, signal, sys, time
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
        sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests" / "support")!r}]
        from mmspec.app.media.decoder import Decoder
        from mmspec.media import MediaLimits
        from mmspec.app.media.video import FramePolicy
        if __name__ == "__main__":
            import hostile_sources
            from mmspec.app.media.items import Item
            with Decoder(2, MediaLimits(seconds=3), FramePolicy()) as decoder:
                for number in range(2):
                    decoder.submit(number, Item("x", "image", hostile_sources.Memory(b"")))
                while decoder.pending:
                    decoder.ready({PATIENCE})
                decoder.submit(2, Item("x", "image", hostile_sources.Attack("sleep")))
                while decoder._idle.qsize() == 2:
                    time.sleep(0.01)
                print(*[worker.process.pid for worker in decoder._workers], flush=True)
                {ENDINGS[ending]}
        """)
    )
    main = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert main.stdout is not None
    processes = [int(pid) for pid in main.stdout.readline().split()]
    if ending == "interrupt":
        os.killpg(main.pid, signal.SIGINT)  # as a terminal does
    if ending == "kill":
        main.kill()
    said = main.communicate(timeout=PATIENCE)[1]
    assert len(processes) == 2 and "leaked" not in said and ("Error" in said) == (ending == "raise")
    deadline = time.monotonic() + PATIENCE  # a process whose parent was killed while it was busy ends by its alarm
    while any(_lives(process) for process in processes):
        assert time.monotonic() < deadline, f"processes left: {processes}"
        time.sleep(0.05)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
