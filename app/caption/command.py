"""`mmspec caption`: caption images and videos; the run can be stopped and resumed, and bad files only fail alone."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspec import zoo
from mmspec.app import embedded
from mmspec.app.caption import options as settings
from mmspec.app.caption import report
from mmspec.app.caption.mirror import Mirror, push_to_hub
from mmspec.app.caption.options import BESIDE, ENGINE, Options, SettingsError
from mmspec.app.caption.outputs import FAILURES, FILE, OutputError, Outputs
from mmspec.app.caption.plan import Plan, Planner
from mmspec.app.caption.report import RunTally, plain
from mmspec.app.caption.run import FatalError, Job
from mmspec.app.caption.workers import SingleWorker, WorkerPool, places
from mmspec.app.enabling import EnableError
from mmspec.app.extras import terminable
from mmspec.app.files import write_whole
from mmspec.app.media.inputs import Inputs, open_inputs
from mmspec.app.media.remote import is_address
from mmspec.app.prompt import PromptError, Prompts
from mmspec.media import MediaError

OK, FATAL, SENSELESS, SOME_FAILED, INTERRUPTED = 0, 1, 2, 3, 130


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Caption images and videos. Run the same command again to resume after a stop: finished items are skipped. "
        "Exit codes: 0 success, 3 some items failed (see failed.jsonl), 1 nothing could be done or the run was given "
        "up, 2 invalid options, 130 stopped by Ctrl-C, or by SIGTERM, which SLURM and containers send."
    )
    settings.configure(parser)


def run(args: argparse.Namespace) -> int:
    try:
        with terminable():
            options = settings.resolve(args)
            return _caption(options)
    except (MediaError, PromptError, SettingsError, OutputError, FatalError, EnableError) as error:
        print(f"mmspec caption: {plain(str(error))}", file=sys.stderr)
        return SENSELESS if isinstance(error, PromptError | SettingsError | EnableError) else FATAL
    except OSError as error:
        print(f"mmspec caption: {error}; all finished captions are saved", file=sys.stderr)
        return FATAL


def _caption(options: Options) -> int:
    inputs = open_inputs(
        options.inputs or [zoo.samples()], recursive=options.recursive, column_image=options.column_image,
        column_text=options.column_text,
    )  # fmt: skip
    options = options.fitted()
    first, *further = options.prompt
    prompts = Prompts(first, options.system, options.prepend, options.append, tuple(further))
    options.enabled  # noqa: B018 - reports invalid options before anything is read or loaded
    shaping = options.shaping
    slots = f"shard-{options.shard.replace('/', '-of-')}-" if options.shard else ""
    folder, origin = _folders(options, inputs)
    how: dict[str, Any] = {"look_only": options.dry_run, "overwrite": options.on_existing == "overwrite"}
    mirror = Mirror(options.out) if is_address(options.out) else None
    if mirror is not None:
        mirror.pull()
        folder, how = mirror.folder, how | {"fetch": mirror.fetch_logs}
    with contextlib.closing(Outputs(folder, origin, slots, **how)) as outputs:
        listed = [getattr(place, "path", None) for place in inputs.places]  # of lists, tables and tars
        outputs.finals.claim(options.kinds, filter(None, [options.config, *listed]), options.report)
        todo = Planner(options, shaping, prompts, outputs).plan(inputs)
        todo.pending = todo.pending[: options.limit]
        frames = todo.frames(options.policy)
        job = Job(options, shaping, folder, outputs.origin, frames=frames, items=len(todo.pending))
        run = Run(options, inputs, outputs, todo, job)
        run.print_plan()
        if options.dry_run:
            for text in [text for task in todo.pending[:1] for text in task.choice.texts]:
                print(f"prompt: {plain(text)}")
            return OK
        with mirror.kept_up() if mirror is not None else contextlib.nullcontext():
            code = run.work()
        if options.push_to_hub and code in (OK, SOME_FAILED):
            print(f"uploaded to {push_to_hub(folder, options.push_to_hub)}")
        return code


def _folders(options: Options, inputs: Inputs) -> tuple[Path, str]:
    """The output folder, and a name for the source of the items."""
    origin = str(inputs.root.resolve()) if inputs.root is not None else " ".join(map(str, options.inputs))
    if options.out != BESIDE:
        return Path(options.out), origin
    if inputs.root is None:
        raise OutputError("--out beside needs inputs that are files; give --out a folder")
    return inputs.root, origin


@dataclass
class Run:
    """One run, after its inputs and outputs are open and its plan is made."""

    options: Options
    inputs: Inputs
    outputs: Outputs
    todo: Plan
    job: Job

    def work(self) -> int:
        options, outputs, todo = self.options, self.outputs, self.todo
        failed_before = todo.failed_before + len(todo.unwritable)
        if not todo.pending:
            self._finish()
            if options.report is not None and not options.report.exists():  # else it says what was measured
                self._report(RunTally(0))
            saved = f"; the captions are in {options.out if is_address(options.out) else outputs.folder}"
            print("nothing to do" + saved * bool(todo.done))
            return SOME_FAILED if failed_before else OK
        self._write_settings()
        tally = RunTally(len(todo.pending), options.quiet)
        devices = places(options.devices)[: len(todo.pending)]
        start: Any = WorkerPool if len(devices) > 1 else SingleWorker
        try:
            with contextlib.closing(start(self.job, devices, outputs.slots)) as workers, tally:
                workers.run(todo.pending, tally.add)
        except KeyboardInterrupt:
            self._wind_up(tally)
            print(f"\nstopped: {tally.counted} are in {outputs.folder}; run the same command again to resume")
            return INTERRUPTED
        except FatalError:
            self._wind_up(tally)
            raise
        written = self._finish()
        self._report(tally, workers.summaries, workers.comparison)
        if tally.failed:
            where = outputs.folder / FAILURES
            print(f"{tally.failed} failed" + f": {where} says why" * where.is_file())
        sidecars = tally.captions and any(task.sidecar for task in todo.pending)
        files = [", ".join(map(str, written)), "a .txt for each" * bool(sidecars)]
        if any(files):
            print("captions: " + ", and ".join(filter(None, files)))
        print("; ".join(filter(None, [str(tally), str(workers.comparison or "")])))
        return SOME_FAILED if tally.failed or failed_before else OK

    def print_plan(self) -> None:
        """Print how much there is to do, and what is left out."""
        options, inputs, todo = self.options, self.inputs, self.todo
        print(f"{todo.items} item{'s' * (todo.items != 1)}: {todo}")
        if count := inputs.subfolders():
            print(f"{count} subfolder(s) are not read (--recursive reads them too)")
        if damaged := self.outputs.ledger.damaged:
            print(f"ignored {damaged} broken line(s) in {self.outputs.state} (a run was killed while it wrote them)")
        for trouble in todo.unwritable:
            print(f"failed: {plain(trouble)}", file=sys.stderr)
        root = inputs.root
        samples = root is not None and root.resolve() == zoo.samples().resolve()
        if todo.pending and options.engine == ENGINE and embedded.speaks(options.model) and not samples:
            print(embedded.NOTE.format(options.model))

    def _write_settings(self) -> None:
        """Write the file for --config beside the captions, or in the state folder beside pictures and other files."""
        outputs, name = self.outputs, f"{self.outputs.slots}{FILE}"
        path = outputs.folder / name
        if self.options.out == BESIDE or not outputs.finals.free(path):
            path = outputs.state / name
        else:
            outputs.finals.note(path)
        write_whole(path, self.options.dumped(), outputs.state / f"{outputs.slots}run.partial")

    def _finish(self) -> list[Path]:
        return self.outputs.finish(self.options.kinds, self.inputs.items, self.options.max_bytes)

    def _report(self, tally: RunTally, workers: Sequence[dict[str, Any]] = (), comparison: Any = None) -> None:
        if self.options.report:
            self.outputs.finals.note(self.options.report)
            report.write(self.options, self.todo, tally, workers, comparison, self.outputs.ledger, self.inputs.items)

    def _wind_up(self, tally: RunTally) -> None:
        """Write final files and report of a run that ends early; errors here must not hide the reason why it ends."""
        for step in (self._finish, lambda: self._report(tally)):
            try:
                step()
            except (MediaError, OutputError, OSError) as error:
                print(f"mmspec caption: {plain(str(error))}", file=sys.stderr)
