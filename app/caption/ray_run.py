"""The same workers on Ray: one actor per device anywhere in a cluster, each with its own journal on a shared disk."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmspec.app.caption.dispatch import WorkerEnded
from mmspec.app.caption.model import FatalError
from mmspec.app.caption.options import AUTO
from mmspec.app.caption.plan import Task
from mmspec.app.caption.run import SIZED, Job, Result, Worker
from mmspec.app.caption.workers import say
from mmspec.app.extras import installing

SPELL = 1.0  # seconds after which an actor hands over, even if nothing is finished


class Actor:
    """A worker as Ray holds it: `work` takes tasks and goes on until something is finished."""

    def __init__(self, job: Job, place: str, slot: str):
        self.job, self.place, self.slot = job, place, slot

    def load(self) -> tuple[str, Any]:
        """Window and notes of the loaded worker, or why there is none."""
        try:
            self.worker = Worker(self.job, self.place, self.slot)
        except (FatalError, OSError) as error:
            return "fatal", f"{self.slot} on {self.place}: {error}"
        return "ready", self.worker.notes

    def work(self, tasks: Sequence[Task]) -> tuple[str, Any]:
        self.worker.give(tasks)
        results: list[Result] = []
        until = time.monotonic() + SPELL
        try:
            while not results and self.worker.busy and time.monotonic() < until:
                results = self.worker.step()
        except (FatalError, OSError) as error:
            return "fatal", f"{self.slot} on {self.place}: {error}"
        return "results", (results, self.worker.window, self.worker.flow is not None)

    def end(self) -> dict[str, Any]:
        summary = self.worker.summary()
        self.worker.close()
        return summary

    def process(self) -> int:
        """Number of its process."""
        return os.getpid()


@dataclass(eq=False)
class Remote:
    """An actor, what it will be given next, and the call under way."""

    actor: Any
    slot: str
    call: Any
    window: int = 0
    open: bool = False
    next: list[Task] = field(default_factory=list)
    in_hand: int = 0

    def give(self, tasks: Sequence[Task]) -> None:
        self.next += tasks


class Actors:
    """One actor per device of the cluster; joins the Ray that runs here or at RAY_ADDRESS, or starts one."""

    def __init__(self, job: Job, devices: str, slots: str):
        try:
            import ray
        except ImportError as error:
            raise FatalError(f"--ray needs Ray; {installing('ray')}") from error
        self.ray: Any = ray
        self.summaries: list[Any] = []
        self._said: list[str] = []
        self.troubles: list[Any] = []
        self._ours = not ray.is_initialized()
        if self._ours:
            self.ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
        wanted = self._places(devices)
        nodes = len([node for node in ray.nodes() if node["Alive"]])
        workers, items = math.ceil(len(wanted) / max(1, nodes)), math.ceil(job.items / len(wanted))
        job = replace(job, folder=job.folder.resolve(), workers=workers, items=items)
        self.members: list[Remote] = []
        for number, place in enumerate(wanted):
            gpus = 1 if place.startswith("cuda") else 0
            kind = self.ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(Actor)
            slot = f"{slots}worker-{number}"
            actor = kind.remote(job, place, slot)
            self.members.append(Remote(actor, slot, actor.load.remote()))

    def hear(self) -> list[tuple[Any, list[Result] | WorkerEnded]]:
        for member in self.members:
            if member.call is None and (member.next or member.in_hand):
                member.in_hand += len(member.next)
                member.call, member.next = member.actor.work.remote(member.next), []
        calls = {member.call: member for member in self.members if member.call is not None}
        done, _ = self.ray.wait(list(calls), num_returns=1)
        return [news for call in done for news in self._news(calls[call], call)]

    def stop(self) -> None:
        if self.members:
            with contextlib.suppress(self.ray.exceptions.RayError):
                ends = [member.actor.end.remote() for member in self.members if member.window]
                done, _ = self.ray.wait(ends, num_returns=len(ends), timeout=30) if ends else ([], [])
                self.summaries += [self.ray.get(call) for call in done]
        for member in self.members:
            self.ray.kill(member.actor)
        self.members = []
        if self._ours:
            self.ray.shutdown()

    def _news(self, member: Remote, call: Any) -> list[tuple[Any, list[Result] | WorkerEnded]]:
        member.call = None
        try:
            kind, said = self.ray.get(call)
        except self.ray.exceptions.RayError as error:
            reason = str(error).strip().partition("\n")[0]
            return [(member, self._bury(member, f"{member.slot} has ended ({reason})", killed=True))]
        if kind == "fatal":
            return [(member, self._bury(member, said, killed=False))]
        if kind == "ready":
            member.window = 1 + SIZED  # it says how many more it takes once it has begun
            say([note for note in said if note not in self._said])
            self._said += said
            return []
        results, member.window, member.open = said
        member.in_hand -= len(results)
        return [(member, results)]

    def _bury(self, member: Remote, trouble: str, killed: bool) -> WorkerEnded:
        self.members.remove(member)
        self.ray.kill(member.actor)
        self.troubles.append(trouble)
        print(f"{trouble}; {'the others go on' if self.members else 'nobody is left'}", file=sys.stderr)
        return WorkerEnded(killed)

    def _places(self, devices: str) -> list[str]:
        """One name per worker: `auto` is a GPU each of the whole cluster, or one on the CPU.

        FatalError if the cluster has fewer GPUs, or cores, than are named: Ray would wait for more without a word.
        """
        there = self.ray.cluster_resources()
        gpus, cpus = int(there.get("GPU", 0)), int(there.get("CPU", 0))
        names = [name.strip() for name in devices.split(",") if name.strip()]
        named = ["cuda" if name.isdecimal() or name.startswith("cuda") else name for name in names]
        found = (["cuda"] * gpus or ["cpu"]) if devices == AUTO else named
        if found.count("cuda") > gpus or len(found) > cpus:
            raise FatalError(
                f"--devices {devices} asks for {found.count('cuda')} GPUs and {len(found)} cores; the Ray cluster has "
                f"{gpus} and {cpus}. Name fewer, or start more nodes"
            )
        return found
