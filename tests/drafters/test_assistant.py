"""Gemma-4's assistants: the target's tokens, and stock's own drafts where both read the same cache."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_vlms
import torch
import transformers as T
from compared import as_stock, stock_drafts
from torch import Tensor
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator as Stock

import mmspec
from mmspec.pipelines.drafters.assistant import AssistantDrafter
from mmspec.pipelines.host.call import calling

LAYERS = ["sliding_attention", "full_attention"] * 2
TEXT = {
    **tiny_vlms.TEXT, "num_hidden_layers": 4, "layer_types": LAYERS, "sliding_window": 6, "global_head_dim": 16,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
}  # fmt: skip
SHARING = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": tiny_vlms.VOCAB}


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.23 refuses to build a model whose layers all share, which an assistant is."""
    own = T.Gemma4TextConfig.kv_sharing_modes.fget

    def modes(self: Any) -> Any:
        every = self.num_kv_shared_layers == self.num_hidden_layers
        return ["reuse"] * self.num_hidden_layers if every else own(self)

    monkeypatch.setattr(T.Gemma4TextConfig, "kv_sharing_modes", property(modes))


def pair(attn: str = "sdpa", centroids: bool = False) -> tuple[Any, Any]:
    """A tiny Gemma-4 whose last layers share keys and values, and an assistant on them."""
    torch.manual_seed(0)
    model = tiny_vlms.enlarged(T.Gemma4ForCausalLM(T.Gemma4TextConfig(**{**TEXT, **SHARING})))
    small = {**TEXT, "num_hidden_layers": 2, "layer_types": LAYERS[:2], "hidden_size": 32, "num_kv_shared_layers": 2}
    config = T.Gemma4AssistantConfig(
        text_config=T.Gemma4TextConfig(**small), backbone_hidden_size=64, use_ordered_embeddings=centroids,
        num_centroids=8, centroid_intermediate_top_k=3,
    )  # fmt: skip
    assistant = tiny_vlms.enlarged(T.Gemma4AssistantForCausalLM(config))
    if centroids:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(tiny_vlms.VOCAB))
    model.set_attn_implementation(attn)
    assistant.set_attn_implementation(attn)
    return model, assistant


def prompt(rows: int) -> dict[str, Tensor]:
    ids = torch.randint(5, 100, (rows, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 3 * row] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("options", [{}, {"depth": 3, "width": 3, "size": 10}, {"tree": "mc_sim_7b_63", "draws": True}])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.every(8)
def test_the_tokens_are_the_targets(attn: str, rows: int, options: dict[str, Any]) -> None:
    model, assistant = pair(attn, centroids=rows > 1)
    handle = as_stock(model, prompt(rows), assistant, **options)
    assert isinstance(handle.drafter, AssistantDrafter) and handle.stats.drafted > 0


@pytest.mark.parametrize("centroids", [False, True])
def test_the_first_draft_is_that_of_transformers(centroids: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later on stock shows the assistant the keys of a token that was refused; here it never sees one."""
    model, assistant = pair(centroids=centroids)
    assistant.generation_config.num_assistant_tokens = 5
    mine, theirs = [], stock_drafts(Stock, monkeypatch)
    with calling(watch=lambda round_: mine.append(round_.draft.tokens[0, 1:].tolist())):
        as_stock(model, prompt(1), "plain", call={"max_new_tokens": 12, "assistant_model": assistant})
    assert next(filter(None, mine)) == next(filter(None, theirs))


def test_rows_are_drafted_for_as_if_alone() -> None:
    model, assistant = pair()
    inputs = prompt(3)
    with mmspec.enable(model, assistant) as handle:
        tiny_vlms.generate(model, inputs)
        together = handle.stats.accepted
        alone = []
        for row in range(3):
            before, skip = handle.stats.accepted, 3 * row
            tiny_vlms.generate(model, {"input_ids": inputs["input_ids"][row : row + 1, skip:]})
            alone.append(handle.stats.accepted - before)
    assert together == sum(alone)


def test_what_does_not_fit_is_refused() -> None:
    model, assistant = pair()
    with pytest.raises(ValueError, match=r"width 64 \(target: 32\)"):
        small = {**TEXT, **SHARING, "hidden_size": 32}
        mmspec.enable(T.Gemma4ForCausalLM(T.Gemma4TextConfig(**small)), assistant)
    with pytest.raises(ValueError, match="leave draft_vocab and prune out"):
        mmspec.enable(model, assistant, prune=0.5)
    with mmspec.enable(tiny_vlms.model("llava"), assistant), pytest.raises(ValueError, match="shares no keys"):
        tiny_vlms.generate(tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "text only"))
