"""FLASH: its formulas against slow transcriptions, one pass for a whole draft, training that is what drafting does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import tiny_vlms
import torch
from compared import as_stock
from hostile_drafters import feature_drafter
from torch import Tensor

import mmspec
from mmspec.drafters.flash_vlm import FlashConfig, FlashDrafter, LatentCompressor
from mmspec.drafters.spans import shares
from mmspec.ragged_cache import Lengths, RaggedBuffer
from mmspec.tree import from_parents
from tests.host.test_generate import EXCESS, excess, joint_law, sampled

H = 16
SIZES = {"hidden": H, "intermediate": 24, "heads": 2, "kv_heads": 2, "vocab": 40}

# name → the number of the medium at each row, rows of one batch; −1: padding
LAYOUTS: dict[str, list[list[int]]] = {
    "one image": [[0, 0, *[1] * 7, 0, 0, 0]],
    "image first": [[*[1] * 9, 0, 0]],
    "image last": [[0, 0, 0, *[1] * 6]],
    "several": [[0, *[1] * 5, 0, 0, *[2] * 8, 0]],
    "touching": [[0, *[1] * 5, *[2] * 4, *[3] * 4, 0, 0]],
    "short": [[0, 1, 0, 2, 2, 0]],
    "text": [[0, 0, 0, 0]],
    "ragged": [[-1, -1, 0, *[1] * 7, 0], [0, *[1] * 4, 0, *[2] * 3, 0, 0], [-1] * 5 + [0] * 6, [-1, *[1] * 8, 0, 0]],
    "training": [[0, *[1] * 7, 0, 0, 0], [0, *[1] * 3, 0, 0, -1, -1, -1, -1, -1]],
}


def rows(layout: str, width: int = H, seed: int = 3) -> dict[str, Tensor]:
    """Random rows of a layout, as `encode_prompt` takes them."""
    kinds = torch.tensor(LAYOUTS[layout])
    g = torch.Generator().manual_seed(seed)
    B, L = kinds.shape
    embeds, features = torch.randn(B, L, width, generator=g), torch.randn(B, L, width, generator=g)
    positions = torch.arange(L).expand(B, L)
    paired = {"embeds": embeds, "features": features}
    return {**paired, "visual": kinds.clamp(min=0), "valid": kinds >= 0, "positions": positions}


def randomised(drafter: Any, seed: int = 5) -> Any:
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(0.4 * torch.randn(weight.shape, generator=g) + (weight.dim() == 1))
    return drafter.eval()


def flash(**options: Any) -> FlashDrafter:
    config = {"tree": "dynamic", "depth": 3, "latents": 6, "least": 2, "ratio": 2.0, "tokens": 3, **options}
    return randomised(FlashDrafter(FlashConfig.of({**SIZES, **config})))


def norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean() + eps).sqrt() * weight


def row(drafter: Any, e: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """What attention reads, and the residual, of one pair."""
    residual = drafter.fc.weight @ torch.cat([e, f]) + drafter.fc.bias
    return norm(residual, drafter.input_norm.weight), residual


Entering = tuple[Tensor, Tensor, int]  # of one row: x, the residual, and its place in the image


def literal(
    drafter: Any, given: dict[str, Tensor], b: int, compressed: Callable[[Tensor, Tensor], Iterable[Entering]]
) -> list[tuple[Tensor, ...]]:
    """(x, residual, position, source) of every row that enters for one sequence, row by row; `compressed` says what
    the embeddings and features of one image's rows become."""
    e, f, kind, valid = (given[k][b] for k in ("embeds", "features", "visual", "valid"))
    out, j = [], 0
    while j < len(e):
        stop = j + 1
        if valid[j] and kind[j] == 0:
            out.append((*row(drafter, e[j], f[j]), torch.tensor(j), torch.tensor(j)))
        elif valid[j]:
            while stop < len(e) and kind[stop] == kind[j]:
                stop += 1
            for x, residual, place in compressed(e[j:stop], f[j:stop]):
                out.append((x, residual, torch.tensor(j + place), torch.tensor(-1)))
        j = stop
    return out


def same_rows(encoded: Any, b: int, wanted: list[tuple[Tensor, ...]]) -> None:
    real = encoded.valid[b]
    assert int(real.sum()) == len(wanted)
    for name, values in zip(("x", "residual", "positions", "source"), zip(*wanted, strict=True), strict=True):
        torch.testing.assert_close(getattr(encoded, name)[b][real], torch.stack(values), rtol=1e-4, atol=1e-5)


def latents(drafter: FlashDrafter, f: Tensor) -> Iterable[Entering]:
    """Of the features of one image's rows."""
    A, bank, c, n = drafter.latent, drafter.config.latents, drafter.config, len(f)
    C = min(n, max(c.least, min(bank, round(n / c.ratio))))
    for k in range(C):
        q = A.queries[k * bank // C]
        scores = [float(A.scale * (q @ norm(t, A.norm.weight))) for t in f]
        weights = [math.exp(s - max(scores)) for s in scores]
        latent = sum(w / sum(weights) * t for w, t in zip(weights, f, strict=True))
        yield (*row(drafter, A.embed[k * bank // C], latent), (k + 1) * n // C - 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_enters_is_the_formula(layout: str) -> None:
    drafter, given = flash(), rows(layout)
    with torch.no_grad():
        encoded = drafter.encode_prompt(**given)
        for b in range(len(encoded.x)):
            same_rows(encoded, b, literal(drafter, given, b, lambda _, f: latents(drafter, f)))


def test_latents_are_the_papers_on_features_of_unit_size() -> None:
    """softmax(A Fᵀ) F, in one line, where the norm has nothing to do and the scale is one."""
    latent = LatentCompressor(FlashConfig(H, 24, 2, 2, 40, latents=8, least=8), H)
    F = torch.nn.functional.normalize(torch.randn(2, 20, H), dim=-1) * H**0.5
    with torch.no_grad():
        latent.scale.fill_(1.0)
        _, found = latent(F, torch.ones(2, 20, dtype=torch.bool), torch.tensor([8, 8]))
        torch.testing.assert_close(found, (latent.queries @ F.transpose(1, 2)).softmax(-1) @ F, rtol=1e-4, atol=1e-5)


def test_the_formula_and_the_heads_as_published() -> None:
    """softmax(A Fᵀ) F of features as they are, and all K features from one network, W₂ SiLU(W₁ h)."""
    drafter = flash(formula="published", heads_as="published", latents=8, least=8)
    F, h = torch.randn(2, 20, H), torch.randn(2, 5, H)
    with torch.no_grad():
        _, found = drafter.latent(F, torch.ones(2, 20, dtype=torch.bool), torch.tensor([8, 8]))
        torch.testing.assert_close(found, (drafter.latent.queries @ F.transpose(1, 2)).softmax(-1) @ F)
        wide = torch.nn.functional.silu(h @ drafter.heads.down.weight.T + drafter.heads.down.bias)
        wanted = (wide @ drafter.heads.up.weight.T + drafter.heads.up.bias).view(2, 5, 3, H)
        torch.testing.assert_close(drafter.heads(h), wanted)
    assert wide.shape[-1] == 4 * H and {"latent.norm.weight", "latent.scale"}.isdisjoint(drafter.state_dict())
    given = rows("several")
    steps = drafter.train()(given["embeds"], given["features"], given["visual"], given["valid"], 3)
    sum(s.square().sum() for s in steps).backward()
    assert all(w.grad is not None and bool(w.grad.abs().sum() > 0) for w in drafter.parameters())


def test_the_published_size_is_576_rows_to_64_latents() -> None:
    latent = LatentCompressor(FlashConfig(H, 24, 2, 2, 40), H)
    assert latent.count(torch.tensor([576, 64, 9, 3, 1, 9999])).tolist() == [64, 7, 4, 3, 1, 64]


@pytest.mark.parametrize(("length", "count"), [(7, 3), (20, 20), (5, 1), (64, 7)])
def test_shares_cover_every_row_once(length: int, count: int) -> None:
    first, last, real = shares(torch.tensor([length, 30]), torch.tensor([count, 4]))
    pairs = zip(first[0][real[0]].tolist(), last[0][real[0]].tolist(), strict=True)
    assert [i for a, b in pairs for i in range(a, b + 1)] == list(range(length))


def test_without_latents_it_is_eagle() -> None:
    drafter, given = flash(latents=0), rows("ragged")
    encoded, plain = drafter.encode_prompt(**given), super(FlashDrafter, drafter).encode_prompt(**given)
    assert torch.equal(encoded.x, plain.x) and torch.equal(encoded.source, plain.source)


def test_heads_begin_as_the_layer_itself_and_then_differ() -> None:
    h = torch.randn(2, 3, H)
    fresh = FlashDrafter(FlashConfig(H, 24, 2, 2, 40, out_norm=True))
    assert torch.equal(fresh.ahead(h), fresh.out_norm(h)[:, :, None].expand(-1, -1, 5, -1))
    drafter = flash(out_norm=True)
    with torch.no_grad():
        found = drafter.ahead(h)
        assert torch.equal(found[:, :, 0], drafter.out_norm(h))
        for i in range(1, 3):
            W = drafter.heads.up.weight[(i - 1) * H : i * H]
            v = drafter.heads.down.weight @ h[1, 2]
            wanted = norm(h[1, 2] + W @ (v * torch.sigmoid(v)), drafter.out_norm.weight)
            torch.testing.assert_close(found[1, 2, i], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["several", "training", "text"])
def test_every_head_of_every_row_is_what_drafting_from_there_computes(layout: str) -> None:
    """Packed training against a prompt that ends at the row, read into a memory and drafted from."""
    from mmspec.drafters.memory import FeatureMemory

    drafter, given = flash(), rows(layout)
    e, f, visual, valid = (given[k] for k in ("embeds", "features", "visual", "valid"))
    with torch.no_grad():
        steps = drafter(e, f, visual, valid, 3)
        text = (visual[0] == 0).nonzero()[:, 0].tolist()
        for j in [j for j in text if j and valid[0, j]]:
            before = drafter.encode_prompt(e[:1, :j], f[:1, :j], visual[:1, :j], valid[:1, :j], torch.arange(j)[None])
            n, device = before.x.shape[1], torch.device("cpu")
            memory = FeatureMemory(RaggedBuffer(), Lengths.of([n], device), torch.tensor([j]), before.valid, False)
            memory.slots.append(*drafter.block.keys_values(before.x, before.positions), Lengths.of([0], device))
            z = drafter._read(memory, e[:1, j : j + 1], f[:1, j : j + 1], memory.lengths, 0, None)
            for i, found in enumerate(drafter.ahead(z)[0, 0]):
                torch.testing.assert_close(steps[i][0, j], found, rtol=1e-4, atol=1e-5)
    assert all(bool((s[visual > 0] == 0).all()) for s in steps), "compressed rows predict nothing"


# what is drafted with → how
SHAPES = {
    "chain": {"depth": 4, "width": 1},
    "tree": {"depth": 4, "width": 3, "size": 14},
    "static": {"tree": "mc_sim_7b_63"},
    "drawn": {"tree": "chain", "draws": True},
}


CASES = [("llava", "ragged", shape) for shape in SHAPES]
CASES += [("qwen2_5_vl", "ragged video", "tree"), ("llava", "image last", "static")]


@pytest.mark.parametrize(("name", "kind", "shape"), CASES)
def test_one_pass_a_round_and_the_output_is_the_targets(name: str, kind: str, shape: str) -> None:
    model = tiny_vlms.model(name)
    drafter = feature_drafter("flash", model, latents=3, least=1, ratio=2.0)
    runs: list[int] = []
    drafter.block.register_forward_hook(lambda *_: runs.append(1))
    stats = as_stock(model, tiny_vlms.prompt(name, kind), drafter, **SHAPES[shape]).stats
    assert len(runs) == stats.rounds, "a draft costs one pass of the layer"
    assert stats.drafter["visual rows"] < stats.drafter["visual rows before"]


def test_levels_hold_the_heads_best_tokens_whatever_stands_above() -> None:
    """The published static tree by ranks: a node of rank r at depth i takes the r-th best token of head i."""
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "image first")
    drafter, seen = feature_drafter("flash", model, latents=3, least=1), []
    handle = mmspec.enable(model, drafter=drafter)
    ready = handle.drafter
    levels, propose = ready.levels, ready.propose

    def kept(*args: Any) -> Tensor:
        seen.append(levels(*args))
        return seen[-1]

    def proposed(*args: Any) -> Any:
        draft = propose(*args)
        best = seen[-1][0].topk(4, -1).indices
        parents, depth = draft.tree.parents[0].tolist(), draft.tree.depth[0].tolist()
        assert draft.tokens.shape[1] == 26 and max(depth) == 5
        assert [depth.count(d) for d in range(1, 6)] == [4, 8, 8, 3, 2]
        for node in range(1, 26):
            rank = sum(parents[k] == parents[node] for k in range(1, node))
            assert draft.tokens[0, node] == best[depth[node] - 1, rank]
        assert torch.equal(draft.tree.ancestors[0], from_parents(draft.tree.parents[:1], 5).ancestors[0])
        return draft

    ready.levels, ready.propose = kept, proposed
    tiny_vlms.generate(model, inputs, max_new_tokens=8)
    mmspec.disable(model)
    assert seen


def test_a_drawn_tree_keeps_the_law() -> None:
    """Every node of a level draws from one distribution with one noise; the first two tokens still come as stock
    decoding's."""
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "text only")
    drafter = feature_drafter("flash", model, draws=True)
    how = {"temperature": 1.2, "top_k": 0}
    assert excess(sampled(model, inputs, drafter, **how), joint_law(model, inputs, **how)) < EXCESS


def test_gradients_reach_every_weight() -> None:
    drafter, given = flash().train(), rows("several")
    steps = drafter(given["embeds"], given["features"], given["visual"], given["valid"], 3)
    sum(s.square().sum() for s in steps).backward()
    assert all(w.grad is not None and bool(w.grad.abs().sum() > 0) for w in drafter.parameters())
