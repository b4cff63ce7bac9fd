"""The facts of one model: read off its modules and configs once, and kept as long as its version stays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from mmspec.compile.version import Version, version
from mmspec.modes import Mode, each_module
from mmspec.pipelines.host import quantized, reach, recurrent, renamed
from mmspec.pipelines.host.decoder import decoder, embedding, head, more_than_states, readers
from mmspec.pipelines.host.exotic import ties
from mmspec.pipelines.host.hooks import Taps
from mmspec.pipelines.host.modes import mode_of

_KNOWN: WeakKeyDictionary[Any, tuple[Version, HostModel]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class HostModel:
    """What a decoder and its layers are.

    Attributes:
        decoder: the module with the text's layers.
        head: what gives logits.
        embedding: what embeds token ids.
        attention: the implementation that the decoder's config names.
        instead: the one that reads drafts in its place; None: it reads them itself.
        unfit: why neither reads a tree; None: one does.
        kinds: the type of each layer, where the config lists them.
        window: places that layers with a sliding window see.
        slides: whether all layers have that window, where the config lists no types.
        chunk: places of a chunk, of layers that see one.
        crossed: numbers of the layers that look at a picture alone.
        shares: whether layers share keys and values.
        table: see `reach.table`.
        turn: see `reach.turn`.
        recurrent: whether layers keep a recurrent or convolutional state.
        stateful: whether layers keep more than keys, values and such states.
        cacheless: whether gradient checkpointing in training mode takes the cache away from layers.
        readers: see `decoder.readers`.
        shared_scale: see `quantized.shared_scale`.
        mode: that its rounds run under.
        taps: those that were made of it, by the features that they read; see tapping.py.
    """

    decoder: Any
    head: Any
    embedding: Any
    attention: str
    instead: str | None
    unfit: str | None
    kinds: tuple[str, ...]
    window: int | None
    slides: bool
    chunk: int | None
    crossed: tuple[int, ...]
    shares: bool
    table: int | None
    turn: int | None
    recurrent: bool
    stateful: bool
    cacheless: bool
    readers: list[tuple[Any, type]]
    shared_scale: str | None
    mode: Mode
    taps: dict[tuple[int, ...], Taps] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any) -> HostModel:
        """The facts of a model as it is now."""
        kept, now = _KNOWN.get(model), version(model)
        if kept is None or kept[0] != now or not kept[1]._is_of(model):
            kept = _KNOWN[model] = now, cls._read(model)
        return kept[1]

    @classmethod
    def _read(cls, model: Any) -> HostModel:
        text = decoder(model)
        config = text.config
        return cls(
            decoder=text,
            head=head(model),
            embedding=embedding(model),
            attention=config._attn_implementation,
            instead=renamed.for_drafts(text),
            unfit=renamed.unfit(text),
            kinds=tuple(getattr(config, "layer_types", None) or ()),
            window=getattr(config, "sliding_window", None),
            slides=bool(getattr(config, "use_sliding_window", True)),
            chunk=getattr(config, "attention_chunk_size", None),
            crossed=tuple(getattr(config, "cross_attention_layers", None) or ()),
            shares=bool(getattr(config, "num_kv_shared_layers", 0)),
            table=reach.table(text),
            turn=reach.turn(text),
            recurrent=bool(recurrent.modules(text)),
            stateful=more_than_states(text),
            cacheless=any(map(_checkpoints, each_module(model.get_decoder()))),
            readers=readers(text),
            shared_scale=quantized.shared_scale(model),
            mode=mode_of(model),
        )

    def _is_of(self, model: Any) -> bool:
        """Whether these are its own modules, and no copies with the same weights."""
        own = (decoder(model), head(model), embedding(model))
        return all(a is b for a, b in zip(own, (self.decoder, self.head, self.embedding), strict=True))

    @property
    def only_keys(self) -> bool:
        """Whether its layers keep nothing but the text's keys and values."""
        return not (self.stateful or self.recurrent)

    @property
    def flash(self) -> bool:
        """Whether FlashAttention, which takes no mask, reads what `instead` does not."""
        return self.instead is not None and "flash" in self.attention

    def tied(self, mask: Tensor | None) -> str | None:
        """Why padding under this mask [B, L] makes an indexer choose otherwise; None: it does not."""
        return None if mask is None else ties.why(self.decoder.config, mask)


def _checkpoints(module: Any) -> bool:
    own = vars(module)
    return bool(own.get("gradient_checkpointing") and own.get("training", True))
