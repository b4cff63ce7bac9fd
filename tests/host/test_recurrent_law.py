"""Sampling through layers with a recurrent state is exact: all noise of three tokens, cut where decisions change."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tiny_vlms
import torch
import vlm_classes as zoo
from hostile_drafters import Scripted
from torch import Tensor

import mmspec
from mmspec.kernels import dispatch
from mmspec.pipelines.host.recurrent_state import AcceptedPath

LENGTH, PROMPT, TEMPERATURE = 4, 7, 2.0
NEAR = 1e-4  # an error of this size in the probability of a token is seen
Text = tuple[int, ...]


def kimi() -> Any:
    """Kimi-Linear: gated delta rule with a decay for each channel, beside latent attention."""
    layers = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    layers |= {"mlp_layer_types": ["dense"] * 3, "linear_head_dim": 8, "linear_num_heads": 4}
    latent = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    return tiny_vlms.text("KimiLinear", head_dim=None, num_key_value_heads=4, **layers, **latent)


KINDS = {
    "gated delta rule": lambda: tiny_vlms.model("qwen3_5"),
    "a decay for each channel": kimi,
    "state space duality": lambda: zoo.model("nemotron_h_omni"),
    "short convolutions": lambda: tiny_vlms.model("lfm2_vl"),
}


class Law:
    """The two likeliest tokens after every text, and how likely they are among themselves, as stock decodes them. The
    first token, which the prompt's own forward gives, is the likeliest."""

    def __init__(self, model: Any, prompt: Tensor) -> None:
        self.after: dict[Text, dict[int, float]] = {}
        texts: list[Text] = [()]
        for depth in range(LENGTH):
            top = (self._logits(model, prompt, texts).double() / TEMPERATURE).topk(2)
            for text, tokens, p in zip(texts, top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True):
                self.after[text] = dict(sorted(zip(tokens, p, strict=True))) if depth else {tokens[0]: 1.0}
            texts = [(*text, token) for text in texts for token in self.after[text]]
        self.texts = texts

    def _logits(self, model: Any, prompt: Tensor, texts: list[Text]) -> Tensor:
        """[texts, V], after each of these: written token by token, since some layers read a prompt otherwise."""
        every, depth = list(range(model.config.get_text_config().vocab_size)), len(texts[0])

        def forced(row: int, ids: Tensor) -> list[int]:
            place = len(ids) - PROMPT
            return [texts[row][place]] if place < depth else every

        out = model.generate(
            prompt.expand(len(texts), -1), do_sample=False, max_new_tokens=depth + 1, eos_token_id=None,
            prefix_allowed_tokens_fn=forced, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        return out.logits[depth]

    def of(self, text: Text) -> float:
        found = 1.0
        for place, token in enumerate(text):
            found *= self.after[text[:place]][token]
        return found

    def cells(self, depth: int) -> list[tuple[float, float]]:
        """Width of the stretches of [0, 1) in which the token at this depth is decided alike, and a place in each. Of
        the last token's there are two halves and a place near either end, where other laws decide otherwise."""
        laws = (law for text, law in self.after.items() if len(text) == depth)
        edges = sorted({0.0, 1.0, *(p for law in laws for p in law.values())})
        stretches = [(b - a, a, b) for a, b in itertools.pairwise(edges)]
        if depth < LENGTH - 1:
            return [(wide, (a + b) / 2) for wide, a, b in stretches]
        near = [(wide, a, b, min(NEAR, wide / 2)) for wide, a, b in stretches]
        return [half for wide, a, b, e in near for half in ((wide / 2, a + e), (wide / 2, b - e))]


def drafted(law: Law) -> Scripted:
    """Trees two deep of right tokens, one of two, and wrong ones: rows keep one node, two or three, on either side."""

    def line(row: Any, _: Any) -> tuple[list[int], list[int]]:
        text = tuple(row.tokens[row.start :])
        if text not in law.after:
            return [7], [0]
        tokens, parents = [9, *law.after[text]], [0, 0, 0]
        for at, token in enumerate(list(tokens)):
            below = list(law.after.get((*text, token), {}))[at % 2 :][:1]
            tokens, parents = tokens + below, parents + [at + 1] * len(below)
        return tokens, parents

    return Scripted(line)


def distance(model: Any, monkeypatch: pytest.MonkeyPatch) -> float:
    """By how much the probability of any text is off, of rows that are given every noise there is."""
    prompt = torch.randint(5, 60, (1, PROMPT), generator=torch.Generator().manual_seed(3))
    law = Law(model, prompt)
    cells = list(itertools.product(*(law.cells(depth) for depth in range(LENGTH))))
    width = torch.tensor([[wide for wide, _ in cell] for cell in cells], dtype=torch.float64).prod(1)
    noise = torch.tensor([[*(middle for _, middle in cell), *[0.5] * 9] for cell in cells], dtype=torch.float64)
    rows: dict[int, int] = {}

    def told(seeds: Tensor, places: Tensor) -> Tensor:
        for seed in seeds.flatten().tolist():
            rows.setdefault(seed, len(rows))
        return noise[torch.tensor([rows[seed] for seed in seeds.flatten().tolist()])[:, None], places]

    monkeypatch.setattr(dispatch, "uniform", told)
    how = {"do_sample": True, "top_k": 2, "temperature": TEMPERATURE, "max_new_tokens": LENGTH, "eos_token_id": None}
    with mmspec.enable(model, drafted(law)) as handle:
        inputs = {"input_ids": prompt.expand(len(cells), -1), "attention_mask": torch.ones(len(cells), PROMPT).long()}
        out = model.generate(**inputs, **how)[:, PROMPT:]
    assert len(rows) == len(cells) and handle.stats.accepted_by_depth[2] > 10, "rows go two deep into their trees"
    found = dict.fromkeys(law.texts, 0.0)
    for text, wide in zip(out.tolist(), width.tolist(), strict=True):
        found[tuple(text)] = found.get(tuple(text), 0.0) + wide
    return max(abs(found[text] - law.of(text)) for text in law.texts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.every(4)
def test_the_joint_law_of_three_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert distance(KINDS[kind](), monkeypatch) < 1e-5


def test_a_state_that_is_folded_at_another_node_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = AcceptedPath.taken
    monkeypatch.setattr(AcceptedPath, "taken", lambda *told: (right(*told)[0], right(*told)[1] * 0))
    assert distance(tiny_vlms.model("qwen3_5"), monkeypatch) > 1e-3
