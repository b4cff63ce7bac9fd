"""LlamaGen against a literal transcription of its formulas: every trap, decoding with a cache, guidance, bad input."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import hostile_drafters
import pytest
import tiny_llamagen as tiny
import torch
from tiny_vlms import VOCAB
from torch import Tensor

import mmspec
from mmspec import registry, zoo
from mmspec.kernels import reference as ops
from mmspec.pipelines.host.cache import RaggedCache
from mmspec.pipelines.host.hooks import swap
from mmspec.pipelines.host.processors.guidance import Guidance
from mmspec.pipelines.host.processors.table import Processors
from mmspec.pipelines.llamagen import captions
from mmspec.pipelines.llamagen import pipeline as llamagen
from mmspec.pipelines.target.model import Request
from mmspec.pipelines.target.noise import TorchNoise
from mmspec.session import Row, Session
from mmspec.tree import chain
from mmspec.types import NO_TOKEN, Draft
from mmspec.zoo import pictures

PROMPTS = ["a small red circle", "a large blue striped square left of a circle on the", "square"]
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:prompts are only lower-cased")


def seeded(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def call(kind: str, rows: slice = slice(None)) -> dict[str, Any]:
    """What to draw, three rows of it."""
    return {"prompt": PROMPTS[rows]} if kind == "text" else {"class_labels": [1, 2, 9][rows]}


# -- the model, from the formulas -------------------------------------------------------------------------------------


def literal(model: Any, prefix: Tensor, valid: Tensor, ids: list[int], wrong: str = "") -> Tensor:
    """Logits [P + n, V], float64, of one row and stream, place by place; `wrong` names a trap to fall into."""
    w = {name: t.double() for name, t in model.state_dict().items()}
    c, P, n = model.config, len(prefix), len(ids)
    width, heads = c.dim // c.heads, c.heads
    x = torch.cat([prefix.double(), w["tok_embeddings.weight"][ids]])

    def norm(v: Tensor, name: str) -> Tensor:
        return v / (v.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[name]

    def turned(v: Tensor) -> Tensor:  # [P + n, width]
        out = torch.zeros_like(v) if wrong != "identity prefix" else v.clone()
        for place in range(n):
            row, column = divmod(place, c.grid)
            if wrong == "columns first":
                row, column = column, row
            j, i = torch.arange(width // 4, dtype=torch.float64), torch.arange(width // 2)
            angle = torch.cat([axis * 10000 ** (-2 * j / (width / 2)) for axis in (row, column)])
            first, second = (i, i + width // 2) if wrong == "halves" else (2 * i, 2 * i + 1)
            one, two = v[P + place, first], v[P + place, second]
            out[P + place, first] = one * angle.cos() - two * angle.sin()
            out[P + place, second] = two * angle.cos() + one * angle.sin()
        return out

    seen = torch.ones(P + n, P + n, dtype=torch.bool).tril()
    seen[:, :P] &= valid
    seen |= torch.eye(P + n, dtype=torch.bool)
    for i in range(c.num_layers):
        at = f"layers.{i}."
        q, k, v = (norm(x, f"{at}attention_norm.weight") @ w[f"{at}attention.wqkv.weight"].T).chunk(3, -1)
        mixed = []
        for h in range(heads):
            one = slice(h * width, (h + 1) * width)
            scores = turned(q[:, one]) @ turned(k[:, one]).T / width**0.5
            mixed.append(scores.masked_fill(~seen, -math.inf).softmax(-1) @ v[:, one])
        x = x + torch.cat(mixed, -1) @ w[f"{at}attention.wo.weight"].T
        m = norm(x, f"{at}ffn_norm.weight")
        up, gate = m @ w[f"{at}feed_forward.w3.weight"].T, m @ w[f"{at}feed_forward.w1.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w[f"{at}feed_forward.w2.weight"].T
    return norm(x, "norm.weight") @ w["output.weight"].T


def streams(pipe: Any, kind: str, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """Prefix embeddings of one row, with and without its condition, and which places are real."""
    model = pipe.transformer
    condition, valid = pipe._condition(call("text")["prompt"] if kind == "text" else None,
                                       None if kind == "text" else call("class")["class_labels"], False)  # fmt: skip
    table = model.state_dict()
    if kind == "class":
        rows = table["cls_embedding.embedding_table.weight"]
        return rows[condition[row], None], rows[-1:], valid[row]

    def projected(features: Tensor) -> Tensor:
        h = features @ table["cls_embedding.cap_proj.fc1.weight"].T
        h = 0.5 * h * (1 + torch.tanh((2 / math.pi) ** 0.5 * (h + 0.044715 * h**3)))
        return h @ table["cls_embedding.cap_proj.fc2.weight"].T

    return projected(condition[row]), projected(table["cls_embedding.uncond_embedding"]), valid[row]


def literal_ar(pipe: Any, kind: str, row: int, seed: int, scale: float, k: int, interval: int = -1,
               full_null: bool = False) -> list[int]:  # fmt: skip
    """Plain decoding without a cache: guidance, top-k, and Gumbel noise by position."""
    c, u, valid = streams(pipe, kind, row)
    ids: list[int] = []
    for t in range(pipe.transformer.config.grid**2):
        logits = literal(pipe.transformer, c, valid, ids)[-1]
        if scale > 1 and (interval < 0 or t < interval + 2):
            null = literal(pipe.transformer, u, valid | full_null, ids)[-1]
            logits = null + scale * (logits - null)
        logits = torch.where(logits >= logits.sort(descending=True).values[k - 1], logits, -math.inf)
        ids.append(int((logits + ops.gumbel(torch.tensor([seed]), torch.tensor([[t]]), len(logits))[0, 0]).argmax()))
    return ids


def forward(model: Any, prefix: Tensor, valid: Tensor, ids: list[int], past: Any = None) -> Tensor:
    """The model's own logits over prefix and tokens, in one piece."""
    P, n = len(prefix), len(ids)
    seen = torch.ones(P + n, P + n, dtype=torch.bool).tril()
    seen[:, :P] &= valid
    seen |= torch.eye(P + n, dtype=torch.bool)
    embeds = torch.cat([prefix, model.tok_embeddings(torch.tensor(ids, dtype=torch.long))])
    places = torch.tensor([[-1] * P + list(range(n))])
    return model.head(model(embeds[None], places, seen[None], past))[0]


@pytest.mark.parametrize("kind", ["text", "class"])
@torch.no_grad()
def test_model_is_the_formulas(kind):
    pipe = tiny.pipeline(kind)
    c, u, valid = streams(pipe, kind, 0)
    ids = torch.randint(64, (15,)).tolist()
    for prefix in (c, u):
        assert torch.allclose(forward(pipe.transformer, prefix, valid, ids).double(),
                              literal(pipe.transformer, prefix, valid, ids), atol=1e-4)  # fmt: skip


@pytest.mark.parametrize("wrong", ["identity prefix", "columns first", "halves"])
@torch.no_grad()
def test_every_trap_of_the_rotation_would_show(wrong):
    pipe = tiny.pipeline()
    c, _, valid = streams(pipe, "text", 0)
    ids = torch.randint(64, (15,)).tolist()
    off = forward(pipe.transformer, c, valid, ids).double() - literal(pipe.transformer, c, valid, ids, wrong)
    assert off[len(c) :].abs().max() > 0.05


@pytest.mark.parametrize("kind", ["text", "class"])
@torch.no_grad()
def test_prefill_and_steps_are_the_full_forward(kind):
    pipe = tiny.pipeline(kind)
    c, _, valid = streams(pipe, kind, 1)
    ids = torch.randint(64, (6,)).tolist()
    whole, cache, P = forward(pipe.transformer, c, valid, ids), RaggedCache(1, c.device, 0), len(c)
    got = [forward(pipe.transformer, c, valid, [], cache)]
    cache.advance(P)
    for n, token in enumerate(ids):
        seen = torch.cat([valid, torch.ones(n + 1, dtype=torch.bool)])[None, None]
        embeds = pipe.transformer.tok_embeddings(torch.tensor([[token]]))
        got.append(pipe.transformer.head(pipe.transformer(embeds, torch.tensor([[n]]), seen, cache))[0])
        cache.advance(1)
    assert torch.allclose(torch.cat(got), whole, atol=1e-4)


# -- the tokenizer ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_codes_are_normalised_in_both_directions():
    model, ids, pixels = tiny.vq(), torch.randint(64, (2, 4, 4)), torch.rand(2, 3, 8, 8) * 2 - 1
    rows = torch.stack([row / row.norm() for row in model.quantize.embedding.weight])
    assert (model.quantize.embedding.weight.norm(dim=-1) - 1).abs().min() > 1e-3
    z = model.quant_conv(model.encoder(pixels)).permute(0, 2, 3, 1)
    z = z / z.norm(dim=-1, keepdim=True)
    nearest = (z[..., None, :] - rows).pow(2).sum(-1).argmin(-1)
    assert torch.equal(model.encode(pixels), nearest)
    vectors = model.quantize.embedding.weight[ids]
    assert torch.allclose(model.decode(ids), model.render(vectors / vectors.norm(dim=-1, keepdim=True)), atol=1e-5)
    assert not torch.allclose(model.decode(ids), model.render(vectors), atol=1e-2)
    before = model.decode(ids), model.encode(pixels)
    model.quantize.embedding.weight.mul_(torch.rand(64, 1) + 0.5)
    assert torch.allclose(model.decode(ids), before[0], atol=1e-5) and torch.equal(model.encode(pixels), before[1])


# -- drawing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "class"])
@pytest.mark.parametrize("how", [{"scale": 3.0}, {"scale": 1.0}, {"scale": 3.0, "interval": 4}], ids=str)
def test_pictures_are_the_literal_loop_s(kind, how):
    pipe = tiny.pipeline(kind, grid=3)
    seed = torch.randint(2**62, (1,), generator=seeded(3)[0]).item()
    interval = how.get("interval", -1)
    got = pipe(**call(kind, slice(0, 1)), generator=seeded(3), guidance_scale=how["scale"], top_k=9,
               guidance_interval=interval, output_type="latent", clean_caption=False)  # fmt: skip
    assert got.tokens.flatten().tolist() == literal_ar(pipe, kind, 0, seed, how["scale"], 9, interval)


def test_the_null_branch_has_the_prompt_s_mask():
    pipe = tiny.pipeline(grid=3)
    seed = torch.randint(2**62, (1,), generator=seeded(3)[0]).item()
    masked, full = (literal_ar(pipe, "text", 0, seed, 7.5, 20, full_null=full) for full in (False, True))
    got = pipe(PROMPTS[0], generator=seeded(3), guidance_scale=7.5, top_k=20, output_type="latent")
    assert got.tokens.flatten().tolist() == masked != full


@pytest.mark.parametrize(("interval", "guided"), [(-1, 16), (0, 2), (3, 5), (99, 16)])
def test_the_interval_guides_two_tokens_more(interval, guided):
    tokens = None if interval < 0 else interval + 2
    logits, position = torch.randn(2, 16, 5), torch.arange(16)[None]
    c, u = logits
    out = Guidance(2.5, tokens=tokens)(logits, position)[0]
    assert torch.equal(out[:guided], (u + 2.5 * (c - u))[:guided]) and torch.equal(out[guided:], c[guided:])


@pytest.mark.parametrize(("scale", "rows"), [(1.0, 3), (0.0, 3), (1.01, 6)])
def test_no_guidance_no_null_branch_and_the_last_token_is_never_fed(scale, rows):
    pipe, fed = tiny.pipeline("class"), []
    spy = {"__call__": lambda self, embeds, places, *more: fed.append(places) or self.forward(embeds, places, *more)}
    swap(pipe.transformer, type("Spy", (), spy))
    pipe(**call("class"), guidance_scale=scale, output_type="latent")
    assert {len(p) for p in fed} == {rows}
    assert [p[0].tolist() for p in fed] == [[-1], *([n] for n in range(15))]


def test_ties_at_top_k_are_kept():
    pipe = tiny.pipeline("class")
    with torch.no_grad():
        pipe.transformer.output.weight[1:] = pipe.transformer.output.weight[1]
    how = {"guidance_scale": 1.0, "top_k": 1, "output_type": "latent", "num_images_per_prompt": 4}
    drawn = set(pipe(class_labels=[3], generator=seeded(*range(4)), **how).tokens.flatten().tolist())
    assert len(drawn - {0}) > 20  # the likeliest of them is one of 63 equals


@pytest.mark.parametrize("kind", ["text", "class"])
def test_a_row_alone_is_the_row_in_a_batch(kind):
    pipe = tiny.pipeline(kind)
    together = pipe(**call(kind), generator=seeded(4, 5, 6), output_type="latent").tokens
    for b in range(3):
        alone = pipe(**call(kind, slice(b, b + 1)), generator=seeded(4 + b)[0], output_type="latent").tokens
        assert torch.equal(alone[0], together[b])
    assert not torch.equal(together[0], together[1])
    twice = {**call(kind, slice(0, 1)), "num_images_per_prompt": 2, "output_type": "latent"}
    assert torch.equal(pipe(**twice, generator=seeded(9, 4)).tokens[1], together[0])


class Answers:
    """Knows the pictures to come."""

    def __init__(self, tokens: Tensor) -> None:
        self.rows = tokens.flatten(1).tolist()

    def after(self, row: Any, count: int) -> list[int]:
        return (self.rows[row.index][row.generated :] + [3] * count)[:count]


TRAINED = tuple(name for name, entry in registry.DRAFTERS.items() if entry.trained)
SCRIPTED = [name for name in hostile_drafters.DRAFTERS if not name.startswith(TRAINED)]
DRAFTS = {
    **{name: ({}, name) for name in SCRIPTED},
    **{f"jacobi {w}": ({"window": w}, "jacobi") for w in (1, 5, 40)},
    "jacobi tree": ({"window": 8, "proactive": (2, 3)}, "jacobi"),
}


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("kind", ["text", "class"])
@pytest.mark.every(4)
def test_drafts_do_not_change_a_seed_s_picture(kind, name):
    pipe = tiny.pipeline(kind, vocab=VOCAB)
    how = {"top_k": 40, "top_p": 0.9, "temperature": 0.9, "output_type": "latent"}
    plain = pipe(**call(kind), generator=seeded(4, 5, 6), **how).tokens
    options, drafter = DRAFTS[name]
    if drafter in hostile_drafters.DRAFTERS and drafter != "ngram":
        drafter = hostile_drafters.DRAFTERS[drafter](None, Answers(plain))
    with mmspec.enable(pipe, drafter, reproducible=True, **options) as handle:
        drafted = pipe(**call(kind), generator=seeded(4, 5, 6), **how)
        assert torch.equal(drafted.tokens, plain)
        one = pipe(**call(kind, slice(1, 2)), generator=seeded(5), **how).tokens
        assert torch.equal(one[0], plain[1])
        assert drafted.spent == [0.0] * 3 and handle.stats.tokens == 4 * 16
    assert type(pipe) is llamagen.LlamaGenPipeline
    assert drafted.stats.rounds < 8 or name != "always right"


def test_without_noise_drafts_change_nothing_either():
    pipe = tiny.pipeline(vocab=VOCAB)
    plain = pipe(**call("text"), temperature=0, output_type="latent").tokens
    with (
        mmspec.enable(pipe, rule="typical(epsilon=0.3, delta=0.1)"),
        pytest.warns(UserWarning, match="no effect on greedy calls"),
    ):
        assert torch.equal(pipe(**call("text"), temperature=0, output_type="latent").tokens, plain)
    with mmspec.enable(pipe, hostile_drafters.DRAFTERS["right within"](None, Answers(plain))) as handle:
        assert torch.equal(pipe(**call("text"), temperature=0, output_type="latent").tokens, plain)
        assert handle.stats.accepted > 0


def test_drawing_by_the_law_has_the_law_of_plain_decoding():
    tiny.law_of_the_first_two_is_kept()


@pytest.mark.parametrize(("rule", "budget"), [("lantern(k=10, delta=0.3)", 0.2), ("lantern(k=10, lam=2.0)", None)])
def test_every_picture_says_what_a_relaxed_rule_spent(rule, budget):
    pipe, how = tiny.pipeline("class"), {"generator": seeded(1, 2, 3), "output_type": "latent"}
    with mmspec.enable(pipe, "jacobi", window=8, rule=rule, budget=budget) as handle:
        made = pipe(**call("class"), **how)
    assert len(made.spent) == 3 and max(made.spent) > 0 and all(s <= (budget or 99) + 1e-9 for s in made.spent)
    assert handle.stats.spent == pytest.approx(sum(made.spent)) and not handle.stats.lossless


@pytest.mark.parametrize("rule", ["lantern", "gsd", "grouped", "pooled"])
@pytest.mark.parametrize("size", [0.5, 2])
def test_a_rule_needs_the_codes_of_all_tokens(rule, size):
    pipe = tiny.pipeline("class")
    codes = torch.randn(int(pipe.transformer.config.vocab * size), 4)
    own = {"lantern": {"k": 3, "lam": 2.0}, "gsd": {"group": 3, "distance": 1.0}}.get(rule, {"cells": 4})
    with pytest.raises(ValueError, match="needs a row for every token id"):
        mmspec.enable(pipe, "jacobi", rule=getattr(mmspec.rules, rule)(codes, **own))


def test_features_are_streams_side_by_side():
    pipe, seen = tiny.pipeline(), []

    class Reader(hostile_drafters.Scripted):
        features = (1, -1)

        def start(self, session: Any, target: Any, prompt: Any) -> None:
            seen.append((prompt, session.last.scores.hidden, target))

    with mmspec.enable(pipe, Reader(lambda row, g: ([1], [0]))):
        pipe(**call("text"), generator=seeded(4, 5, 6), output_type="latent", guidance_scale=3.0)
    prompt, hidden, target = seen[0]
    assert prompt.embeds.shape == (3, 12, 64) and prompt.hidden.shape == (3, 12, 128) and hidden.shape == (3, 1, 128)
    assert torch.equal(hidden, prompt.hidden[:, -1:]) and target.streams == 2 and prompt.grid == (4, 4)
    final = torch.cat([prompt.hidden[..., 32:64], prompt.hidden[..., 96:]], -1)
    c, u = (literal(pipe.transformer, e, prompt.valid[0], []) for e in prompt.embeds[0].chunk(2, -1))
    assert torch.allclose(target.head(final)[0].double(), u + 3 * (c - u), atol=2e-3)
    assert not any("_mmspec_stock" in vars(type(m)) for m in pipe.transformer.modules())


# -- the prompt -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_text_stands_at_the_end_of_the_prefix():
    pipe = tiny.pipeline()
    features, valid = pipe.encode_prompt(PROMPTS, clean_caption=False)
    for b, text in enumerate(PROMPTS):
        ids = pipe.tokenizer(text, return_tensors="pt").input_ids
        alone = pipe.text_encoder(ids).last_hidden_state[0]
        n = len(alone)
        assert valid[b].tolist() == [False] * (12 - n) + [True] * n
        assert (features[b, : 12 - n] == 0).all() and torch.allclose(features[b, 12 - n :], alone, atol=1e-5)


def test_cleaning_is_asked_for_once_and_lower_cases(monkeypatch):
    monkeypatch.setattr(captions, "is_ftfy_available", lambda: False)
    with pytest.warns(UserWarning, match="only lower-cased"):
        assert captions.cleaned([" A Cat "]) == ["a cat"]


def test_cleaning_removes_what_training_removed():
    pytest.importorskip("ftfy")
    pytest.importorskip("bs4")
    assert captions.cleaned(["<b>A Cat</b> http://x.com/y  «big» ++ 1234567"]) == ['a cat "big"']


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "class"])
def test_saved_and_loaded_draws_the_same(tmp_path, kind):
    pipe = tiny.pipeline(kind)
    before = pipe(**call(kind), generator=seeded(1, 2, 3), output_type="np").images
    with mmspec.enable(pipe, "ngram"):
        pipe.save_pretrained(tmp_path)  # an enabled pipeline is saved as the stock one
    loaded = mmspec.LlamaGenPipeline.from_pretrained(tmp_path)
    assert type(loaded) is mmspec.LlamaGenPipeline
    loaded.set_progress_bar_config(disable=True)
    assert (loaded(**call(kind), generator=seeded(1, 2, 3), output_type="np").images == before).all()


@pytest.mark.full
def test_importing_mmspec_changes_nothing_in_diffusers():
    code = (
        "import sys; before = list(sys.meta_path); import mmspec; assert sys.meta_path == before\n"
        "import diffusers; kind = type(diffusers); mmspec.LlamaGenPipeline\n"
        "assert type(diffusers) is kind and not hasattr(diffusers, 'LlamaGenPipeline')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_defaults_are_the_table_s_or_the_pipeline_s_own(tmp_path):
    assert tiny.pipeline()._settings({}, "pil", 1) == llamagen.TEXT
    assert tiny.pipeline("class")._settings({"top_k": 0}, "pil", 1) == {**llamagen.CLASS, "top_k": 0}
    assert (llamagen.TEXT["guidance_scale"], llamagen.TEXT["top_k"]) == (7.5, 1000)
    assert (llamagen.CLASS["guidance_scale"], llamagen.CLASS["top_k"]) == (4.0, 2000)
    own = mmspec.LlamaGenPipeline(tiny.transformer("class"), tiny.vq(), defaults={"top_k": 7})
    own.save_pretrained(tmp_path)
    assert mmspec.LlamaGenPipeline.from_pretrained(tmp_path)._settings({}, "pil", 1) == {**llamagen.CLASS, "top_k": 7}


def test_output_types_and_progress():
    pipe, steps = tiny.pipeline("class"), []
    how = {"class_labels": [1, 2], "generator": seeded(1, 2)}
    made = pipe(**how, callback_on_step_end=lambda p, i, done, more: steps.append((i, done, more["tokens"])))
    assert [image.size for image in made.images] == [(8, 8)] * 2 and made.tokens.shape == (2, 4, 4)
    assert [(i, done) for i, done, _ in steps] == [(i, i + 1) for i in range(16)]
    assert steps[-1][2] == made.tokens.flatten(1).tolist() and made.stats.rounds == 15
    how["generator"] = seeded(1, 2)
    (pixels,) = pipe(**how, output_type="pt", return_dict=False)
    assert pixels.shape == (2, 3, 8, 8) and 0 <= pixels.min() < pixels.max() <= 1
    expected = (pipe.vqvae.decode(made.tokens) / 2 + 0.5).clamp(0, 1)
    assert torch.allclose(pixels, expected, atol=1e-6)


@torch.no_grad()
def test_half_precision_runs():
    pipe = tiny.pipeline().to(torch.bfloat16)
    plain = pipe(**call("text"), generator=seeded(1, 2, 3), output_type="latent").tokens
    assert plain.shape == (3, 4, 4)
    assert pipe(**call("text"), generator=seeded(1, 2, 3), output_type="pt").images.dtype == torch.float32


# -- what a stock loop draws ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [1, 4, 30])
def test_torch_noise_is_multinomial_s(ahead):
    steps, B, V = 12, 3, 20
    logits = torch.randn(B, steps, V, generator=seeded(0)[0]) * 2
    g, mine = seeded(5, 5)
    stock = torch.stack([torch.multinomial(logits[:, t].softmax(-1), 1, generator=g)[:, 0] for t in range(steps)], 1)
    rows = [Row([], 0, steps, 0, index=b) for b in range(B)]
    session = Session(list(rows), logits.device)
    noise = TorchNoise(mine)
    request = Request(Processors([]), True, noise)
    moves = seeded(2)[0]
    while session.rows:
        size = ahead
        tree = chain(size, logits.device).expand(len(session.rows))
        draft = Draft(torch.full((len(session.rows), size), NO_TOKEN), tree)
        at = (session.emitted[:, None] + tree.depth).clamp(max=steps - 1)
        index = torch.tensor([row.index for row in session.rows])
        raw = logits[index[:, None], at]
        ids = request.scores(raw, raw, session, draft, None).p.ids
        counts = torch.randint(1, size + 1, (len(session.rows),), generator=moves)
        for b, row in enumerate(session.rows):
            row.take(ids[b, : int(counts[b])].tolist())
        session.emitted = torch.tensor([row.generated for row in session.rows])
        keep = [i for i, row in enumerate(session.rows) if not row.done]
        session.rows, session.emitted = [session.rows[i] for i in keep], session.emitted[keep]
    noise.close(steps)
    assert [row.tokens for row in rows] == stock.tolist()
    assert torch.equal(mine.get_state(), g.get_state())


# -- bad input --------------------------------------------------------------------------------------------------------


BAD = [
    ("text", {"prompt": " ".join(["circle"] * 12)}, "has 13 tokens with the end token; this model reads at most 12"),
    *(("text", {"prompt": wrong}, "is a text that is not empty, or a list of them; got") for wrong in (5, "", [])),
    ("text", {}, "draws from a prompt.*got none"),
    ("text", {"prompt": "circle", "class_labels": 1}, "got prompt and class_labels"),
    ("text", {"class_labels": 1}, "draws from a prompt.*got class_labels"),
    ("class", {"prompt": "circle"}, r"class_labels \(0 to 9\).*got prompt"),
    ("class", {"class_labels": [1, 10, -1]}, r"from 0 to 9; got \[10, -1\]"),
    ("class", {"class_labels": []}, "got none"),
    ("class", {"class_labels": [2, 2.5]}, r"from 0 to 9; got \[2.5\]"),
    ("class", {"class_labels": "3"}, r"from 0 to 9; got \['3'\]"),
    ("class", {"class_labels": 1, "guidance_scale": math.nan}, "guidance_scale must be a number"),
    ("class", {"class_labels": [1, 2], "generator": seeded(1)}, "one for each of the 2 pictures; got 1"),
    ("class", {"class_labels": [1, 2], "generator": 7}, "generator must be a torch.Generator, .*; got 7"),
    ("class", {"class_labels": 1, "output_type": "png"}, "output_type must be one of pil, pt, np, latent"),
    *(("class", {"class_labels": 1, "top_k": wrong}, "top_k must be") for wrong in (-1, "5", 2.5)),
    *(("class", {"class_labels": 1, "top_p": wrong}, "top_p must be") for wrong in (0.0, "1")),
    *(("class", {"class_labels": 1, "temperature": wrong}, "temperature must be") for wrong in (-1.0, "1")),
    *(("class", {"class_labels": 1, "guidance_interval": wrong}, "guidance_interval must be") for wrong in (None, -2)),
    ("class", {"class_labels": 1, "num_images_per_prompt": 0}, "num_images_per_prompt must be"),
    ("class", {"class_labels": 1, "num_images_per_prompt": 1.5}, "a whole number ≥ 1; got 1.5"),
]


@pytest.mark.parametrize(("kind", "arguments", "message"), BAD, ids=[m for *_, m in BAD])
def test_bad_calls_say_what_is_wrong(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny.pipeline(kind)(**arguments)


def test_parts_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match="draws from 64 tokens, but this VQ tokenizer has 32 codes"):
        mmspec.LlamaGenPipeline(tiny.transformer("class"), tiny.vq(codes=32))
    with pytest.raises(ValueError, match="width 16, but this text encoder has 24"):
        mmspec.LlamaGenPipeline(tiny.transformer(), tiny.vq(), tiny.text_encoder(d_model=24), tiny.tokenizer())
    with pytest.raises(ValueError, match="unknown default 'cfg'"):
        mmspec.LlamaGenPipeline(tiny.transformer(), tiny.vq(), defaults={"cfg": 3})
    with pytest.raises(ValueError, match="needs the components text_encoder and tokenizer"):
        mmspec.LlamaGenPipeline(tiny.transformer(), tiny.vq())("a circle")


@pytest.fixture(scope="module")
def embedded() -> tuple[Any, Callable[[int], Tensor]]:
    """The model that comes with mmspec, and the tokens that plain decoding draws with a seed alone."""
    pipe = mmspec.LlamaGenPipeline.from_pretrained(zoo.path("scenes-llamagen"))
    pipe.set_progress_bar_config(disable=True)
    prompts = [prompt for _, prompt in pictures.held_out(4)]
    return pipe, cache(lambda b: draw_embedded(pipe, prompts, [b])[0])


def draw_embedded(pipe: Any, prompts: list[str], rows: list[int]) -> Tensor:
    generators = [torch.Generator().manual_seed(b) for b in rows]
    return pipe([prompts[b] for b in rows], generator=generators, output_type="latent").tokens


@pytest.mark.parametrize("window", [1, 8, 64])
@pytest.mark.parametrize("rows", [[2], [0, 1, 2, 3]], ids=["batch-1", "batch-4"])
@pytest.mark.every(9)
def test_the_embedded_model_draws_the_very_same_picture(embedded: Any, window: int, rows: list[int]) -> None:
    pipe, alone = embedded
    with mmspec.enable(pipe, drafter="jacobi", window=window, reproducible=True) as handle:
        tokens = draw_embedded(pipe, [prompt for _, prompt in pictures.held_out(4)], rows)
    assert all(torch.equal(tokens[i], alone(b)) for i, b in enumerate(rows))
    assert window == 1 or handle.stats.tokens_per_target_call > 2
