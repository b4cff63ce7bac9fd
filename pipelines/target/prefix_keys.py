"""Keys of prompt tokens for the prefix cache, and which calls do not use it.

The key of a token has its id, its position and types, a hash of its row's images if it is an image placeholder, and a
hash of all other inputs of the forward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import keystr, tree_flatten_with_path

from mmspec.compile.version import version
from mmspec.modes import ambient
from mmspec.pipelines.host.call import ENCODED, ONCE, PICTURES, TYPES, Call
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.names import CACHE
from mmspec.pipelines.host.vision import by_row, encoded, media

LEAST = 8  # the minimum length of a shared prefix; with less, the whole prompt is read
# arguments that are compared token by token, or that do not change what a forward computes for a token
ASIDE = {"attention_mask", "position_ids", CACHE, *ONCE, *TYPES}
# columns of a key: the id, two for the images, two for the call, the types, and from here on the positions
POSITIONS = 5 + len(TYPES)


@dataclass(frozen=True)
class Text:
    """A row's prompt, L tokens without padding, and where it may be resumed."""

    row: int  # its index in the call
    pad: int  # the number of padding slots before it in the call
    key: Tensor  # int64 [L, C], see above
    onward: Tensor  # int64 [C], the key of the token after it; from there positions increase by one, the others stay
    free: Tensor  # bool [L + 1], whether a prefix of so many tokens ends before all of its images or after them
    behind: int  # the number of tokens up to the end of its last image
    media: Mapping[str, Tensor]  # the inputs for this row's images, as the forward takes them
    age: int  # of the store
    cuts: Tensor | None = None  # see Segment; set after the prompt was read

    @property
    def allowed(self) -> Tensor:
        """bool [L + 1], whether reading may start after so many tokens: at least `LEAST`, with at least one left."""
        place = torch.arange(len(self.free), device=self.free.device)
        return self.free & (place >= LEAST) & (place < len(self.key))

    def grown(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Key and cuts of the prompt followed by these tokens."""
        assert self.cuts is not None
        more = self.onward.repeat(len(tokens), 1)
        more[:, 0] = more.new_tensor(tokens)
        more[:, POSITIONS:] += torch.arange(len(tokens), device=more.device)[:, None]
        return torch.cat([self.key, more]), pad(self.cuts, (0, len(tokens)), value=True)


# Why a call does not use the prefix cache. The first reason that applies is counted in the stats.
_WHOLE: tuple[tuple[Callable[[Any, Call], object], str], ...] = (
    (lambda t, c: t.streams > 1, "guided calls read two prompts for each row"),
    (lambda t, c: t.stateful, "its layers keep more than keys, values and recurrent states"),
    (lambda t, c: t.apart, "its layers read prompts otherwise than answers"),
    (lambda t, c: c.filled or c.owned, "the cache is the caller's own"),
    (lambda t, c: c.arguments.get("inputs_embeds") is not None, "the prompt is given as embeddings"),
    (lambda t, c: not _placed(c), "its positions are left to the model"),
    (lambda t, c: c.arguments.get(ENCODED), "its pictures were encoded before the prefill"),
    (lambda t, c: _unknown(t.model, c), "it has inputs that are neither text nor pictures"),
    (lambda t, c: _no_tensors(t.model, c), "its vision tower is given more than tensors"),
    (lambda t, c: _holes(c), "its attention mask has holes, or padding at its end"),
    (lambda t, c: len(c.input_ids) == 1 and c.returns_cache and _padding(c)[0], "the cache is returned with padding"),
)


def texts(target: Any, call: Call) -> tuple[list[Text], str | None]:
    """The rows' prompts, or the reason why they are read whole."""
    why = next((why for holds, why in _WHOLE if holds(target, call)), None)
    model, ids, arguments = target.model, call.input_ids, call.arguments
    now = version(model)
    why = why or now.why or (None if now.counted else "torch does not count writes to weights made in inference mode")
    if why is not None:
        return [], why
    world = (now, ambient(), target.features)
    age, B, tower = target.prefixes.read_by(world), len(ids), encoded(model)
    visual, pads = media(ids, model.config, arguments).cpu(), _padding(call)
    pictures = {name: v for name, v in arguments.items() if name in tower and isinstance(v, Tensor)}
    own = by_row(pictures, ids, model.config)
    if own is None or any(bool(one) != bool(seen.any()) for one, seen in zip(own, visual, strict=True)):
        return [], "it is unknown which pictures belong to which row and tokens"
    places = arguments["position_ids"]
    shown = visual.new_tensor([_digest(one) for one in own])[:, None] * (visual > 0)[..., None]
    others = _digest({name: v for name, v in arguments.items() if name not in tower | ASIDE})
    types = [arguments.get(name) for name in TYPES]
    columns = [ids, *(torch.full_like(ids, -1) if t is None else t for t in types)]
    columns += [places] if places.dim() == 2 else [*places]
    token, *more = torch.stack([c.expand_as(ids).to(ids) for c in columns], -1).cpu().split([1, len(columns) - 1], -1)
    key = torch.cat([token, shown, visual.new_tensor(others).expand(*ids.shape, 2), *more], -1)
    return [_text(key[b], visual[b], pads[b], own[b], age, b) for b in range(B)], None


def _text(key: Tensor, visual: Tensor, padding: int, pictures: Mapping[str, Tensor], age: int, row: int) -> Text:
    key, seen = key[padding:], visual[padding:].nonzero()[:, 0]
    place, L = torch.arange(len(key) + 1, device=key.device), len(key)
    first, behind = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (L, 0)
    free = (place <= first) | (place >= behind)
    onward = key[-1].clone()
    onward[POSITIONS:] += 1
    return Text(row, padding, key, onward, free, behind, pictures, age)


def _digest(values: Mapping[str, object]) -> list[int]:
    """A hash as two 64-bit numbers; equal for values that are equal byte by byte."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(values):
        value = values[name]
        for path, part in tree_flatten_with_path(value)[0]:  # the repr of a list omits most of a large tensor
            if isinstance(part, Tensor):
                digest.update(f"{name}{keystr(path)} {part.dtype} {tuple(part.shape)} ".encode())
                digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
            else:
                digest.update(f"{name}{keystr(path)} {part!r} ".encode())
    both = digest.digest()
    return [int.from_bytes(part, "little", signed=True) for part in (both[:8], both[8:])]


def _placed(call: Call) -> bool:
    """Whether the call has position ids for each of its tokens."""
    places = call.arguments.get("position_ids")
    return isinstance(places, Tensor) and places.shape[-2:] == call.input_ids.shape


def _unknown(model: GenerativeModel, call: Call) -> bool:
    """Whether the prefill has inputs that are neither text nor for the vision tower only."""
    known = encoded(model) | {ENCODED}
    types = [call.arguments.get(name) for name in TYPES]
    wide = any(t is not None and t.shape != call.input_ids.shape for t in types)
    return wide or any(call.arguments.get(name) is not None for name in PICTURES if name not in known)


def _no_tensors(model: GenerativeModel, call: Call) -> bool:
    """Whether the vision tower gets lists, settings or other arguments than tensors, which the keys do not cover."""
    values = [call.arguments.get(name) for name in encoded(model)]
    return any(value is not None and not isinstance(value, Tensor) for value in values)


def _padding(call: Call) -> list[int]:
    """The number of padding slots before each row."""
    mask = call.arguments.get("attention_mask")
    return [0] * len(call.input_ids) if mask is None else (mask.cumsum(1) == 0).sum(1).tolist()


def _holes(call: Call) -> bool:
    """Whether the mask hides anything but padding before a row, or does not fit the ids."""
    mask = call.arguments.get("attention_mask")
    if mask is None:
        return False
    return mask.shape != call.input_ids.shape or bool((mask.bool() != (mask.cumsum(1) > 0)).any())
