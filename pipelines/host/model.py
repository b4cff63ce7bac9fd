"""The facts of one model: read off its modules and configs once, and kept as long as its version stays."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from mmspec.compile.version import Version, version
from mmspec.modes import Mode, each_module
from mmspec.pipelines.host import quantized, reach, recurrent, renamed
from mmspec.pipelines.host.decoder import decoder, embedding, head, more_than_states, readers
from mmspec.pipelines.host.exotic import ties
from mmspec.pipelines.host.hooks import Taps
from mmspec.pipelines.host.kinds import GenerativeModel, TextDecoder, Weighted
from mmspec.pipelines.host.modes import mode_of

_KNOWN: WeakKeyDictionary[GenerativeModel, tuple[Version, HostModel]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class HostModel:
    """What a decoder and its layers are."""

    decoder: TextDecoder
    head: Weighted | None
    embedding: Weighted
    attention: str  # the implementation that the decoder's config names
    instead: str | None  # the one that reads drafts in its place; None: it reads them itself
    unfit: str | None  # why neither reads a tree; None: one does
    kinds: tuple[str, ...]  # the type of each layer, where the config lists them
    window: int | None  # places that layers with a sliding window see
    slides: bool  # whether all layers have that window, where the config lists no types
    chunk: int | None  # places of a chunk, of layers that see one
    crossed: tuple[int, ...]  # numbers of the layers that look at a picture alone
    shares: bool  # whether layers share keys and values
    table: int | None  # see `reach.table`
    turn: int | None  # see `reach.turn`
    recurrent: bool  # whether layers keep a recurrent or convolutional state
    stateful: bool  # whether layers keep more than keys, values and such states
    cacheless: bool  # whether gradient checkpointing in training mode takes the cache away from layers
    readers: list[tuple[nn.Module, type]]  # see `decoder.readers`
    shared_scale: str | None  # see `quantized.shared_scale`
    mode: Mode  # that its rounds run under
    taps: dict[tuple[int, ...], Taps] = field(default_factory=dict)  # by the features that they read; see tapping.py

    @classmethod
    def of(cls, model: GenerativeModel) -> HostModel:
        """The facts of a model as it is now."""
        kept, now = _KNOWN.get(model), version(model)
        if kept is None or kept[0] != now or not kept[1]._is_of(model):
            kept = _KNOWN[model] = now, cls._read(model)
        return kept[1]

    @classmethod
    def _read(cls, model: GenerativeModel) -> HostModel:
        text = decoder(model)
        config = text.config
        return cls(
            decoder=text, head=head(model), embedding=embedding(model), attention=config._attn_implementation,
            instead=renamed.for_drafts(text), unfit=renamed.unfit(text),
            kinds=tuple(getattr(config, "layer_types", None) or ()), window=getattr(config, "sliding_window", None),
            slides=bool(getattr(config, "use_sliding_window", True)),
            chunk=getattr(config, "attention_chunk_size", None),
            crossed=tuple(getattr(config, "cross_attention_layers", None) or ()),
            shares=bool(getattr(config, "num_kv_shared_layers", 0)), table=reach.table(text), turn=reach.turn(text),
            recurrent=bool(recurrent.modules(text)), stateful=more_than_states(text),
            cacheless=any(map(_checkpoints, each_module(model.get_decoder()))), readers=readers(text),
            shared_scale=quantized.shared_scale(model), mode=mode_of(model),
        )  # fmt: skip

    def _is_of(self, model: GenerativeModel) -> bool:
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


def _checkpoints(module: nn.Module) -> bool:
    own = vars(module)
    return bool(own.get("gradient_checkpointing") and own.get("training", True))
