"""Flow: prompts come and go while one session runs; a row that ends makes room for the next prompt at once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.loop import decode
from mmspec.pipelines import guided
from mmspec.pipelines.generate import Call, obstacle, opened
from mmspec.pipelines.intake import Asked, Finished, Intake, out_of_memory
from mmspec.pipelines.processors import Endings, Processors
from mmspec.pipelines.vlm import VlmTarget
from mmspec.rows import select
from mmspec.session import Row, Session, Stats
from mmspec.types import Draft

__all__ = ["Finished", "Flow"]

_PLAIN = (bool, int, float, str, type(None))


@dataclass
class _Guest(Row):
    """A row that knows what it answers, until it has, and its own processors."""

    asked: Asked | None = None
    processors: Processors | None = None


class _EachItsOwn:
    """Processors that may know the length of a prompt: every row is processed by those of its own call."""

    def __call__(self, logits: Tensor, session: Session, draft: Draft) -> Tensor:
        found = []
        for b, row in enumerate(session.rows):
            one = torch.tensor([b], device=logits.device)
            alone = Session([row], None, logits.device, session.rule)
            found.append(row.processors(logits[one], alone, select(draft, one)))  # type: ignore[attr-defined]
        return torch.cat(found)


class Flow(Intake):
    """Continuous batching: `add` prompts, call `step` while it is `busy`, take what each step has finished.

    A row does not depend on its neighbours: its tokens are those of the prompt alone, when sampling those of its seed.
    What fails, fails alone: a round that breaks is done again, every row by itself. Calls that cannot be accelerated
    run as `model.generate` runs them, one by one.
    """

    def __init__(self, model: Any, processor: Any, rows: int, **generation: Any) -> None:
        """As Intake, on an enabled model.

        Raises:
            ValueError: a model that is not enabled, or one that draws torch's own noise.
        """
        super().__init__(model, processor, rows, **generation)
        self._handle: Any = getattr(type(self.model), "_mmspec_handle", None)
        if self._handle is None:
            raise ValueError(f"{type(self.model).__name__} is not enabled; call mmspec.enable(model) first")
        if self._handle.config.reproducible:
            raise ValueError("reproducible=True draws torch's own noise, call by call; here each row has its seed")
        self.stats.lossless = self._handle.rule.lossless
        self._together = False  # whether several prompts may share one prefill; the first one tells
        self._restart()

    def _restart(self) -> None:
        self._target: VlmTarget | None = None
        self._session = Session([], None, self.model.device, self._handle.rule)

    @property
    def running(self) -> list[Asked]:
        return [row.asked for row in self._session.rows if row.asked is not None]  # type: ignore[attr-defined]

    def step(self) -> list[Finished]:
        """Read waiting prompts into free rows, then one round of all rows; returns what has finished."""
        with torch.no_grad():
            if self._waiting:
                self._session.retire()
            while (group := self._take(self._together)) and self._admit(group):
                pass
            self._collect()  # an answer may end with its first token
            if self._session.rows:
                self._round()
                self._collect()
        return self._hand_out()

    def _round(self) -> None:
        assert self._target is not None
        try:
            next(decode(self._session, self._target, self._handle.proposer))
        except Exception as error:  # half of the state may have been written
            self._interrupted([], error)

    def _collect(self) -> None:
        """Hand out the rows that have ended; they are let go before the next round."""
        now, session = time.perf_counter(), self._session
        for row in session.rows:
            if row.done and (asked := row.asked) is not None:  # type: ignore[attr-defined]
                row.asked = None  # type: ignore[attr-defined]
                self._finished.append(Finished(asked.ticket, row.tokens[row.start :], now - asked.begun))
        if not self.running:
            session.retire()
        self.stats.add(session.stats)
        self._handle.book(session.stats)
        session.stats = Stats(lossless=session.rule.lossless)

    def _admit(self, group: list[Asked]) -> bool:
        """Read prompts and let their rows join; false where rows have to end before any other can come."""
        try:
            guest = self._open(group)
        except Exception as error:  # whatever a picture may do to a model: it is that prompt's failure, not the run's
            if out_of_memory(error):
                self._again(group, error)
                return False
            if len(group) == 1:
                self._fail(group[0], error)
                return True
            found = [self._admit([one]) for one in group]
            return all(found)
        try:
            if guest is not None:
                self._session.admit(guest)
        except Exception as error:  # half of the state may have been joined
            self._interrupted(group, error)
            return False
        return True

    def _interrupted(self, group: list[Asked], error: Exception) -> None:
        """Rows are left half written: all of them start again from their prompts, and so does the group."""
        everyone = list(dict.fromkeys([*self.running, *group]))
        self._restart()
        self._again(everyone, error)

    def _open(self, group: list[Asked]) -> Session | None:
        """A session of these prompts after their prefill; None where the stock path has answered."""
        model, drafter = self.model, self._handle.proposer
        call: Call = self._generate(group, custom_generate=_as_call)
        if obstacle(model, call) is not None:
            self._answer(group)
            return None
        guidance, rest = guided.split(call.logits_processor, call.input_ids)
        processors, config = Processors(rest), call.generation_config
        self._together = not (processors.need_history or guidance) and config.max_new_tokens is not None
        target = model._mmspec_target(
            model, drafter.features, processors, bool(config.do_sample), False, None, guidance
        )
        ends = Endings(call.stopping_criteria, 1, call.input_ids.device)
        most = ends.limit - call.input_ids.shape[1]
        rows: list[Row] = []
        for one in group:  # a row's tokens are its own, without padding
            tokens = one.inputs["input_ids"][0].tolist()
            row = _Guest(tokens, len(tokens), len(tokens) + most, one.seed, ends.eos, ends.of(0))
            row.asked, row.processors = one, processors
            rows.append(row)
        guest, _ = opened(target, drafter, call, rows, model._mmspec_rule(call))
        if self._target is None:  # the first prompt's target scores for all; what it holds of that prompt is let go
            target.arguments = {k: v for k, v in target.arguments.items() if isinstance(v, _PLAIN)}
            if processors.need_history:
                target.sampler.process = _EachItsOwn()
            self._target = target
        self._target.inference = target.inference  # hooks may have come since
        return guest


def _as_call(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
    tokenizer: Any = None, **arguments: Any,
) -> Call:  # fmt: skip
    """Stands in for `_sample` at the end of `generate`; that it asks for `tokenizer` keeps `stop_strings` working."""
    return Call(input_ids, logits_processor, stopping_criteria, generation_config, arguments=arguments)
