"""What the processor's threads give back: in order, side by side, each with a processor of its own."""

from __future__ import annotations

import threading
import time

from mmspec.app.preparing import Preparing, ProcessorThreads


class Processor:
    """Fails where two threads use it at once, as fast tokenizers do."""

    def __init__(self) -> None:
        self.held = False

    def __call__(self, seconds: float) -> str:
        assert not self.held, "Already borrowed"
        self.held = True
        time.sleep(seconds)
        self.held = False
        return threading.current_thread().name


def test_jobs_run_side_by_side_and_come_back_in_order() -> None:
    preparing = Preparing(ProcessorThreads(Processor(), threads=2))
    begun = time.perf_counter()
    for number, seconds in enumerate((1.0, 0.2, 0.2, 0.2)):
        preparing.add(number, lambda processor, seconds=seconds: processor(seconds))
    assert len(preparing) == 4 and list(preparing.ready()) == []
    assert time.perf_counter() - begun < 0.9, "nobody waits who does not ask for it"
    found = [*preparing.ready(wait=3)]
    assert len(found) >= 3
    while preparing:
        found += preparing.ready(wait=1)
    assert [number for number, _ in found] == [0, 1, 2, 3]
    assert len({name for _, name in found}) == 2 and all("mmspec-processor" in name for _, name in found)


def test_what_a_job_raises_stands_in_its_place() -> None:
    preparing = Preparing(ProcessorThreads(Processor()))
    preparing.add("a", lambda processor: 1 / 0)
    preparing.add("b", lambda processor: processor(0))
    found = []
    while preparing:
        found += preparing.ready(wait=1)
    [(_, error), (name, _)] = found
    assert isinstance(error, ZeroDivisionError) and name == "b"
