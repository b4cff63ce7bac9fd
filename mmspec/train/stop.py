"""Ctrl-C and SIGTERM during the steps of a training run: they end it after a step, when all that it learnt is saved."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any

import torch

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAID = b"\nstopping after this step; Ctrl-C again stops at once\n"


class Stop:
    """Inside the block the first Ctrl-C or SIGTERM is only noted, for all of an accelerator's processes; another Ctrl-C
    raises KeyboardInterrupt at once."""

    def __init__(self, accelerator: Any, device: torch.device) -> None:
        self.accelerator, self.device = accelerator, device
        self.noted, self._before = False, dict[signal.Signals, Any]()

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
            heard = [number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
            self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        if self.noted and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.noted:
            with contextlib.suppress(OSError):  # not by print, which a handler must not enter twice
                os.write(2, SAID)
        self.noted = True

    def asked(self) -> bool:
        """Whether any process was asked to stop; all processes call this after the same step, and stop together."""
        noted = torch.tensor(int(self.noted), device=self.device)
        return bool(self.accelerator.reduce(noted, "sum"))
