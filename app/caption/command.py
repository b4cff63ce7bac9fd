"""`mmspec caption`: images and videos in, a caption for each out; a bad file, a kill or a second run costs nothing."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmspec import zoo
from mmspec.app import embedded
from mmspec.app.caption import report, settings
from mmspec.app.caption.crew import Crew
from mmspec.app.caption.finals import FAILURES, OutputError
from mmspec.app.caption.journal import write_whole
from mmspec.app.caption.mirror import Mirror
from mmspec.app.caption.model import FatalError
from mmspec.app.caption.options import BESIDE, ENGINE, Options
from mmspec.app.caption.outputs import Outputs
from mmspec.app.caption.plan import Plan, Planner
from mmspec.app.caption.prompts import PromptError, Prompts
from mmspec.app.caption.report import RunTally, TooManyErrorsError, plain
from mmspec.app.caption.run import Job
from mmspec.app.caption.settings import SettingsError
from mmspec.app.caption.workers import Alone, places
from mmspec.app.enabling import EnableError
from mmspec.app.media.inputs import Inputs, open_inputs
from mmspec.app.media.items import Item
from mmspec.app.media.remote import is_address
from mmspec.media import MediaError

OK, FATAL, SENSELESS, SOME_FAILED, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of `mmspec caption`."""
    parser.description = (
        "Caption images and videos. Run it again to go on after a stop: what is done is not done twice. "
        "Exit code: 0 all well, 3 some items failed (see failed.jsonl), 1 nothing could be done or the run was given "
        "up, 2 an option that makes no sense, 130 stopped by Ctrl-C, 143 by SIGTERM, as SLURM and containers send it."
    )
    settings.configure(parser)


def run(args: argparse.Namespace) -> int:
    """Caption as the options say; the exit code."""
    try:
        with _terminable():
            options = settings.resolve(args)
            return _caption(options)
    except TerminatedError:  # before there was anything to wind up
        return TERMINATED
    except (MediaError, PromptError, SettingsError, OutputError, FatalError, TooManyErrorsError, EnableError) as error:
        print(f"mmspec caption: {plain(str(error))}", file=sys.stderr)
        return SENSELESS if isinstance(error, PromptError | SettingsError | EnableError) else FATAL
    except OSError as error:
        print(f"mmspec caption: {error}; what was finished before is safe", file=sys.stderr)
        return FATAL


class TerminatedError(KeyboardInterrupt):
    """SIGTERM has come: to be wound up as Ctrl-C is."""


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Inside, the first SIGTERM raises TerminatedError, and further ones do not hinder the winding up."""

    def stop(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise TerminatedError

    if threading.current_thread() is not threading.main_thread():  # signals go to the main one
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _caption(options: Options) -> int:
    inputs = open_inputs(
        options.inputs or [zoo.samples()], recursive=options.recursive, column_image=options.column_image,
        column_text=options.column_text, column_tags=options.column_tags, split=options.split,
    )  # fmt: skip
    options = settings.fitted(options)
    first, *further = options.prompt
    system, start = options.system or "", options.start_with or ""
    prompts = Prompts(first, system, start, options.prepend, options.append, tuple(further))
    settings.enable(options)  # what is wrong is said before anything is read or loaded
    shaping = settings.shaping(options)
    slots = f"shard-{options.shard.replace('/', '-of-')}-" if options.shard else ""
    folder, origin = _folders(options, inputs)
    anew = options.on_existing == "overwrite"
    mirror = Mirror(options.out) if is_address(options.out) else None
    if mirror is not None:
        folder = mirror.folder
        mirror.pull(options.extension, anew)
    outputs = Outputs(folder, origin, slots, look_only=options.dry_run, overwrite=anew, mirror=mirror)
    with contextlib.closing(outputs):
        listed = [getattr(place, "path", None) for place in inputs.places]  # of lists, tables and tars
        read = filter(None, [options.config, *listed])
        if options.report and not report.replaceable(options.report):
            raise OutputError(f"--report {options.report} would replace a file that is no report; name another")
        outputs.finals.claim(options.kinds, read, options.report)
        todo = Planner(options, shaping, prompts, outputs).plan(inputs)
        todo.pending = todo.pending[: options.limit]
        _say_plan(options, inputs, outputs, todo)
        frames = todo.frames(options.policy, options.max_frames)
        job = Job(options, shaping, folder, outputs.origin, frames=frames, items=len(todo.pending))
        if options.dry_run:
            return _dry_run(job, todo)
        with mirror.kept_up() if mirror is not None else contextlib.nullcontext():
            return _work(job, slots, inputs, outputs, todo)


def _folders(options: Options, inputs: Inputs) -> tuple[Path, str]:
    """The output folder, and the name of where the items come from."""
    origin = str(inputs.root.resolve()) if inputs.root is not None else " ".join(map(str, options.inputs))
    if options.out != BESIDE:
        return Path(options.out), origin
    if inputs.root is None:
        raise OutputError("--out beside needs files to lie beside; give --out a folder")
    return inputs.root, origin


def _work(job: Job, slots: str, inputs: Inputs, outputs: Outputs, todo: Plan) -> int:
    options = job.options
    failed_before = todo.failed_before + len(todo.unwritable)
    if not todo.pending:
        _finish(options, inputs, outputs)
        _report(options, inputs, outputs, todo, RunTally(0, shown=False), [], None)
        print(f"nothing to do; what there is lies in {outputs.folder}")
        return SOME_FAILED if failed_before else OK
    _keep(options, outputs, slots)
    tally = RunTally(len(todo.pending), options.quiet, options.max_errors)
    comparison = None
    try:
        with contextlib.closing(tally), _crew(job, slots, todo) as crew:
            comparison = crew.comparison if isinstance(crew, Alone) else None
            crew.run(todo.pending, tally.add, tally.start)
            if comparison is not None:
                if comparison.kept:
                    tally.close()
                    kept = len(comparison.kept)
                    print(f"comparing with stock generate on {kept} of them (--no-compare spares it)", flush=True)
                comparison.measure(crew.worker.engine, getattr(crew.worker.flow, "rows", 1))
    except KeyboardInterrupt as stop:
        _wind_up(options, inputs, outputs, todo, tally)
        print(f"\nstopped: {tally.counted} are in {outputs.folder}; the same command again goes on from there")
        return TERMINATED if isinstance(stop, TerminatedError) else INTERRUPTED
    except (FatalError, TooManyErrorsError):
        _wind_up(options, inputs, outputs, todo, tally)
        raise
    made = _finish(options, inputs, outputs)
    _report(options, inputs, outputs, todo, tally, crew.summaries, comparison)
    if tally.failed:
        where = outputs.folder / FAILURES
        print(f"{tally.failed} failed" + f": {where} says why" * where.is_file())
    files = f"a {options.extension} for each" if tally.captions and any(task.sidecar for task in todo.pending) else ""
    if made or files:
        print("captions: " + ", and ".join(filter(None, [", ".join(map(str, made)), files])))
    print("; ".join(filter(None, [str(tally), str(comparison or "")])))
    return SOME_FAILED if tally.failed or failed_before else OK


def _keep(options: Options, outputs: Outputs, slots: str) -> None:
    """The settings as a file for --config, beside the captions; with the journals where it would replace another's."""
    name = f"{slots}{settings.FILE}"
    path = outputs.folder / name
    if options.out == BESIDE or options.extension == path.suffix or not settings.replaceable(path):
        path = outputs.state / name
    write_whole(path, settings.dumped(options), outputs.state / f"{slots}run.partial")


def _report(
    options: Options, inputs: Inputs, outputs: Outputs, todo: Plan, tally: RunTally, workers: list, comparison: Any
) -> None:
    if options.report:
        report.write(options.report, options, todo, tally, workers, comparison, outputs.ledger, inputs.items)


@contextlib.contextmanager
def _crew(job: Job, slots: str, todo: Plan) -> Iterator[Any]:
    """Who works: a process per device, or this process; they are told to stop in the end, whatever happens."""
    where = places(job.options.devices)
    crew: Any = Crew(job, where, slots) if len(where) > 1 else Alone(job, where[0], slots, len(todo.pending))
    try:
        yield crew
    finally:
        crew.stop()


def _dry_run(job: Job, todo: Plan) -> int:
    """Nothing is written but to a folder that goes again."""
    if not todo.pending:
        return OK
    asked = todo.pending[0].asked
    prompts = (("prompt", text) for text in (asked.text, *asked.further))
    for what, text in (("system", asked.system), *prompts, ("answers begin", asked.start)):
        if text:
            print(f"{what}: {plain(text)}")
    workers = places(job.options.devices)
    with tempfile.TemporaryDirectory() as folder:
        chosen = replace(job.options, devices=workers[0], compare=False, compile=False)
        trial = replace(job, folder=Path(folder), options=chosen)
        with _crew(trial, "", Plan(todo.pending[:1])) as crew:
            crew.run(todo.pending[:1], RunTally(1, quiet=True, shown=False).add)
            rows = crew.worker.rows  # as many at once as in the run
            wanted = max(2 * rows, 4)
            sample = todo.pending[:: max(1, len(todo.pending) // wanted)][:wanted]
            first, second = sample[:rows], sample[rows:] or sample  # few items: the same again, warm
            warm_up, measured = (RunTally(len(part), quiet=True, shown=False) for part in (first, second))
            crew.run(first, warm_up.add)
            measured.start()
            crew.run(second, measured.add)
        print(report.estimate(todo, measured, len(workers), crew.summaries[0]))
    return OK


def _finish(options: Options, inputs: Inputs, outputs: Outputs) -> list[Path]:
    return outputs.finish(options.kinds, inputs.items, options.max_bytes)


def _wind_up(options: Options, inputs: Inputs, outputs: Outputs, todo: Plan, tally: RunTally) -> None:
    """Final files and report of a run that ends early; what goes wrong here must not hide why it ends."""
    for step in (
        lambda: _finish(options, inputs, outputs),
        lambda: _report(options, inputs, outputs, todo, tally, [], None),
    ):
        try:
            step()
        except (MediaError, OutputError, OSError) as error:
            print(f"mmspec caption: {plain(str(error))}", file=sys.stderr)


def _far(item: Item, root: Path) -> bool:
    """Whether a file lies outside of the folder that names are relative to."""
    path = item.source.path
    return path is not None and not Path(os.path.abspath(path)).is_relative_to(os.path.abspath(root))


def _say_plan(options: Options, inputs: Inputs, outputs: Outputs, todo: Plan) -> None:
    print(f"{todo.items} item{'s' * (todo.items != 1)}: {todo}")
    if skipped := inputs.skipped():
        names = ", ".join(map(plain, skipped[:5])) + ", ..." * (len(skipped) > 5)
        print(f"NOT looked into: {len(skipped)} subfolder(s) ({names}); --recursive captions what is in them too")
    others = inputs.left_out()
    if options.out == BESIDE:  # what earlier runs wrote
        others -= Counter({name: others[name] for name in (options.extension, ".jsonl", ".parquet")})
    if others:
        kinds = ", ".join(f"{count} {plain(kind) or 'without extension'}" for kind, count in others.most_common(5))
        print(f"left out: {others.total()} file(s) that are no images or videos by their names ({kinds})")
    if inputs.root is not None and (far := next((t.item for t in todo.pending if _far(t.item, inputs.root)), None)):
        print(f"files outside of {inputs.root} are called by their whole path, such as {plain(far.name)}")
    if outputs.ledger.damaged:
        print(f"{outputs.ledger.damaged} broken line(s) in {outputs.state} (a run was killed there) are passed over")
    for trouble in todo.unwritable:
        print(f"failed: {plain(trouble)}", file=sys.stderr)
    if options.engine != ENGINE:  # of another engine's model we know nothing
        return
    samples = zoo.samples().resolve()
    own = embedded.speaks(options.model)
    if todo.pending and own and (inputs.root is None or inputs.root.resolve() != samples):
        print(embedded.NOTE.format(options.model))
