"""Models on an attention that takes no tree mask: it reads prompts and chains of one row, sdpa the other drafts."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_vlms
import torch
from compared import as_stock
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask, sdpa_mask
from transformers.modeling_utils import AttentionInterface

import mmspec
from mmspec.pipelines.host import tree_attention
from mmspec.pipelines.host.decoder import decoder

FLASH, FLEX = "flash_attention_2_here", "flex_attention"
seen: list[tuple[int, int]] = []  # rows and queries of each call


def flash(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """What FlashAttention takes and gives: padding as [B, T], else none; queries are the end of the keys."""
    assert attention_mask is None or attention_mask.dim() == 2, "FlashAttention takes no tree mask"
    seen.append((len(query), query.shape[2]))
    n, T, window = query.shape[2], key.shape[2], kwargs.pop("sliding_window", None)
    at = torch.arange(T)
    shown = at <= at[-n:, None]
    shown = shown if window is None else shown & (at > at[-n:, None] - window)
    shown = shown.expand(len(query), 1, n, T)
    if attention_mask is not None:
        shown = shown & attention_mask[:, None, None, -T:].bool()
    return sdpa_attention_forward(module, query, key, value, shown, **kwargs)


@pytest.fixture
def names() -> Iterator[None]:
    """FlashAttention's interface with arithmetic that runs on a CPU, and FlexAttention's name for sdpa's."""
    own = AttentionInterface._global_mapping[FLEX], AttentionMaskInterface._global_mapping[FLEX]
    AttentionInterface.register(FLASH, flash)
    AttentionMaskInterface.register(FLASH, flash_attention_mask)
    AttentionInterface.register(FLEX, sdpa_attention_forward)
    AttentionMaskInterface.register(FLEX, sdpa_mask)
    seen.clear()
    yield
    AttentionInterface.register(FLEX, own[0])
    AttentionMaskInterface.register(FLEX, own[1])


@pytest.fixture
def model(request: pytest.FixtureRequest, names: None) -> Iterator[Any]:
    """A model whose decoder's config names an implementation, as loading with it does where it is installed."""
    name, attn = request.param
    made = copy.deepcopy(tiny_vlms.model(name))
    decoder(made).config._attn_implementation_internal = attn
    yield made


def everywhere(*attns: str, kinds: tuple[str, ...] = ("llava", "qwen2_5_vl", "gemma3")) -> Any:
    pairs = [(name, attn) for attn in attns for name in kinds]
    return pytest.mark.parametrize("model", pairs, ids=[f"{a}-{n}" for n, a in pairs], indirect=True)


def name_of(model: Any) -> str:
    return str(model.config.model_type)


@everywhere(FLASH, FLEX)
@pytest.mark.parametrize("kind", ["image first", "ragged"])
@pytest.mark.parametrize("drafter", ["ngram", "random tree", "right within"])
@pytest.mark.every(4)
def test_identical_to_stock_with_that_attention(model: Any, kind: str, drafter: str) -> None:
    assert as_stock(model, tiny_vlms.prompt(name_of(model), kind), drafter).stats.rounds


@everywhere(FLASH)
def test_a_chain_of_one_row_stays_on_flash_attention_and_a_tree_does_not(model: Any) -> None:
    inputs = tiny_vlms.prompt(name_of(model), "image first")
    layers, L = len(decoder(model).layers), inputs["input_ids"].shape[1]
    for drafter, stays in (("always right", True), ("random tree", False)):
        handle = as_stock(model, inputs, drafter, begun=lambda _: seen.clear())
        prompts, drafts = [q for _, q in seen if q == L], [q for _, q in seen if q < L]
        assert len(prompts) == layers
        if stays:
            assert len(drafts) == layers * handle.stats.rounds and max(drafts) > 2
        else:
            assert set(drafts) <= {1}, "a root alone is a chain"


@everywhere(FLASH, kinds=("llava",))
def test_enable_says_so_and_nothing_of_it_stays(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    tiny_vlms.generate(model, tiny_vlms.prompt("llava", "ragged"))  # stock keeps something of its first call
    before = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    with caplog.at_level(logging.WARNING, "mmspec"), mmspec.enable(model):
        assert f"{FLASH!r} takes no tree mask" in caplog.text and "'sdpa'" in caplog.text
        assert decoder(model).config._attn_implementation == FLASH
        tiny_vlms.generate(model, tiny_vlms.prompt("llava", "ragged"))
        assert decoder(model).config._attn_implementation == FLASH
    assert {name: (type(module), dict(vars(module))) for name, module in model.named_modules()} == before


@everywhere("of_ones_own", kinds=("llava",))
def test_an_attention_that_nobody_knows_is_refused(model: Any) -> None:
    with pytest.raises(mmspec.UnsupportedError, match="takes no tree mask"):
        mmspec.enable(model)


def test_trees_are_read_by_what_the_model_has() -> None:
    own = decoder(tiny_vlms.model("llava"))
    assert tree_attention.for_drafts(own) is None
    assert len(tree_attention.modules(own)) == len(own.layers)
