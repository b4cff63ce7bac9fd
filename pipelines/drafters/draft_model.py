"""A smaller model of transformers that drafts for a target with the same tokenizer, with a KV cache of its own."""

from __future__ import annotations

import copy
import inspect
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.config import Options
from mmspec.drafters import prune, static_trees
from mmspec.drafters.growth import ModelHead, Stepwise, draws, grown
from mmspec.drafters.shape import TreeOptions
from mmspec.pipelines.host import readable
from mmspec.pipelines.host.call import Call, calling
from mmspec.pipelines.host.decoder import embedding
from mmspec.pipelines.host.hooks import stock
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.loops import as_call
from mmspec.pipelines.host.tapping import taps
from mmspec.pipelines.target import captures
from mmspec.pipelines.target.state import State
from mmspec.pipelines.target.vlm import VlmTarget
from mmspec.protocols import SessionView, Target, TargetInfo
from mmspec.tree import chain
from mmspec.types import Draft, Prompt, Tree, gather_rows

_PADDED = 1.1  # allowed ratio of vocabularies; models with one tokenizer may be padded: Qwen2.5 has 151936 and 152064
_REPLACED = ("input_ids", "inputs_embeds", "labels")  # arguments of a call that the draft model does not get as such
_USUAL = TreeOptions.chain(5)  # a chain of the length that stock's assistants start with


@dataclass
class DraftState:
    """A draft model's memory of some rows: its cache, and the draft tree so far."""

    view: VlmTarget
    state: State
    fresh: tuple[bool, ...]  # for each row, whether only its prompt has been read
    swaps: bool  # whether some modules need mixins to read a draft
    tree: tuple[Tensor, Tensor, Tensor] | None = None  # tokens, depth and ancestors of the nodes so far, root included
    stats: dict[str, float] = field(default_factory=dict)

    def select(self, rows: Tensor) -> DraftState:
        fresh = tuple(self.fresh[row] for row in rows.tolist())
        return replace(self, state=self.state.select(rows), fresh=fresh, tree=None)

    def join(self, other: DraftState) -> DraftState:
        return replace(self, state=self.state.join(other.state), fresh=self.fresh + other.fresh, tree=None)


class ModelDrafter(Stepwise):
    """Drafts with a model that has the target's tokens (Leviathan et al. 2023; Chen et al. 2023).

    Its cache has the text before the pending token. Every level reads the pending token and all nodes so far, so that
    recurrent states never have to be rolled back: the tokens that the target accepted are committed in the next round.

    Args:
        model: with `generate`; it stays on its device, and has its own class between two rounds.
    """

    method = "model"
    head = ModelHead()
    features: tuple[int, ...] = ()
    compile: bool = False  # whether its forwards are captured, like a target's

    def __init__(self, model: GenerativeModel) -> None:
        self.model, self.options = model, _USUAL
        self.own: TargetInfo | None = None

    def __repr__(self) -> str:
        return f"ModelDrafter({stock(self.model).__name__}, {self.options})"

    def fit(self, target: TargetInfo, given: Options) -> ModelDrafter:
        """The same model with the user's options.

        Raises:
            ValueError: another vocabulary, a model that cannot read drafts, or an option that it does not use.
        """
        options = _USUAL.with_(given, "the model drafter")
        if options.named:
            raise ValueError("a draft model has a head of its own; leave draft_vocab out")
        name = stock(self.model).__name__
        why = readable.unsupported(self.model)
        if why is not None:
            raise ValueError(f"{name} cannot draft: {why}")
        vocab = readable.head_shape(self.model)[0]
        if not target.vocab <= _PADDED * vocab or not vocab <= _PADDED * target.vocab:
            raise ValueError(
                f"{name} has {vocab} tokens and {target.name} {target.vocab}; a draft model needs the target's "
                "tokenizer. Use a smaller model of the same family"
            )
        options.check_branches(vocab)
        fitted = ModelDrafter(self.model)
        fitted.options, fitted.own = options, target
        return fitted

    def compiled(self, compile: bool) -> ModelDrafter:
        """The same drafter, with its forwards captured and compiled like a target's, all levels in one shape."""
        copied = copy.copy(self)
        copied.compile = compile
        return copied

    @property
    def _most(self) -> int:
        """The most nodes of one forward: a round's accepted tokens and the pending one, or all levels but the last."""
        o = self.options
        return max(2 + o.depth, 1 + (o.depth - 1) * o.width if o.tree == static_trees.DYNAMIC else self.nodes)

    @torch.no_grad()
    def start(self, session: SessionView, target: Target, prompt: Prompt) -> DraftState:
        """Read the prompt, with its images if the draft model takes the call's inputs for them."""
        with taps(self.model, ()):
            call = _call(self.model, prompt.given, prompt).for_model(self.model)
            view = VlmTarget(self.model, ())
            view.captured = captures.of(self.model, self.compile)
            state, read, raw = view.first(call, call.input_ids.shape[1] + self.nodes + 256)
        swaps = view.draft_attention is not None or bool(view.host.readers)
        memory = DraftState(view, state, (True,) * len(raw), swaps)
        if self.options.prune and prompt.visual.shape == read.ids.shape:
            keep = prune.kept(prompt.visual * prompt.valid, self.options.prune)
            _keep_slots(state, keep.to(state.open_slots.device))
        return memory

    @torch.no_grad()
    def propose(self, session: SessionView, target: Target) -> Draft:
        with taps(self.model, ()) if session.memory.swaps else nullcontext():
            return grown(self, session, target, self._catch_up(session), draws(self.options, session))

    def _catch_up(self, session: SessionView) -> Tensor:
        """Read the last round's accepted tokens, commit them, and read the pending token; logits [B, 1, V] after it.

        The accepted token of a fresh row is the prompt's last, which has already been read.
        """
        memory: DraftState = session.memory
        last = session.last
        counts = tuple(0 if fresh else n for fresh, n in zip(memory.fresh, last.counts, strict=True))
        c = last.acceptance.count  # [B], tokens to commit
        c = c * torch.tensor([not fresh for fresh in memory.fresh], device=c.device) if any(memory.fresh) else c
        kept = gather_rows(last.draft.tokens, last.kept).clamp(min=0)
        place = torch.arange(1 + max(counts), device=c.device).expand(len(c), -1)
        tokens = kept.gather(1, place.clamp(max=kept.shape[1] - 1))
        tokens = torch.where(place == c[:, None], session.pending[:, None], tokens)
        line = chain(place.shape[1], c.device).expand(len(c))
        raw = self._logits(memory, tokens, line.depth, line.ancestors, (session.emitted - 1 - c)[:, None])
        memory.state.cache.commit(place, counts, c, True)
        memory.fresh = (False,) * len(counts)
        root = torch.zeros_like(session.pending)[:, None]
        memory.tree = (session.pending[:, None], root, torch.ones_like(root, dtype=torch.bool)[..., None])
        return gather_rows(raw, c[:, None])

    def _logits(self, memory: DraftState, tokens: Tensor, depth: Tensor, ancestors: Tensor, first: Tensor) -> Tensor:
        """The draft model's logits [B, n, V] after nodes [B, n] that follow the committed text; `first` [B, 1] is the
        root's index among the generated tokens."""
        view, state, home, n = memory.view, memory.state, memory.view.device, tokens.shape[1]
        device = tokens.device
        if view.captured is not None:  # one capture serves all levels
            tokens, depth, ancestors = _padded(max(n, self._most), tokens, depth, ancestors)
        tokens, depth, ancestors, first = (t.to(home) for t in (tokens, depth, ancestors, first))
        places = state.places.at(first + depth)
        places, tokens = places if view.last is None else places.clamp(max=view.last), _clamped(self.model, tokens)
        with view.reads(Tree(_parents(depth, ancestors), depth, ancestors), state.cache.lengths):
            raw, *_ = view.reader(state, tokens, places, view.mask(state, ancestors, depth))
        return raw[:, :n].to(device)

    def step(
        self, session: SessionView, target: Target, tokens: Tensor, f: Tensor, appended: int, ahead: Tensor,
        seen: Tensor | None, level: int,
    ) -> Tensor:  # fmt: skip
        memory: DraftState = session.memory
        assert memory.tree is not None
        (B, n), N = tokens.shape, appended + tokens.shape[1]
        below = tokens.new_ones(B, n, N, dtype=torch.bool) if seen is None else seen[..., -N:]
        nodes, depth, ancestors = memory.tree
        above = torch.cat([ancestors, ancestors.new_zeros(B, 1 + appended, n)], 2)
        own = torch.cat([below.new_ones(B, n, 1), below], 2)
        depth = torch.cat([depth, depth.new_full((B, n), level)], 1)
        memory.tree = torch.cat([nodes, tokens], 1), depth, torch.cat([above, own], 1)
        return self._logits(memory, *memory.tree, (session.emitted - 1)[:, None])[:, -n:]

    def logits(self, hidden: Tensor, target: Target) -> Tensor:
        """Its logits for the target's vocabulary; rows that only one of the two models has are padding."""
        assert self.own is not None
        more = self.own.vocab - hidden.shape[-1]
        return torch.nn.functional.pad(hidden, (0, more), value=-torch.inf)  # a negative number cuts


def _parents(depth: Tensor, ancestors: Tensor) -> Tensor:
    """Parents [B, n] of nodes: a node's deepest ancestor other than itself; the root is its own parent."""
    others = ancestors & ~torch.eye(ancestors.shape[1], dtype=torch.bool, device=depth.device)
    return torch.where(others, depth[:, None], -1).argmax(-1)


def _padded(size: int, tokens: Tensor, depth: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad the nodes to `size`; the added nodes are children of the root, and no other node depends on them."""
    missing = size - tokens.shape[1]
    own = torch.eye(size, dtype=torch.bool, device=tokens.device)
    own[:, 0] = True
    return pad(tokens, (0, missing)), pad(depth, (0, missing), value=1), pad(ancestors, (0, missing, 0, missing)) | own


def _call(model: GenerativeModel, given: Options, prompt: Prompt) -> Call:
    """Prepare the prompt of a call by the draft model's own `generate`, up to its prefill, without `inputs_embeds`."""
    parameters = inspect.signature(model.forward).parameters
    ids = given.get("input_ids", given.get("inputs"))
    inputs = {name: value for name, value in given.items() if name in parameters and isinstance(value, Tensor)}
    inputs = {name: value.to(model.device) for name, value in inputs.items() if name not in _REPLACED}
    if ids is None or ids.shape[1] < prompt.ids.shape[1]:
        ids, inputs = prompt.ids, {"attention_mask": prompt.valid.long()}
    answers = max(1, len(prompt.ids) // len(ids))  # for each prompt; `generate` requires sampling for several
    with calling(picture=None):  # the target's call may generate an image, this one reads a prompt
        call: Call = model.generate(
            input_ids=_clamped(model, ids.to(model.device)), **inputs, num_return_sequences=answers, max_new_tokens=1,
            do_sample=answers > 1, custom_generate=as_call, num_beams=1, stop_strings=None, cache_implementation=None,
        )  # fmt: skip
    return call


def _clamped(model: GenerativeModel, ids: Tensor) -> Tensor:
    """Ids clamped to the draft model's embedding; the target may have more, for images or as padding."""
    return ids.clamp(max=embedding(model).weight.shape[0] - 1)


def _keep_slots(state: State, keep: Tensor) -> None:
    """Keep only the prompt's slots in bool [B, L]; rows with fewer of these get closed slots as padding."""
    keep = keep & state.open_slots
    most = int(keep.sum(1).max())
    order = keep.to(torch.uint8).argsort(dim=1, stable=True)[:, keep.shape[1] - most :]
    state.cache.keep(order)
    state.open_slots, state.padded = gather_rows(keep, order), True
