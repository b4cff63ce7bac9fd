"""The forwards that stock's loop makes, what is read off them, and what the model's modules have to know meanwhile.

What modules have to know is kept in one context variable, so that several threads may run the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from mmspec.modes import stock_class
from mmspec.pipelines.host.call import PICTURES, TYPES, Call
from mmspec.pipelines.host.kinds import Cache, GenerativeModel, Mask, ModelOutput
from mmspec.pipelines.host.names import CACHE, FEATURES, LOGITS
from mmspec.types import FINAL

Decode = Callable[..., ModelOutput]  # is given the decoder's own call, and what it was called with


@dataclass
class Read:
    """What one forward gave."""

    arguments: dict[str, Any] = field(default_factory=dict)  # what the decoder was called with, by name
    final: Tensor = None  # type: ignore[assignment]  # its output features [B·S, N, H]; None until it has run
    layers: dict[int, Tensor] = field(default_factory=dict)  # what entered a layer, by its number, [B·S, N, H]
    listed: Tensor | None = None  # positions of the tokens to come, where the model lists them itself (GLM-Image)

    def features(self, wanted: tuple[int, ...]) -> list[Tensor]:
        """The features that a drafter reads, [B·S, N, H] each."""
        return [self.final if i == FINAL else self.layers[i] for i in wanted]


@dataclass(frozen=True)
class ForwardContext:
    """What the modules of a model have to know in a forward."""

    read: Read | None = None  # is filled by the modules that are tapped
    decode: Decode | None = None  # is called in the place of the decoder
    draft: Any = None  # the tree that layers with a recurrent state read, a `recurrent.Reading`
    paths: Any = None  # the same as a row for each node, `by_path.Paths`
    attention: str | None = None  # that attention modules use, in place of the one that their config names


_forward: ContextVar[ForwardContext] = ContextVar("mmspec_forward", default=ForwardContext())  # noqa: B039 it is frozen
now = _forward.get


@contextmanager
def during(**context: Any) -> Iterator[ForwardContext]:
    """Within, modules know this as well."""
    token = _forward.set(made := replace(now(), **context))
    try:
        yield made
    finally:
        _forward.reset(token)


@contextmanager
def reading(decode: Decode | None = None) -> Iterator[Read]:
    """Within, a forward fills the Read."""
    with during(read=(read := Read()), decode=decode):
        yield read


class Tap:
    """Mixin of a module that is read: the decoder (`_mmspec_layer` is None), or one of its layers."""

    _mmspec_layer: int | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        under_way, run = now(), partial(stock_class(type(self)).__call__, self)
        read, layer = under_way.read, self._mmspec_layer
        if read is None:
            return run(*args, **kwargs)
        if layer is not None:
            read.layers[layer] = args[0] if args else kwargs["hidden_states"]
            return run(*args, **kwargs)
        output = run(*args, **kwargs) if under_way.decode is None else under_way.decode(run, *args, **kwargs)
        final = getattr(output, FEATURES, None)
        read.arguments, read.final = kwargs, output[0] if final is None else final
        return output


def prefill(
    model: GenerativeModel, call: Call, slots: Cache, decode: Decode | None = None, every: bool = False
) -> tuple[Read, ModelOutput, dict[str, Any]]:
    """The model's own prefill of a call's prompt, in one piece, into `slots`.

    Args:
        decode: see `reading`.
        every: the decoder is to give the features of all tokens, though layers share keys.

    Returns:
        What was read off it, its output, and the arguments of the next step.
    """
    ids, config, arguments = call.input_ids, call.generation_config, {**call.arguments, CACHE: slots}
    if every and LOGITS in arguments:  # a number would make the decoder drop all other features
        arguments[LOGITS] = ids.new_full((1,), -1)
    config.prefill_chunk_size, chunk = None, config.prefill_chunk_size
    try:
        with reading(decode) as read:
            out = model._prefill(ids, config, arguments, is_first_iteration=True)
    finally:
        config.prefill_chunk_size = chunk
    return read, out, model._update_model_kwargs_for_generation(out, arguments, is_encoder_decoder=False)


def next_positions(model: GenerativeModel, ids: Tensor, arguments: dict[str, Any]) -> Tensor | None:
    """Take the position ids from a step's arguments, the next one at their end; None where the step drops them."""
    step = model.prepare_inputs_for_generation(ids[:, -1:], next_sequence_length=1, **arguments)
    positions = arguments.pop("position_ids", None)
    return None if step.get("position_ids") is None else positions


def split(arguments: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Of a step's arguments the types of the last token [B, 1], and what a draft's forward is given besides."""
    types = {name: t[:, -1:] for name in TYPES if (t := arguments.get(name)) is not None}
    aside = {CACHE, *PICTURES, *types}
    return types, {name: value for name, value in arguments.items() if name not in aside} | {"attention_mask": None}


def step(
    model: GenerativeModel, arguments: dict[str, Any], types: dict[str, Tensor], slots: Cache, ids: Tensor,
    places: Tensor, mask: Mask,
) -> ModelOutput:  # fmt: skip
    """The output of the model's own decoding step over nodes [B, N] at `places`, under a mask of ours."""
    spread = {name: t.expand(-1, ids.shape[1], *t.shape[2:]) for name, t in types.items()}
    arguments = {**arguments, CACHE: slots, "position_ids": places, **spread}
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=ids.shape[1], **arguments)
    inputs["attention_mask"] = mask
    if inputs.get("position_ids") is None:  # GLM-Image drops them, and would take a draft for a prompt
        inputs["position_ids"] = places
    if LOGITS in inputs:
        inputs[LOGITS] = 0
    return model(**inputs, return_dict=True)


def plain(model: GenerativeModel, ids: Tensor, mask: Tensor, slots: Cache) -> tuple[Read, ModelOutput]:
    """A forward over a prompt [B, L] of text, into `slots`: what was read off it, and its output."""
    with reading() as read:
        out = model(ids, attention_mask=mask, use_cache=True, return_dict=True, **{CACHE: slots})
    return read, out


def cacheless(model: GenerativeModel, ids: Tensor, valid: Tensor, arguments: dict[str, Tensor]) -> Read:
    """What is read off a forward over whole texts [B, L], which keeps nothing."""
    with reading() as read:
        model(input_ids=ids, attention_mask=valid.long(), use_cache=False, **{LOGITS: 1}, **arguments)
    return read
