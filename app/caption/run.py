"""One worker: it opens items, asks its model and writes what it says; a failure is one item's, not the run's."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mmspec.app.caption.journal import Ledger, Record, digest, key
from mmspec.app.caption.model import Answers, FatalError, area_for, compiles, dtype_of, load, peak_memory, rows_for
from mmspec.app.caption.options import Options
from mmspec.app.caption.outputs import STATE, UnwritableTextError, Writer, facts_of
from mmspec.app.caption.plan import Task
from mmspec.app.extras import cores
from mmspec.app.media.decoder import AHEAD, Decoder, DecoderError
from mmspec.media import Media

SIZED = 4  # pictures that are seen before it is settled how many are captioned at once
PATIENCE = 5  # items on which a model that has never answered may fail before the run is given up
LOST = "AcceleratorError"  # of torch: after most of these the device fails on everything, fast


@dataclass(frozen=True)
class Job:
    """What every worker of a run is told once; travels to other processes and machines."""

    options: Options
    shaping: dict[str, Any]  # what shapes the answers
    folder: Path
    origin: str
    workers: int = 1  # on this machine, to share its cores
    frames: int = 1  # pictures that an item may have
    items: int = 1  # that a worker has to do, about


@dataclass(frozen=True)
class Result:
    """What became of one item, on the disk already."""

    name: str
    text: str = ""
    captions: int = 0  # one for each prompt
    tokens: int = 0
    seconds: float = 0.0
    error: str = ""  # class of the error; there may be a text all the same that could not be written beside the item
    message: str = ""
    twin_of: str = ""
    finish: str = ""  # "length": cut off at --max-new-tokens
    animated: bool = False  # an image of which the first frame alone was shown


@dataclass(eq=False)
class Twin:
    """The first of items that are the same: its answer once there is one, and who waits for it."""

    name: str
    texts: list[str] | None = None
    finish: str = ""
    scores: tuple[float, ...] = ()
    followers: list[tuple[Task, Media]] = field(default_factory=list)


def recorded_twins(folder: Path) -> dict[tuple[str, str], Twin]:
    with contextlib.closing(Ledger(sorted((folder / STATE).glob("*.jsonl")))) as ledger:
        return {
            (record["ask"], str(record.get("content"))): Twin(
                str(record["file_name"]), _answers(record), record.get("finish", ""), _scores(record)
            )
            for record in ledger.all_captions() if "ask" in record
        }  # fmt: skip


def _answers(record: Record) -> list[str]:
    """What the model said, as recorded: kept apart where the captions are not just that."""
    return record.get("answers") or record.get("captions") or [str(record.get("answer", record["text"]))]


def _scores(record: Record) -> tuple[float, ...]:
    return tuple(record.get("scores") or ([record["score"]] if "score" in record else []))


class Worker:
    """Tasks in by `give`, results out by `step`; between the two they are decoded, asked and recorded."""

    def __init__(self, job: Job, place: str, slot: str):
        options, self.job, self.slot = job.options, job, slot
        self.engine: Any = load(options, place)
        self.flow: Answers | None = None  # until the first pictures are there, by whose sizes it is opened
        self.rows = SIZED
        self._area, capped = area_for(options.max_pixels_per_image, self.engine)
        self._compiles, compiling = compiles(options, job.items, job.frames, self.engine)
        self.notes = [*self.engine.notes, *filter(None, (capped, compiling))]
        self._decoders = options.decoders or max(1, min(4, cores() // (2 * job.workers)))
        self.sampler: Callable[..., None] | None = None  # is shown what the model is asked
        self._twins: dict[tuple[str, str], Twin] = {}  # by ask and content, for --dedup
        if options.dedup and options.resume:
            self._twins = recorded_twins(job.folder)
        self._inbox: deque[Task] = deque()
        self._decoding: dict[str, Task] = {}
        self._waiting: deque[tuple[Task, Media]] = deque()
        self._asked: dict[str, tuple[Task, Media]] = {}
        self._following = 0  # how many wait for the answer of one like them
        self._held: list[tuple[Task, str, Exception]] = []  # failures of a model that has not answered yet
        self._results: list[Result] = []
        self._answered = self._lost = False
        with contextlib.ExitStack() as stack:
            self._writer = Writer(job.folder, slot)
            stack.callback(self._writer.close)
            self._decoder = stack.enter_context(Decoder(self._decoders, options.limits(self._area), options.policy))
            self._close = stack.pop_all()

    @property
    def window(self) -> int:
        """Tasks that it may have in hand."""
        return max(2 * self.rows, PATIENCE + 1) + AHEAD * self._decoders

    @property
    def in_hand(self) -> int:
        """Tasks given and not finished."""
        return self._at_work + len(self._held)

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do or to return."""
        return bool(self.in_hand or self._results)

    @property
    def _at_work(self) -> int:
        return len(self._inbox) + len(self._decoding) + len(self._waiting) + len(self._asked) + self._following

    def give(self, tasks: Sequence[Task]) -> None:
        self._inbox.extend(tasks)

    def step(self) -> list[Result]:
        """A part of the work, such as one round of the model; what has been finished.

        Raises FatalError: the model, or the decoder, works on nothing.
        """
        self._decode()
        if self.flow is None and (len(self._waiting) >= SIZED or (self._waiting and not self._decoding)):
            self._open()  # a step of its own: the clock of the run starts behind it
            return []
        while self._waiting and self.flow is not None and self.flow.free:
            self._ask(self.flow, *self._waiting.popleft())
        if self.flow is not None and self.flow.busy:
            for answer in self.flow.step():
                self._answer(answer)
        if not self._at_work:
            self._let_go()
        results, self._results = self._results, []
        return results

    def summary(self) -> dict[str, Any]:
        stats = getattr(self.flow, "stats", None)
        facts: dict[str, Any] = {
            "worker": self.slot,
            "rows": getattr(self.flow, "rows", 0),
            "peak_memory": peak_memory(self.engine),
        }
        facts |= facts_of(dtype=dtype_of(self.engine), prefix=getattr(stats, "prefix", None) or None)
        if stats is not None and stats.rounds:
            facts |= {
                "target_calls": stats.target_calls,
                "row_rounds": stats.row_rounds,
                "gained": stats.gained,
                "accepted": stats.accepted,
                "tokens_per_target_call": round(stats.tokens_per_target_call, 4),
                "accepted_draft_tokens_per_call": round(stats.accepted_draft_tokens_per_call, 4),
                "lossless": stats.lossless,
            }
        return facts

    def close(self) -> None:
        self._close.close()

    def _decode(self) -> None:
        while self._inbox and self._decoder.room:
            task = self._inbox.popleft()
            self._decoding[task.item.name] = task
            self._decoder.submit(task.item.name, task.item)
        if not self._decoding or len(self._waiting) > self.rows:  # the rest waits in the decoder, which counts bytes
            return
        idle = self.flow is None or not (self._waiting or self.flow.busy)
        try:
            decoded = self._decoder.ready(0.2 if idle else 0)
        except DecoderError as error:
            raise FatalError(str(error)) from error
        for name, media in decoded:
            task = self._decoding.pop(str(name))
            if isinstance(media, Media):
                self._sort(task, media)
            else:
                self._fail(task, "", media)

    def _sort(self, task: Task, media: Media) -> None:
        """With --dedup, an item that is the same as one before gets that one's caption."""
        twin = self._twins.get((task.ask, media.content))
        if not self.job.options.dedup or twin is None or twin.name == task.item.name:
            if self.job.options.dedup:
                self._twins[task.ask, media.content] = Twin(task.item.name)
            self._waiting.append((task, media))
        elif twin.texts is not None:
            self._keep(task, media, twin.texts, twin_of=twin.name, finish=twin.finish, scores=twin.scores)
        else:
            self._following += 1
            twin.followers.append((task, media))

    def _open(self) -> None:
        """Begin to ask the model, as many at once as fit by the largest picture so far; compile it where that pays."""
        sizes = [frame.size for _, media in self._waiting for frame in media.frames]
        largest = max(sizes, key=lambda size: size[0] * size[1])
        rows = rows_for(self.job.options.batch_size, self.job.frames, self.engine, largest)
        self.rows = min(rows, max(1, self.job.items))
        if self._compiles:  # the next items are being decoded meanwhile
            task, media = self._waiting[0]
            self.engine.warm_up(media.frames, task.choice, self.rows)
        self.flow = self.engine.flow(self.rows)

    def _ask(self, flow: Answers, task: Task, media: Media) -> None:
        name, drawn = task.item.name, self.job.shaping["seed"]
        seed = 0 if drawn is None else int(digest(f"{drawn} {media.content}".encode())[:12], 16)
        if self.sampler is not None:
            self.sampler(media.frames, task.choice)
        self._asked[name] = (task, media)
        flow.add(name, media.frames, task.choice, seed)

    def _answer(self, answer: Any) -> None:
        task, media = self._asked.pop(answer.ticket)
        twin = self._twins.get((task.ask, media.content), Twin(task.item.name))
        followers, twin.followers = twin.followers, []
        self._following -= len(followers)
        if answer.error is not None:
            self._twins.pop((task.ask, media.content), None)
            for follower, its in followers:  # the first of them is asked, the others wait for it
                self._sort(follower, its)
            self._refused(task, media.content, answer.error)
            return
        self._answered, self._lost = True, False
        self._let_go()
        texts = twin.texts = [answer.text, *getattr(answer, "further", ())]
        twin.finish = getattr(answer, "finish", "")  # not every engine tells
        twin.scores = getattr(answer, "scores", ())
        self._keep(task, media, texts, answer.tokens, answer.seconds, finish=twin.finish, scores=twin.scores)
        for follower, its in followers:
            self._keep(follower, its, texts, twin_of=twin.name, finish=twin.finish, scores=twin.scores)

    def _refused(self, task: Task, content: str, error: Exception) -> None:
        lost, self._lost = self._lost, type(error).__name__ == LOST
        if lost and self._lost:  # one such item may have broken the device; the next one is not to blame
            raise FatalError(f"the device works no more; the same command goes on. {error}") from error
        self._held.append((task, content, error))
        if self._answered:
            self._let_go()
        elif len(self._held) == PATIENCE:
            raise FatalError(f"the model fails on every item. {type(error).__name__}: {error}") from error

    def _keep(
        self, task: Task, media: Media, answers: list[str], tokens: int = 0, seconds: float = 0.0, twin_of: str = "",
        finish: str = "", scores: tuple[float, ...] = (),
    ) -> None:  # fmt: skip
        further = task.choice.further
        before = f"{task.existing} " if task.existing and self.job.options.on_existing == "append" else ""
        texts = [before + task.choice.caption(answer) for answer in answers]
        facts = about(task, media.content, self.job) | self.job.shaping | {"tokens": tokens}
        facts |= facts_of(
            prompt=task.choice.text, system=task.choice.system, start=task.choice.start, existing=task.existing,
            twin_of=twin_of, length=media.seconds, seconds=round(seconds, 4), finish=finish,
            answer=answers[0] if answers[0] != texts[0] else None, score=scores[0] if scores else None,
        )  # fmt: skip
        if further:
            facts |= {"prompts": [task.choice.text, *further], "captions": texts}
            facts |= {"answers": answers} if answers != texts else {}
            facts |= {"scores": list(scores)} if scores else {}
        result = Result(
            task.item.name, " | ".join(texts), len(texts), tokens, seconds, twin_of=twin_of, finish=finish,
            animated=media.animated,
        )  # fmt: skip
        try:
            self._writer.write(task.item.name, texts[0], task.sidecar, facts)
        except UnwritableTextError as error:
            result = replace(result, error=type(error).__name__, message=str(error))
        self._results.append(result)

    def _let_go(self) -> None:
        held, self._held = self._held, []
        for task, content, error in held:
            self._fail(task, content, error)

    def _fail(self, task: Task, content: str, error: Exception) -> None:
        self._results.append(failed(task, content, error, self._writer, self.job))


def failed(task: Task, content: str, error: Exception, writer: Writer, job: Job) -> Result:
    """Record that an item got no caption; `content` may be empty where nobody could read it."""
    writer.fail(task.item.name, error, about(task, content, job))
    return Result(task.item.name, error=type(error).__name__, message=str(error) or repr(error))


def about(task: Task, content: str, job: Job) -> Record:
    """What the journal says of an item beside its caption."""
    path = task.item.source.path
    return facts_of(
        key=key(content, ask=task.ask), ask=task.ask, content=content, stamp=task.stamp, folder=job.origin,
        kind=task.item.kind, path=os.path.abspath(path) if path is not None else None,
    )  # fmt: skip
