"""A drafter on part of the target's head: it drafts as if the other tokens could not be, and the output is stock's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny_image_models
import tiny_vlms
import torch
import uncompiled
from compared import as_stock
from hostile_drafters import eagle, feature_drafter
from torch import Tensor, nn

import mmspec
from mmspec.compile.capture import PiecewiseFunction
from mmspec.compile.draft import CapturedDraft
from mmspec.drafters.draft_vocab import DraftVocab
from mmspec.drafters.eagle import EagleDrafter
from mmspec.drafters.shape import TreeOptions
from mmspec.pipelines.families import decoder_only
from mmspec.pipelines.target import captures
from mmspec.types import Draft

CHAIN, TREE = {"tree": "chain", "depth": 3}, {"depth": 3, "width": 3, "size": 10}
STATIC = {"tree": "reverse_balanced_25"}
EVEN = range(0, tiny_vlms.VOCAB, 2)  # so that an id next to one that it holds is none of them


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only drafts are captured, and their pieces run as they are; whatever falls back fails."""
    uncompiled.pieces(monkeypatch, forwards=False)


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Any]]]:
    """Tokens and parents of all that is drafted."""
    seen: list[list[Any]] = []

    def watched(propose: Callable[..., Draft]) -> Callable[..., Draft]:
        def again(*told: Any) -> Draft:
            draft = propose(*told)
            seen.append([draft.tokens.tolist(), draft.tree.parents.tolist()])
            return draft

        return again

    for one in (EagleDrafter, CapturedDraft):
        monkeypatch.setattr(one, "propose", watched(one.propose))
    return seen


def proposed(drafts: list[list[Any]]) -> set[int]:
    return {token for tokens, _ in drafts for row in tokens for token in row[1:]}


def as_if_excluded(ids: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters read the whole head, and take the tokens that are not among the ids for impossible."""
    whole = EagleDrafter.logits

    def logits(self: EagleDrafter, hidden: Tensor, target: Any) -> Tensor:
        found = whole(self, hidden, target)
        return torch.full_like(found, -torch.inf).index_copy(-1, torch.tensor(ids), found[..., ids])

    monkeypatch.setattr(EagleDrafter, "logits", logits)


CASES = [
    ("eagle", CHAIN),
    ("eagle", TREE),
    ("eagle", STATIC),
    ("eagle", TREE | {"compile": True}),
    ("eagle", CHAIN | {"compile": True}),
    ("flash", {"tree": "chain", "depth": 4}),
    ("flash", STATIC | {"compile": True}),
    ("vispec", TREE),
    ("msd", TREE),
    ("specvlm", CHAIN),
]


@pytest.mark.parametrize(("method", "options"), CASES)
@pytest.mark.every(6)
def test_it_drafts_as_if_the_others_could_not_be(
    method: str, options: dict[str, Any], drafts: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_vlms.model("llava")
    inputs = tiny_vlms.prompt("llava", "image first" if options.get("compile") else "ragged")
    more = {"latents": 3, "least": 1} if method == "flash" else {}
    made, count = feature_drafter(method, model, **more), PiecewiseFunction.made
    as_stock(model, inputs, made, draft_vocab=EVEN, **options)
    mine = drafts[:]
    assert (PiecewiseFunction.made > count) == bool(options.get("compile"))
    assert len(proposed(mine)) > 5 and proposed(mine) <= {*EVEN}
    drafts.clear()
    as_if_excluded(EVEN, monkeypatch)
    with mmspec.enable(model, made, **options | {"compile": False}):
        tiny_vlms.generate(model, inputs)
    assert drafts == mine


def test_what_would_have_been_proposed_is_proposed(drafts: list[list[Any]]) -> None:
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "image first")
    with mmspec.enable(model, eagle(model), **CHAIN) as handle:
        tiny_vlms.generate(model, inputs)
        whole, tau = drafts[:], handle.stats.tokens_per_target_call
    for held in (sorted(proposed(whole)), torch.tensor([*proposed(whole)]), tiny_vlms.VOCAB):
        drafts.clear()
        with mmspec.enable(model, eagle(model), draft_vocab=held, **CHAIN) as handle:
            tiny_vlms.generate(model, inputs)
            assert drafts == whole and handle.stats.tokens_per_target_call == tau


def test_guided_targets_and_auto(drafts: list[list[Any]]) -> None:
    model, call = tiny_image_models.model("emu3"), tiny_image_models.PAINTERS["emu3"].call(2)
    call["max_new_tokens"] = 6
    for more in ({}, {"auto": True}):
        as_stock(model, call, eagle(model), draw=tiny_image_models.draw, draft_vocab=60, **TREE, **more)
    assert len(proposed(drafts)) > 3 and max(proposed(drafts)) < 60


RENEWALS = {
    "written": lambda head: head.weight.copy_(head.weight.roll(1, 0)),
    "replaced": lambda head: setattr(head, "weight", nn.Parameter(head.weight.roll(1, 0))),
}


@pytest.mark.parametrize("change", RENEWALS)
@pytest.mark.parametrize("compile", [False, True])
@torch.no_grad()
@pytest.mark.every(6)
def test_weights_that_change_renew_the_rows(compile: bool, change: str, drafts: list[list[Any]]) -> None:
    model, inputs = copy.deepcopy(tiny_vlms.model("llava")), tiny_vlms.prompt("llava", "text only")
    with mmspec.enable(model, eagle(model), draft_vocab=EVEN, compile=compile, **TREE):
        tiny_vlms.generate(model, inputs, max_new_tokens=6)
        RENEWALS[change](model.get_output_embeddings())
        drafts.clear()
        out = tiny_vlms.generate(model, inputs, max_new_tokens=6)
    renewed, other = drafts[:], copy.deepcopy(model)
    drafts.clear()
    with mmspec.enable(other, eagle(other), draft_vocab=EVEN, **TREE):
        assert torch.equal(tiny_vlms.generate(other, inputs, max_new_tokens=6), out)
    assert drafts == renewed


def test_each_vocabulary_has_a_capture_of_its_own(drafts: list[list[Any]]) -> None:
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "text only")
    made, count = eagle(model), PiecewiseFunction.made
    for ids in (EVEN, range(1, tiny_vlms.VOCAB, 2), EVEN):
        drafts.clear()
        with mmspec.enable(model, made, draft_vocab=ids, compile=True, **CHAIN):
            tiny_vlms.generate(model, inputs, max_new_tokens=6)
        assert drafts and proposed(drafts) <= {*ids}
    assert PiecewiseFunction.made == count + 2
    read = {id(t) for one in captures.of(model).drafts[made.block]._captures.values() for t in one._weights}
    assert id(model.get_output_embeddings().weight) not in read  # a replay reads the rows that were cut, not all


HIDDEN = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))


def of_head(head: nn.Module, ids: list[int]) -> tuple[DraftVocab, Callable[[], None]]:
    vocab = DraftVocab(torch.tensor(ids))

    def right() -> None:
        hidden = HIDDEN.to(next(head.parameters()).dtype)
        assert torch.allclose(vocab.logits(head, hidden), head(hidden)[..., ids], atol=1e-5)

    return vocab, right


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_its_logits_are_those_of_the_head(bias: bool) -> None:
    head = nn.Linear(8, 20, bias)
    vocab, right = of_head(head, [1, 4, 19])
    right()
    rows = vocab.tensors
    other = nn.Linear(8, 20, bias).state_dict()
    for change in (head.weight.neg_, head.reset_parameters, lambda: head.load_state_dict(other)):
        change()
        right()
        assert all(a is b for a, b in zip(rows, vocab.tensors, strict=True))  # what a capture reads
    head.to(torch.float64)
    right()
    assert vocab.tensors[1].dtype == torch.float64
    head.weight = nn.Parameter(torch.randn(20, 8).double())
    right()
    with torch.inference_mode():
        head.weight = nn.Parameter(torch.randn(20, 8).double(), requires_grad=False)
        right()


class Scaled(nn.Linear):
    """What an adapter or a quantized layer does: more than its weight says."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


@torch.no_grad()
def test_a_head_that_is_no_plain_linear_is_asked_for_all() -> None:
    hooked, wrapped = nn.Linear(8, 20), nn.Linear(8, 20)
    hooked.register_forward_hook(lambda module, args, out: 2 * out)
    wrapped.forward = lambda x: nn.Linear.forward(wrapped, x) ** 2
    for head in (Scaled(8, 20), hooked, wrapped):
        of_head(head, [0, 7, 8])[1]()


def test_the_first_tokens_and_those_that_end_an_answer() -> None:
    model = copy.deepcopy(tiny_vlms.model("llava"))
    for ends, told in ((None, [0, 1, 2, 3]), (2, [0, 1, 2, 3]), ([9, 2], [0, 1, 2, 3, 9])):
        model.generation_config.eos_token_id = ends
        with mmspec.enable(model, eagle(model), draft_vocab=4, **CHAIN) as handle:
            assert handle.drafter.head.vocab.ids.tolist() == told
            again = handle.drafter.fit(decoder_only.DecoderOnly().describe(model), handle.given)
            assert again.head.vocab is handle.drafter.head.vocab and hash(handle.drafter.options)
    assert TreeOptions(draft_vocab=torch.tensor([5, 3, 5])).draft_vocab == (3, 5)
