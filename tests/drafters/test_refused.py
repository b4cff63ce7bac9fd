"""Settings without a meaning, drafters for other targets, options that a drafter has no use for: refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_llamagen
import tiny_vlms
import torch
import transcribed_drafters
from hostile_drafters import eagle, feature_drafter

import mmspec
from mmspec.config import SpecConfig
from mmspec.drafters.block_config import BlockConfig
from mmspec.drafters.eagle import EagleConfig
from mmspec.drafters.flash_vlm import FlashConfig
from mmspec.drafters.msd import MsdConfig
from mmspec.drafters.specvlm import SpecVlmConfig
from mmspec.drafters.vispec import ViSpecConfig, ViSpecDrafter
from mmspec.pipelines.patching.choose import chosen
from mmspec.pipelines.untrained import build_for_pictures
from mmspec.protocols import TargetInfo
from tests.drafters import test_eagle_image as pictures
from tests.drafters import test_eagle_pictures, test_eagle_vlm, test_flash, test_heads

Options = dict[str, Any]
BLOCK = {"hidden": 64, "intermediate": 48, "heads": 4, "kv_heads": 2, "vocab": tiny_vlms.VOCAB}
CONFIGS: list[tuple[type, Options, str]] = [
    (ViSpecConfig, {"num_q": 0}, "num_q ≥ 1"),
    (ViSpecConfig, {"media": "both"}, "merge, split"),
    (ViSpecConfig, {"parallel_norm": True}, "EAGLE-1/2's layer"),
    (ViSpecConfig, {"features": (0, 1)}, "final feature"),
    (ViSpecConfig, {"rope": "2d", "grid": 2}, "rope '1d'"),
    *((ViSpecConfig, {"rope_share": share}, "is no even number from 2 to") for share in (0.01, 3)),
    *((EagleConfig, {"layers": layers}, "layers must be a whole number of at least 1") for layers in (0, -3, 1.5)),
    (MsdConfig, {"parallel_norm": True}, "EAGLE-1/2's layer"),
    (SpecVlmConfig, {"branches": ("pool", "crop")}, "branches are some of prune"),
    (SpecVlmConfig, {"branches": ("pool", "pool")}, "each once"),
    (SpecVlmConfig, {"branches": ("pool",), "gate": "conv"}, "gate is 'select', 'weight', 'concat' or one of"),
    (SpecVlmConfig, {"gate": "weight"}, "sums two or all of the branches"),
    (SpecVlmConfig, {"gate": "weight", "branches": ("pool",)}, "sums two or all of the branches"),
    (SpecVlmConfig, {"prune_ratio": 0}, "prune_ratio must be"),
    (SpecVlmConfig, {"resampler_heads": 3}, "does not divide"),
    (SpecVlmConfig, {"parallel_norm": True}, "EAGLE"),
    (FlashConfig, {"tokens": 0}, "tokens|latents"),
    (FlashConfig, {"latents": 4, "least": 5}, "tokens|latents"),
    (FlashConfig, {"ratio": 0.5}, "tokens|latents"),
    (FlashConfig, {"latents": -1}, "tokens|latents"),
    (FlashConfig, {"least": 0}, "tokens|latents"),
    (FlashConfig, {"formula": "tokens"}, "tokens|latents"),
    *((BlockConfig, wrong, "this config of a block drafter is not valid") for wrong in (
        {"block": 1}, {"markov": "deep"}, {"taps": 3, "group": 7}, {"windows": (1, 2, 3)})),
]  # fmt: skip


@pytest.mark.parametrize(("config", "wrong", "why"), CONFIGS)
def test_configs(config: type, wrong: Options, why: str) -> None:
    sizes = BLOCK if config is BlockConfig else transcribed_drafters.SHAPE
    with pytest.raises(ValueError, match=why):
        config(**{**sizes, **wrong})


def enabling(made: Callable[[Any], Any], **options: Any) -> Callable[[], Any]:
    """A drafter on a tiny LLaVA."""
    model = tiny_vlms.model("llava")
    return lambda: mmspec.enable(model, made(model), **options)


def drawing(made: Callable[[], Any], **options: Any) -> Callable[[], Any]:
    """A drafter on a tiny LlamaGen."""
    return lambda: mmspec.enable(tiny_llamagen.pipeline(vocab=64), made(), **options)


def heads(shape: Options | None = None, **options: Any) -> Callable[[], Any]:
    return lambda: mmspec.enable(test_heads.pipeline(), test_heads.heads(**(shape or {})), **options)


def named(name: str, **options: Any) -> Callable[[], Any]:
    info = TargetInfo("toy", 4, 1, 1, 1, torch.device("cpu"), torch.float32)
    return lambda: chosen(name, SpecConfig.split(options)[1], info, None)


def image(**options: Any) -> Callable[[], Any]:
    return lambda: pictures.fitted(pictures.drafter(), **options)


def flash(**options: Any) -> Callable[[], Any]:
    return lambda: test_flash.flash(tokens=4).chosen(options)


def guided() -> None:
    target = transcribed_drafters.Target()
    target.streams = 2  # type: ignore[attr-defined]
    prompt = transcribed_drafters.prompt(transcribed_drafters.texts())
    transcribed_drafters.lively(ViSpecDrafter).start(None, target, prompt)


def unlearnable() -> None:
    rows, width = torch.zeros(1, 4, tiny_vlms.HIDDEN), torch.zeros(1, 4, 2 * tiny_vlms.HIDDEN)
    test_eagle_vlm.made(layers=2)(rows, width, None, None, 1)


def many_steps() -> None:
    given = test_flash.rows("text")
    test_flash.flash()(given["embeds"], given["features"], given["visual"], given["valid"], 4)


def fits_no_text() -> None:
    pictures.drafter().fit(TargetInfo("text", 64, 32, 32, 2, torch.device("cpu"), torch.float32), {})


WINDOW = "window must be a whole number ≥ 1"
PATHS = "a list of paths"
TREES = "adaptive=True drafts chains"
NGRAM = r"the ngram drafter has no use for {}; its options are depth, width, size"
CALLS: list[tuple[Callable[[], Any], str]] = [
    # the window
    *((named("jacobi", window=wrong), WINDOW) for wrong in (0, -3, 2.5, True)),
    (named("jacobi", init="diagonal"), "init must be one of uniform, horizontal, vertical, mixture"),
    (named("jacobi", coupling="loose"), "coupling must be one of none, maximal, gumbel"),
    *((named("jacobi", proactive=wrong), "proactive must be") for wrong in ((1, 3), 3)),
    (named("jacobi", proactive=(2, 5), window=4), "window ≥ 5, got window=4"),
    *((named("jacobi", budget=wrong), "budget must be") for wrong in (-0.1, float("nan"))),
    (named("jacobi", depth=3), "the jacobi drafter has no use for depth; its options are window, init, coupling, pro"),
    (named("ngram", window=8, coupling="none"), NGRAM.format("window, coupling")),
    (named("ngram", tree="dynamic"), NGRAM.format("tree")),
    (named("ngram", draws=True), NGRAM.format("draws")),
    (named("plain", depth=3), "plain decoding has no use for depth; it has no options of its own"),
    (heads({"hidden": 16}), "made for another target, of width 16"),
    (heads(window=13), "at most 11 tokens"),
    (heads(proactive=(2, 2)), "Leave proactive out"),
    (heads(depth=3), "depth"),
    (heads({"features": (0, 1)}), "final feature, -1; got features"),
    (lambda: build_for_pictures("heads", test_heads.pipeline(), streams=1), "2 streams; got streams=1, so leave it"),
    # drafters without weights
    (enabling(lambda _: "recycle", width=9), "width must be at most 8"),
    (enabling(lambda _: "recycle", memory=9), "no use for memory"),
    (enabling(lambda _: "suffix", memory=0), "memory must be a whole number"),
    (enabling(lambda _: "suffix", prune=0.5), "no use for prune"),
    (enabling(lambda _: "ngram", prune=0.5), "no use for prune"),
    *((enabling(lambda _, n=n: n, lookup=True), "leave lookup out") for n in ("plain", "ngram", "suffix", "recycle")),
    (enabling(lambda _: "ngram", lookup="yes"), "lookup must be True or False"),
    (lambda: mmspec.enable(test_heads.pipeline(), prefix_cache="1MB"), "draws pictures; leave it out"),
    # trees
    (enabling(eagle, adaptive=True, width=3, depth=3), TREES),
    (enabling(eagle, adaptive=True, tree="reverse_balanced_25"), TREES),
    (enabling(eagle, width=129), "129 branches per node needs at least as many tokens to propose; got 128, so lower"),
    (enabling(lambda model: eagle(model, draft_vocab=50), width=51), "got 50, so lower width"),
    (enabling(lambda _: tiny_vlms.text(), width=129), "got 128, so lower width"),
    (image(tree="oak"), "unknown tree 'oak'; choose from dynamic, chain"),
    (image(tree=[]), r"a list of paths of ranks ≥ 0, such as \[\[0\], \[0, 0\], \[1\]\]; got \[\]"),
    (image(tree=[[0], [-1]]), r"ranks ≥ 0, .*; got \[\[0\], \[-1\]\]"),
    *((image(tree=wrong), PATHS) for wrong in ([0, 1], 7, [[0], []])),
    (image(tree=[[0], [2]]), r"lacks \[1\]"),
    (image(tree=[[0], [1]], size=3), "a shape of its own; leave out size"),
    (image(tree="reverse_balanced_25", depth=3), "a shape of its own; leave out depth"),
    (image(draws=True), "needs a static tree"),
    (lambda: pictures.drafter(draft_vocab=10, parallel_norm=True, fc_bias=False, features=(0, 1), tree="chain",
                              draws=True), "one of its own"),
    (image(window=4), "no use for window"),
    (flash(depth=6), "predicts 4 tokens a pass"),
    (flash(tree="mc_sim_7b_63"), "predicts 4 tokens a pass"),
    # a part of the target's head
    *((enabling(eagle, draft_vocab=wrong), "tokens ≥ 1, a list") for wrong in (
        0, -3, True, 2.0, [], "ab", [1, -1], torch.rand(3), torch.eye(3).long())),
    (enabling(eagle, draft_vocab=tiny_vlms.VOCAB + 1), "asks for 129 tokens; .* has 128"),
    (enabling(eagle, draft_vocab=[3, tiny_vlms.VOCAB]), "asks for the id 128; .* has 128"),
    (enabling(eagle, draft_vocab=[3, 4], depth=3, width=3, size=10), "3 branches"),
    (enabling(eagle, draft_vocab=[3, 4], tree="reverse_balanced_25"), "4 branches"),
    (enabling(eagle, draft_vocab=50, tree="reverse_balanced_25", draws=True), "True needs the target's whole head"),
    (enabling(lambda model: eagle(model, draft_vocab=50), draft_vocab=30), "a head of its own, with 50"),
    (enabling(lambda _: "ngram", draft_vocab=30), "no use for draft_v"),
    (drawing(lambda: pictures.drafter(), draft_vocab=30), "draws pictures"),
    (drawing(lambda: "mtp"), "'mtp' drafts text, and .* draws pictures; use 'jacobi'"),
    # rows that are left out
    (enabling(lambda model: feature_drafter("eagle", model), prune=1.5), "a share from 0 to 1"),
    (enabling(lambda model: feature_drafter("eagle", model), prune=0.5, prune_by="attention"),
     "unknown option 'prune_by'; choose from .*prune"),
    # positions, streams, training
    (lambda: pictures.drafter(rope="2d", grid=0), "grid ≥ 1"),
    (lambda: pictures.drafter(rope="1d"), "grid 0"),
    (lambda: pictures.drafter(heads=16), "of 4"),
    (drawing(lambda: pictures.drafter(rope="1d", grid=0)),
     r"rotary positions '1d', base 10000 \(target: '2d' on a grid of 4, base 10000\)"),
    (drawing(lambda: pictures.drafter(grid=8)), "on a grid of 8"),
    (drawing(lambda: pictures.drafter(rope_theta=500.0)), "base 500"),
    (fits_no_text, "rotary positions '2d' on a grid of 4"),
    (guided, r"'vispec' supports no guidance"),
    (unlearnable, "cannot be trained here"),
    (many_steps, "predicts 3 tokens a pass"),
    (lambda: build_for_pictures("heads", test_eagle_pictures.painted("janus")), "'heads' draft for LlamaGen alone"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "why"), CALLS, ids=[f"{n}: {why}" for n, (_, why) in enumerate(CALLS)])
def test_calls(call: Callable[[], Any], why: str) -> None:
    with pytest.raises((ValueError, TypeError), match=why):
        call()
