"""The processor's threads: jobs run side by side, each thread with a processor of its own."""

from __future__ import annotations

import threading
import time

import pytest

from mmspec.pipelines.serving.threads import ProcessorThreads


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


def test_jobs_run_side_by_side() -> None:
    threads = ProcessorThreads(Processor())
    jobs = [threads.submit(lambda processor, seconds=seconds: processor(seconds)) for seconds in (1.0, 0.2, 0.2, 0.2)]
    failing = threads.submit(lambda processor: 1 / 0)
    names = {job.result() for job in jobs}
    assert len(names) == 2 and all("mmspec-processor" in name for name in names)
    with pytest.raises(ZeroDivisionError):
        failing.result()
