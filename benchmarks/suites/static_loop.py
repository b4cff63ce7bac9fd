"""A fast plain decoding loop for LlamaGen with fixed shapes, optionally compiled: a baseline of the image suite."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mmspec.app.bench.image import ImageBench
from mmspec.app.compare import Method
from mmspec.models.llamagen import PREFIX, LlamaGenTransformer, visible
from mmspec.pipelines.host.hooks import restore, swap
from mmspec.pipelines.host.processors.guidance import Guidance
from mmspec.pipelines.host.processors.table import Processors, warpers
from mmspec.pipelines.llamagen.pipeline import LlamaGenPipeline
from mmspec.pipelines.target.llamagen import Condition, LlamaGenTarget
from mmspec.pipelines.target.model import Request
from mmspec.pipelines.target.noise import CounterNoise
from mmspec.pipelines.target.state import each_stream
from mmspec.session import Row, Session
from mmspec.tree import lone


class StaticPast:
    """A static KV cache: keys and values of all positions, allocated once; a forward writes at the positions `at`."""

    def __init__(self, model: LlamaGenTransformer, rows: int, places: int) -> None:
        c = model.config
        shape = (rows, c.kv_heads or c.heads, places, c.dim // c.heads)
        zeros = torch.zeros(shape, device=model.device, dtype=model.dtype)
        self.keys, self.values = ([zeros.clone() for _ in range(c.num_layers)] for _ in range(2))
        self.at = torch.zeros(1, dtype=torch.long, device=model.device)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys.index_copy_(2, self.at, key_states)
        values.index_copy_(2, self.at, value_states)
        return keys, values


class StaticLoop:
    """Mixin for a LlamaGenPipeline that replaces only its decoding loop, with a plain loop of fixed shapes."""

    transformer: LlamaGenTransformer
    _mmspec_static: dict[tuple[int, int], StaticPast]
    _mmspec_step: Callable[..., Tensor]

    def _rounds(
        self, rows: list[Row], condition: Condition, guidance: Guidance | None, how: dict[str, Any]
    ) -> Iterator[Session]:
        """Decode, and yield the session once at the end; its stats have the time of prefill and of steps."""
        (B, P), model, valid = condition.valid.shape, self.transformer, condition.valid
        target, count, device = LlamaGenTarget(model, (), guidance), rows[0].limit, valid.device
        S = target.streams
        request = Request(Processors(warpers(how)), how["temperature"] > 0, CounterNoise())
        session: Any = Session(list(rows), device)  # also serves as the Group of all its rows
        root = lone(torch.zeros(B, 1, dtype=torch.long, device=device))
        began = time.perf_counter()
        if (S, B) not in self._mmspec_static:
            self._mmspec_static[S, B] = StaticPast(model, S * B, P + count)
        past = self._mmspec_static[S, B]
        embeds = target.prefix(condition.what)
        open_slots = each_stream(torch.cat([valid, valid.new_zeros(B, count)], 1), S)  # [B·S, T]
        past.at = torch.arange(P, device=device)
        hidden = model(embeds, torch.full((S * B, P), PREFIX, device=device), visible(open_slots, P), past)
        logits = target.guided(model.head(hidden[:, -1:]), torch.zeros(B, 1, dtype=torch.long, device=device))
        drawn: list[Any] = [request.scores(logits, logits, session, root, None).p.ids]
        session.stats.seconds["prefill"] = time.perf_counter() - began
        began = time.perf_counter()
        for n in range(1, count):
            open_slots[:, P + n - 1] = True
            past.at = torch.full((1,), P + n - 1, device=device)
            place = torch.full((B, 1), n - 1, device=device)
            logits = self._mmspec_step(model, guidance, past, drawn[-1], place, open_slots[:, None])
            session.emitted = session.emitted + 1
            drawn.append(request.scores(logits, logits, session, root, None).p.ids)
        for row, line in zip(rows, torch.cat(drawn, 1).tolist(), strict=True):
            row.take(line)
        stats = session.stats
        stats.seconds["verify"] = time.perf_counter() - began
        stats.rounds, stats.tokens = count - 1, count * B
        stats.row_rounds = stats.gained = (count - 1) * B
        yield session


def _step(
    model: LlamaGenTransformer, guidance: Guidance | None, past: StaticPast, ids: Tensor, place: Tensor, seen: Tensor
) -> Tensor:
    """Guided logits [B, 1, V] after one more token per row."""
    streams = 1 if guidance is None else 2
    hidden = model(each_stream(model.tok_embeddings(ids), streams), each_stream(place, streams), seen, past)
    raw = model.head(hidden)
    return raw if guidance is None else guidance(raw, place + 1)


def begin(pipe: LlamaGenPipeline, compiled: bool) -> None:
    """Switch the pipeline to the plain loop with fixed shapes; if `compiled`, the first calls are slow."""
    step = _step
    if compiled:
        mode = "reduce-overhead" if pipe.transformer.device.type == "cuda" else None
        step = torch.compile(_step, dynamic=False, fullgraph=True, mode=mode)
    swap(pipe, StaticLoop, _mmspec_static={}, _mmspec_step=staticmethod(step))


def end(pipe: object) -> None:
    """Undo `begin`; does nothing if it was not called."""
    if isinstance(pipe, StaticLoop):
        restore(pipe)


class StaticBench(ImageBench):
    """Also times LlamaGen's plain paths with fixed shapes; `plain` in a method's arguments names one."""

    def go(self, method: Method) -> None:
        end(self.painter.pipe)
        super().go(method)
        if plain := method.arguments.get("plain"):
            begin(self.painter.pipe, compiled=plain == "compiled")
