"""Turns a fitted drafter into the Proposer that the loop calls, by the options `compile`, `auto` and `lookup`."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from mmspec.compile.capture_cache import CaptureCache, weights
from mmspec.compile.draft import CapturedDraft
from mmspec.config import SpecConfig
from mmspec.drafters import draft_vocab, frequent, lookup
from mmspec.drafters.dflash import BlockDrafter
from mmspec.drafters.feature import FeatureDrafter
from mmspec.drafters.frequent import FrequentDrafts, FrequentTokens
from mmspec.drafters.growth import Adaptive, TargetHead, by_chain_length, with_head
from mmspec.drafters.heads import HeadsDrafter
from mmspec.drafters.shape import AUTO, Shape, Sizes
from mmspec.pipelines.host import devices
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.model import HostModel
from mmspec.pipelines.target import captures
from mmspec.protocols import Compilable, Drafter, Proposer, Target, TargetInfo
from mmspec.session import Session
from mmspec.switch import RoundCosts, Switch
from mmspec.types import NO_TOKEN, Draft, Prompt

CHECKED = 3  # rounds of a call in which the tokens of a user's own drafter are checked on any device
SWITCHED = True  # whether, by default, drafters without weights are switched off while they save no time
# The switch's measurements, by model and by the drafter's layer (or its class if it has none); they outlive `disable`.
_COSTS: WeakKeyDictionary[object, WeakKeyDictionary[object, dict[Hashable, RoundCosts]]] = WeakKeyDictionary()
_TOKENS: WeakKeyDictionary[object, dict[Hashable, FrequentTokens]] = WeakKeyDictionary()  # by model
# Captures of draft heads, by their first layer, which all fitted copies share.
_HEADS: WeakKeyDictionary[object, CaptureCache] = weakref.WeakKeyDictionary()


def proposer(model: object, drafter: Drafter, config: SpecConfig, target: TargetInfo, drafts: bool = True) -> Proposer:
    """The drafter, with `compile` captured, with `lookup` wrapped in Lookup, drafting from the frequent tokens of a
    large vocabulary, and with `auto` behind a switch.

    Args:
        drafts: whether `compile` captures the drafter's own forward as well.

    Raises:
        ValueError: `auto` where processes share the model's weights; `lookup` without a trained or a model drafter.
    """
    if config.auto and devices.shared(model):
        raise ValueError(
            "auto measures its rounds in each process separately, but processes that share this model's weights have "
            "to run the same rounds; leave auto out, and choose depth, width and size"
        )
    compile = config.compile if drafts or isinstance(drafter, HeadsDrafter) else False
    options = getattr(drafter, "options", None)
    if config.lookup and (not isinstance(options, Shape) or isinstance(options, Sizes) or target.ends is None):
        raise ValueError(
            "lookup=True works with a trained drafter or a smaller model that drafts text; this is "
            f"{type(drafter).__name__}, so leave lookup out"
        )
    depths = {getattr(options, "depth", 0), *([lookup.LENGTH] if config.lookup else [])}  # the possible draft lengths

    def built(drafter: Drafter) -> Proposer:
        if adaptive := getattr(options, "adaptive", False):
            each = {n: _captured(model, one, compile, target, depths) for n, one in by_chain_length(drafter).items()}
            ready: Proposer = Adaptive(each)
        else:
            ready = _captured(model, drafter, compile, target, depths)
        if not config.lookup:
            return ready
        brief = ready if adaptive else _captured(model, lookup.brief(drafter), compile, target, depths)
        return lookup.Lookup(ready, brief)

    ready = built(drafter)
    if (tokens := _frequent(model, drafter, target)) is not None:
        ready = FrequentDrafts(ready, built(with_head(drafter, TargetHead(tokens.vocab))), tokens)
    auto = config.auto if config.auto is not None else drafts and _switchable(model, drafter, config)
    if auto and drafter.nodes > 1:
        ready = Switch(ready, _costs(model, drafter, config, target))
    own = type(drafter).__module__.startswith("mmspec.")
    return ready if own else CheckedDrafts(ready, type(drafter).__name__, target.vocab)


def switches(proposer: Proposer) -> bool:
    """Whether it turns drafting off by itself where that does not pay."""
    return isinstance(proposer.drafter if isinstance(proposer, CheckedDrafts) else proposer, Switch)


def shares(proposer: Proposer) -> bool:
    """Whether its drafts depend on other rows and calls, and a row's noise has to be fixed before they are made."""
    while isinstance(proposer, CheckedDrafts | Switch):
        proposer = proposer.drafter
    return bool(getattr(proposer, "shares", False))


def _frequent(model: object, drafter: Drafter, target: TargetInfo) -> FrequentTokens | None:
    """The frequent tokens of a model, if this drafter may draft from them alone: it has the target's head, which is
    large and of which single rows can be read, and the user did not say which tokens it drafts from."""
    if not isinstance(drafter, FeatureDrafter | BlockDrafter) or target.ends is None or target.vocab < frequent.LEAST:
        return None
    sequential = isinstance(drafter, BlockDrafter) and drafter.config.sequential
    if drafter.head.own or sequential or drafter.options.draft_vocab != AUTO or drafter.options.draws:
        return None
    host = HostModel.of(cast(GenerativeModel, model))
    if host.head is None or not draft_vocab.plain(host.head):
        return None
    known, key = _TOKENS.setdefault(model, {}), (target.vocab, target.device)
    if key not in known:
        known[key] = FrequentTokens(target)
    return known[key]


class CheckedDrafts:
    """A drafter of the user's own whose drafts are checked: a wrong one would give wrong tokens, or an error far away.

    Args:
        name: of its class, for messages.
        vocab: the number of the target's tokens.
    """

    def __init__(self, drafter: Proposer, name: str, vocab: int) -> None:
        self.drafter, self.name, self.vocab = drafter, name, vocab
        self.features, self.nodes = drafter.features, drafter.nodes

    def start(self, session: Session, target: Target, prompt: Prompt) -> object:
        return self.drafter.start(session, target, prompt)

    def propose(self, session: Session, target: Target) -> Draft:
        """The draft. On other devices than a CPU, which have to be waited for, its tokens are checked in the first
        rounds only.

        Raises:
            TypeError, ValueError: it is no Draft, has the wrong shape or tokens, or does not begin with the pending
                token.
        """
        draft = self.drafter.propose(session, target)
        if not isinstance(draft, Draft):
            raise TypeError(f"{self.name}.propose returned {type(draft).__name__}; it has to return a Draft")
        tokens, nodes, rows = draft.tokens, tuple(draft.tree.parents.shape), len(session.rows)
        if tokens.dtype != torch.int64 or tuple(tokens.shape) != nodes or nodes[0] != rows:
            raise ValueError(
                f"{self.name}.propose returned tokens {list(tokens.shape)} of {tokens.dtype} on a tree {list(nodes)}; "
                f"both are [rows, nodes], here {rows} rows, and tokens are int64"
            )
        if tokens.is_cpu or session.stats.rounds < CHECKED:
            allowed = (tokens >= NO_TOKEN) & (tokens < self.vocab)
            if not bool(((tokens[:, 0] == session.pending) & allowed.all(1)).all()):
                raise ValueError(
                    f"{self.name}.propose returned the tokens {tokens.tolist()}; node 0 of each row is its pending "
                    f"token, here {session.pending.tolist()}, and the others are NO_TOKEN or below {self.vocab}"
                )
        return draft


def _switchable(model: object, drafter: Drafter, config: SpecConfig) -> bool:
    """Whether a drafter without weights may be switched off: the tokens that a seed gives do not depend on it."""
    lossless = config.rule == "exact" or getattr(config.rule, "lossless", False)
    return SWITCHED and lossless and getattr(drafter, "shares", False) and not devices.shared(model)


def _captured(model: object, drafter: Drafter, compile: bool, target: TargetInfo, depths: set[int]) -> Proposer:
    """A proposer that runs captures of the drafter's forward, or the drafter itself if it cannot be captured.

    Args:
        depths: see CapturedDraft.
    """
    if not compile:
        return drafter
    if isinstance(drafter, HeadsDrafter):
        return drafter.captured(_HEADS.setdefault(drafter.enter, CaptureCache(type(drafter).__name__)))
    if isinstance(drafter, Compilable):
        return drafter.compiled(compile)
    if not (isinstance(drafter, FeatureDrafter | BlockDrafter) and drafter.capturable):
        return drafter
    assert isinstance(model, nn.Module)
    ours = captures.of(model)
    assert ours is not None
    held = ours.of_drafter(drafter.block, type(drafter).__name__)
    alive = weakref.ref(model)  # so that the proposer does not keep the model alive
    return CapturedDraft(drafter, lambda: weights(alive()), target.vocab, held, sorted(depths))


def _costs(model: object, drafter: Any, config: SpecConfig, target: TargetInfo) -> RoundCosts:
    """The switch's measurements for this drafter, with these options, on this model; a rule counts by its name only."""
    layer = getattr(drafter, "block", None)
    settings = repr(drafter) if layer is None else drafter.options  # repr: all settings of a drafter without weights
    key = (target, settings, getattr(config.rule, "name", config.rule), config.reproducible, config.compile)
    ours = _COSTS.setdefault(model, WeakKeyDictionary()).setdefault(type(drafter) if layer is None else layer, {})
    return ours.setdefault(key, RoundCosts())
