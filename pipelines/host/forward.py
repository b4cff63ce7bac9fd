"""Runs the forwards of stock's decoding loop, records their features, and passes context to the model's modules.

The context is in one context variable, so that several threads may run the same model.
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

Decode = Callable[..., ModelOutput]  # its arguments are the decoder's own forward, then that forward's arguments


@dataclass
class Read:
    """What was recorded in one forward."""

    arguments: dict[str, Any] = field(default_factory=dict)  # the decoder's keyword arguments
    final: Tensor = None  # type: ignore[assignment]  # its output features [B·S, N, H]; None until it has run
    layers: dict[int, Tensor] = field(default_factory=dict)  # layer index → its input [B·S, N, H]
    listed: Tensor | None = None  # positions of the tokens to generate, if the model lists them (GLM-Image)

    def features(self, indices: tuple[int, ...]) -> list[Tensor]:
        """The features that a drafter reads, [B·S, N, H] each."""
        return [self.final if i == FINAL else self.layers[i] for i in indices]


@dataclass(frozen=True)
class ForwardContext:
    """The context of a forward for the modules of a model."""

    read: Read | None = None  # is filled by modules with the mixin `Tap`
    decode: Decode | None = None  # is called instead of the decoder
    encode: Decode | None = None  # is called instead of the vision tower
    draft: Any = None  # the draft tree for layers with a recurrent state, a `recurrent.Reading`
    paths: Any = None  # the draft tree as a row for each node, a `by_path.Paths`
    scan: Any = None  # calls the scans of recurrent layers: a function of the scan and its arguments
    attention: str | None = None  # the implementation for attention modules, instead of the one in their config


_forward: ContextVar[ForwardContext] = ContextVar("mmspec_forward", default=ForwardContext())  # noqa: B039 it is frozen
now = _forward.get


@contextmanager
def during(**context: Any) -> Iterator[ForwardContext]:
    """A context in which these fields of the ForwardContext are set."""
    token = _forward.set(changed := replace(now(), **context))
    try:
        yield changed
    finally:
        _forward.reset(token)


@contextmanager
def reading(decode: Decode | None = None) -> Iterator[Read]:
    """A context in which a forward fills the Read."""
    with during(read=(read := Read()), decode=decode):
        yield read


class TowerTap:
    """Mixin for a vision tower, whose forward `ForwardContext.encode` replaces."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        encode, run = now().encode, partial(stock_class(type(self)).__call__, self)
        return run(*args, **kwargs) if encode is None else encode(run, *args, **kwargs)


class Tap:
    """Mixin for a module that is recorded: the decoder (`_mmspec_layer` is None), or one of its layers."""

    _mmspec_layer: int | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context, run = now(), partial(stock_class(type(self)).__call__, self)
        read = context.read
        if read is None:  # no call of ours, which would hold this class: another thread may put the stock one back
            return run(*args, **kwargs)
        if (layer := self._mmspec_layer) is not None:
            read.layers[layer] = args[0] if args else kwargs["hidden_states"]
            return run(*args, **kwargs)
        output = run(*args, **kwargs) if context.decode is None else context.decode(run, *args, **kwargs)
        final = getattr(output, FEATURES, None)
        read.arguments, read.final = kwargs, output[0] if final is None else final
        return output


def prefill(
    model: GenerativeModel, call: Call, slots: Cache, decode: Decode | None = None, every: bool = False
) -> tuple[Read, ModelOutput, dict[str, Any]]:
    """Run the model's own prefill of a call's prompt, in one piece, into `slots`.

    Args:
        decode: see ForwardContext.
        every: make the decoder return the features of all tokens, even if its layers share keys.

    Returns:
        What was recorded, the model's output, and the arguments of the next step.
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
    """Pop the position ids from a step's arguments, where the next one is last; None if the model's step drops them."""
    step = model.prepare_inputs_for_generation(ids[:, -1:], next_sequence_length=1, **arguments)
    positions = arguments.pop("position_ids", None)
    return None if step.get("position_ids") is None else positions


def split(arguments: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a step's arguments into the types of the last token [B, 1], and the other arguments for drafts."""
    types = {name: t[:, -1:] for name in TYPES if (t := arguments.get(name)) is not None}
    dropped = {CACHE, *PICTURES, *types}
    return types, {name: value for name, value in arguments.items() if name not in dropped} | {"attention_mask": None}


def step(
    model: GenerativeModel, arguments: dict[str, Any], types: dict[str, Tensor], slots: Cache, ids: Tensor,
    places: Tensor, mask: Mask,
) -> ModelOutput:  # fmt: skip
    """Run the model's own decoding step over nodes [B, N] at positions `places`, with mmspec's mask.

    Raises:
        RuntimeError: the model's own class prepares only the last token for it.
    """
    expanded = {name: t.expand(-1, ids.shape[1], *t.shape[2:]) for name, t in types.items()}
    arguments = {**arguments, CACHE: slots, "position_ids": places, **expanded}
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=ids.shape[1], **arguments)
    given = inputs.get("input_ids")
    if given is not None and given.shape[1] != ids.shape[1]:
        raise RuntimeError(
            f"the model's prepare_inputs_for_generation returned {given.shape[1]} of the {ids.shape[1]} tokens of a "
            "draft; it has to return as many as next_sequence_length says. Or call mmspec.disable(model)"
        )
    inputs["attention_mask"] = mask
    if inputs.get("position_ids") is None:  # GLM-Image drops them, and would then read a draft as a prompt
        inputs["position_ids"] = places
    if LOGITS in inputs:
        inputs[LOGITS] = 0
    return model(**inputs, return_dict=True)


def plain(model: GenerativeModel, ids: Tensor, mask: Tensor, slots: Cache) -> tuple[Read, ModelOutput]:
    """Run a forward over a text prompt [B, L], into `slots`; returns what was recorded, and the model's output."""
    with reading() as read:
        out = model(ids, attention_mask=mask, use_cache=True, return_dict=True, **{CACHE: slots})
    return read, out


def cacheless(model: GenerativeModel, ids: Tensor, valid: Tensor, arguments: dict[str, Tensor]) -> Read:
    """What is recorded in a forward over whole texts [B, L] without a KV cache."""
    with reading() as read:
        model(input_ids=ids, attention_mask=valid.long(), use_cache=False, **{LOGITS: 1}, **arguments)
    return read
