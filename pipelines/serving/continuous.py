"""ContinuousBatcher: continuous batching in one session, where a waiting prompt replaces a row as soon as it ends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from mmspec.compile.capture_cache import settled
from mmspec.compile.version import Versions, unchanging
from mmspec.config import UnsupportedError
from mmspec.loop import decode, start
from mmspec.pipelines.drafters import forced
from mmspec.pipelines.host.call import Call
from mmspec.pipelines.host.kinds import GenerativeModel, Processor
from mmspec.pipelines.host.loops import as_call
from mmspec.pipelines.host.processors.stopping import Endings
from mmspec.pipelines.patching.generate import obstacle, requested
from mmspec.pipelines.patching.handle import Patch
from mmspec.pipelines.serving.batcher import Batcher, FinishedPrompt, QueuedPrompt, alike, logprobs, out_of_memory
from mmspec.pipelines.target.model import Request
from mmspec.protocols import Target
from mmspec.session import Row, Session
from mmspec.statistics import Stats
from mmspec.types import Round

__all__ = ["ContinuousBatcher", "FinishedPrompt"]

LASTING = 1000  # rounds after which a batch that is not full is compiled, too: they cost about as much as the compiler


@dataclass
class _PromptRow(Row):
    """A row with the prompt that it answers."""

    prompt: QueuedPrompt | None = None  # None once the answer was returned or the prompt cancelled
    counts: Stats = field(default_factory=Stats)
    logprob: float = 0.0

    @property
    def stats(self) -> Stats:
        """The statistics of this row alone."""
        own = replace(self.counts, accepted_by_depth=self.counts.accepted_by_depth.copy())
        own.rounds, own.tokens = own.row_rounds, self.generated
        own.lossless, own.spent = self.rule.lossless, self.spent  # known once the row has ended
        return own


class ContinuousBatcher(Batcher):
    """Continuous batching: `add` prompts, and call `step` while it is `busy`; each step returns what has finished.

    A row does not depend on the others: it gets the tokens that its prompt gets alone, and with sampling those of its
    seed. Rows that run together have one acceptance rule and one guidance; a prompt with others waits until they have
    ended. After an error in a round, its prompts are repeated one by one, so that only the failing one fails. Prompts
    that cannot be accelerated run in `model.generate`, one by one. Changes of the model are looked for when prompts
    join; change it while no answer is under way.
    """

    def __init__(
        self, model: GenerativeModel, processor: Processor, rows: int, scored: bool = False, **generation: Any
    ) -> None:
        """See Batcher; the model has to be enabled.

        Raises:
            ValueError: the model is not enabled, or is enabled with `reproducible`.
        """
        super().__init__(model, processor, rows, scored, **generation)
        if (patch := Patch.of(self.model)) is None:
            raise ValueError(f"{type(self.model).__name__} is not enabled; call mmspec.enable(model) first")
        self._handle = patch
        if self._handle.config.reproducible:
            raise ValueError("reproducible=True uses torch's noise, which is per call; here each row has its own seed")
        self._rounds = Counter[int]()  # by batch size
        self._versions: Versions = {}  # the model's, as read when prompts have last joined
        self._together = False  # whether several prompts may share one prefill; known after the first one
        self._restart()

    def _restart(self) -> None:
        self._target: Target | None = None
        self._session = Session([], self.model.device)
        self._kind: tuple[object, ...] = ()  # what all rows of a session share: their rule, guidance, greedy or not
        self._draining = False  # whether a prompt of another kind waits until all rows have ended

    @property
    def running(self) -> list[QueuedPrompt]:
        return [row.prompt for row in _rows(self._session) if row.prompt is not None]

    def cancel(self, ticket: Hashable) -> None:
        super().cancel(ticket)
        self._draining = False  # the prompt that waits may be gone; else the next step finds out
        for row in _rows(self._session):
            if row.prompt is not None and row.prompt.ticket == ticket:
                row.prompt, row.done = None, True
        if not self.running:  # there may be no other step
            self._session.retire()

    def written(self) -> Iterator[tuple[Hashable, list[int], Stats]]:
        for row in _rows(self._session):
            if row.prompt is not None:
                yield row.prompt.ticket, row.tokens[row.start :], row.stats

    def _work(self) -> None:
        """Prefill waiting prompts into free rows, then run one round of all rows."""
        if self._waiting and len(self.running) < self.rows:  # not the rows of cancelled prompts
            self._versions.clear()
        with unchanging(self._versions), torch.no_grad(), self._handle.running(self.model):
            self._session.retire()  # rows of cancelled prompts
            self._draining = self._draining and bool(self._session.rows)
            while not self._draining and (group := self._take(self._together)) and self._admit(group):
                pass
            self._collect()  # an answer may end with its first token
            if self._session.rows:
                self._round()
                self._collect()

    def _round(self) -> None:
        """One round of all rows.

        With `compile`, a batch size is compiled if it is the full one, or has lasted: at the end of a run the batch
        shrinks through all smaller sizes, and each of them would wait for the compiler.
        """
        assert self._target is not None
        rows = len(self._session.rows)
        passing = rows < self.rows and self._rounds[rows] < LASTING
        self._rounds[rows] += 1
        try:
            drafter = forced.with_forced(self._handle.proposer, self._session.rows)
            with settled(passing):
                now = next(decode(self._session, self._target, drafter))
            for row, nodes, new, proposed in zip(_rows(self._session), now.counts, now.new, now.proposed, strict=True):
                row.counts.count(nodes, new, proposed)
            self._score(self._session, now)
        except Exception as error:  # the state may be inconsistent
            self._interrupted([], error)

    def _score(self, session: Session, now: Round) -> None:
        """Add the log-probabilities of a round's new tokens, by the target's raw logits."""
        if not self.scored:
            return
        assert now.scores.raw is not None
        after = now.kept[:, : max(map(len, now.new)), None].expand(-1, -1, now.scores.raw.shape[-1])
        for row, more in zip(_rows(session), logprobs(now.scores.raw.gather(1, after), now.new).tolist(), strict=True):
            row.logprob += more

    def _collect(self) -> None:
        """Remove the rows that have ended, and put their answers into `_finished`."""
        now, session = time.perf_counter(), self._session
        ended = [row for row in _rows(session) if row.done]
        session.retire()
        for row in ended:
            if (prompt := row.prompt) is not None:
                row.prompt, tokens = None, row.tokens[row.start :]
                logprob = row.logprob if self.scored else None
                rest = None, row.stats, logprob, self._cut(prompt, tokens)
                self._finished.append(FinishedPrompt(prompt.ticket, tokens, now - prompt.begun, *rest))
        self.stats.add(session.stats)
        self._handle.add_stats(session.stats)
        session.stats = Stats(lossless=session.rule.lossless)

    def _admit(self, group: list[QueuedPrompt]) -> bool:
        """Prefill prompts and let their rows join; False: rows have to end before others can join."""
        try:
            guest = self._open(group)
        except Exception as error:  # whatever the input causes, only this prompt fails, not the run
            if out_of_memory(error):
                self._again(group, error)
                return False
            if len(group) == 1:
                self._fail(group[0], error)
                return True
            admitted = [self._admit([one]) for one in group]
            return all(admitted)
        try:
            if guest is not None:
                self._session.admit(guest)
        except Exception as error:  # the state may be inconsistent
            self._interrupted(group, error)
            return False
        return not self._draining

    def _shared(self, prompt: QueuedPrompt) -> Request | None:
        """The request of a running row with the same settings; rows with one request are processed together."""

        def processing(one: QueuedPrompt) -> dict[str, Any]:
            return {name: value for name, value in one.settings.items() if name != "max_new_tokens"}

        own, others = processing(prompt), ((row.request, row.prompt) for row in _rows(self._session))
        return next((request for request, one in others if one is not None and alike(processing(one), own)), None)

    def _interrupted(self, group: list[QueuedPrompt], error: Exception) -> None:
        """After an error in the shared state: start all rows and the group again from their prompts, together if the
        error is that of one row, which has failed."""
        row = getattr(error, "row", None)
        failed = next((one.prompt for one in _rows(self._session) if one is row), None)
        prompts = [one for one in dict.fromkeys([*self.running, *group]) if one is not failed]
        self._restart()
        if failed is None:
            self._again(prompts, error)
        else:
            self._waiting = [*prompts, *self._waiting]
            self._fail(failed, error)

    def _open(self, group: list[QueuedPrompt]) -> Session | None:
        """A session of these prompts after their prefill; None: the stock path has answered, or they have to wait."""
        model, patch = self.model, self._handle
        drafter = patch.proposer if self._session.rows else patch.fitted_proposer(model)
        call: Call = self._generate(group, custom_generate=as_call)
        why = obstacle(model, call, patch)
        if why is not None and len(group) > 1:  # `_admit` then tries each prompt alone
            raise UnsupportedError(why.reason)
        if why is not None:
            self._answer(group)
            return None
        call = call.for_model(model)
        request, rule = requested(patch, call, self.scored)
        kind = rule, call.guidance, request.sample if rule.greedy is not None else None
        self._kind = self._kind if self._session.rows else kind
        if kind != self._kind:
            self._draining, self._waiting = True, [*group, *self._waiting]
            for one in group:
                one.begun = 0.0
            return None
        ends, private = Endings(call.stopping_criteria, 1, call.input_ids.device), request.processors.private
        self._together = not (private or call.guidance) and call.generation_config.max_new_tokens is not None
        if not self._together and len(group) > 1:
            raise UnsupportedError("these settings work for one prompt at a time")
        request = (None if private else self._shared(group[0])) or request
        most, rows = ends.limit - call.input_ids.shape[1], list[Row]()
        for one in group:  # a row's tokens are its own, without padding
            tokens = one.inputs["input_ids"][0].tolist()
            limit, stop = len(tokens) + most, ends.of(0)
            row = _PromptRow(
                tokens, len(tokens), limit, one.seed, ends.eos, stop, rule=rule, request=request, prompt=one
            )
            rows.append(row)
        drafter = forced.with_forced(drafter, rows)
        self._target = patch.family.target(model, drafter.features, call.guidance)  # hooks may have been added since
        guest, first = start(self._target, drafter, rows, call)
        self._score(guest, first)
        return guest


def _rows(session: Session) -> list[_PromptRow]:
    return cast(list[_PromptRow], session.rows)
