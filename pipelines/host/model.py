"""The properties of one model, read from its modules and configs once, and cached until its version changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from mmspec.compile.version import Version, structure
from mmspec.modes import Mode, each_module
from mmspec.pipelines.host import reach, recurrent, tree_attention
from mmspec.pipelines.host.call import TYPES
from mmspec.pipelines.host.decoder import (
    decoder,
    embedding,
    head,
    more_than_states,
    readers,
    replaced,
    shared_scale,
    wrapped,
)
from mmspec.pipelines.host.devices import mode_of
from mmspec.pipelines.host.exotic import path_readers
from mmspec.pipelines.host.hooks import Taps
from mmspec.pipelines.host.kinds import GenerativeModel, TextDecoder, Weighted
from mmspec.pipelines.host.names import has

_CACHE: WeakKeyDictionary[GenerativeModel, tuple[Version, HostModel]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class HostModel:
    """The properties of a model's decoder, layers and head."""

    decoder: TextDecoder
    head: Weighted | None
    embedding: Weighted
    attention: str  # the implementation that the decoder's config names
    draft_attention: str | None  # the implementation that reads drafts in its place; None: the decoder's own does
    unfit: str | None  # why its decoder cannot be followed, or neither implementation reads a tree; None: one can
    kinds: tuple[str, ...]  # the type of each layer, if the config lists them
    window: int | None  # positions that layers with a sliding window see
    slides: bool  # if the config lists no layer types: whether all layers have that window
    chunk: int | None  # positions of a chunk, for layers with chunked attention
    crossed: tuple[int, ...]  # indices of the cross-attention layers, which attend only to images
    shares: bool  # whether layers share keys and values
    table: int | None  # see `reach.table`
    rotary_limit: int | None  # see `reach.rotary_limit`
    recurrent: bool  # whether layers keep a recurrent or convolutional state
    stateful: bool  # whether layers keep more than keys, values and such states
    apart: bool  # whether stock reads a token of a prompt otherwise than one of an answer
    both_ways: bool  # whether its masks depend on token types: tokens of an image, or of a prompt, see later ones
    cacheless: bool  # whether gradient checkpointing in training mode takes the cache away from layers
    readers: list[tuple[nn.Module, type]]  # see `decoder.readers`
    shared_scale: str | None  # see `decoder.shared_scale`
    mode: Mode  # inference_mode or no_grad for its rounds
    taps: dict[tuple[int, ...], Taps] = field(default_factory=dict)  # by the features that they record; see tapping.py

    @classmethod
    def of(cls, model: GenerativeModel) -> HostModel:
        """The model's current properties."""
        cached, now = _CACHE.get(model), structure(model)
        if cached is None or cached[0] is not now:  # if it is the same object, so are the modules
            same = cached is not None and cached[0] == now and cached[1]._is_of(model)
            cached = _CACHE[model] = now, cached[1] if cached is not None and same else cls._read(model)
        return cached[1]

    @classmethod
    def _read(cls, model: GenerativeModel) -> HostModel:
        text = decoder(model)
        config, read = text.config, readers(text)
        return cls(
            decoder=text, head=head(model), embedding=embedding(model), attention=config._attn_implementation,
            draft_attention=tree_attention.for_drafts(text),
            unfit=wrapped(model) or replaced(read) or tree_attention.unfit(text),
            kinds=tuple(getattr(config, "layer_types", None) or ()), window=getattr(config, "sliding_window", None),
            slides=bool(getattr(config, "use_sliding_window", True)),
            chunk=getattr(config, "attention_chunk_size", None), table=reach.table(text),
            crossed=tuple(getattr(config, "cross_attention_layers", None) or ()),
            shares=bool(getattr(config, "num_kv_shared_layers", 0)), rotary_limit=reach.rotary_limit(text),
            recurrent=bool(recurrent.modules(text)), stateful=more_than_states(text),
            apart=_apart(text), both_ways=_both_ways(model),
            cacheless=any(map(_checkpoints, each_module(model.get_decoder()))), readers=read,
            shared_scale=shared_scale(model), mode=mode_of(model),
        )  # fmt: skip

    def _is_of(self, model: GenerativeModel) -> bool:
        """Whether these are the model's own modules, not copies with the same weights."""
        own = (decoder(model), head(model), embedding(model))
        return all(a is b for a, b in zip(own, (self.decoder, self.head, self.embedding), strict=True))

    @property
    def only_keys(self) -> bool:
        """Whether its layers keep only the text's keys and values."""
        return not (self.stateful or self.recurrent)

    @property
    def flash(self) -> bool:
        """Whether the model uses FlashAttention, which takes no mask, except where `draft_attention` reads drafts."""
        return self.draft_attention is not None and "flash" in self.attention

    def tied(self, mask: Tensor | None) -> str | None:
        """Why an indexer would choose differently with the padding of this mask [B, L]; None: it would not."""
        return None if mask is None else path_readers.tied(self.decoder.config, mask)


def _apart(text: TextDecoder) -> bool:
    """Whether stock reads a token of a prompt otherwise than one of an answer: a window or a limit is for one alone."""
    config, kinds = text.config, getattr(text.config, "layer_types", None)
    if any(map(recurrent.limited, each_module(text))):
        return True
    if kinds:
        return "reference_sliding_attention" in kinds
    slides = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return bool(slides) and "create_sliding_window_causal_mask" not in recurrent.names(type(text))


def _both_ways(model: GenerativeModel) -> bool:
    makes = getattr(type(model), "create_masks_for_generate", None)
    return makes is not None and any(has(makes, name) for name in TYPES)


def _checkpoints(module: nn.Module) -> bool:
    own = vars(module)
    return bool(own.get("gradient_checkpointing") and own.get("training", True))
