"""ViSpec and MSD against literal transcriptions of the published walk and rows; positions, memory, ablations."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_vlms
import torch
import transcribed_drafters
from compared import as_stock
from hostile_drafters import feature_drafter
from torch import Tensor
from transcribed_drafters import H, More, Row, dense, lively, looked, rms, weights

from mmspec.drafters.eagle import EagleDrafter
from mmspec.drafters.msd import MsdDrafter
from mmspec.drafters.vispec import ViSpecConfig, ViSpecDrafter


def walk_of_vispec(drafter: Any, e: Tensor, h: Tensor, seen: list[int]) -> tuple[list[Row], More]:
    """Rows from left to right: text with the g so far; of an image its queries' answers, of which the last is g."""
    w, c = weights(drafter), drafter.config
    D = H // c.heads

    def normed(x: Tensor) -> Tensor:
        return rms(w, "embed_norm", x, c.norm_eps)

    def text(x: Tensor, feature: Tensor, g: Tensor) -> Tensor:
        both = dense(w, "img_fc", torch.cat([feature, g if c.global_vector else 0 * g]))
        return dense(w, "fc", torch.cat([normed(x), both]))

    def asked(image: list[Tensor]) -> list[Tensor]:
        pairs = [dense(w, "adaptor.kv", normed(x)).chunk(2) for x in image]
        found = []
        for q in w["adaptor.q"]:
            heads = [slice(i * D, i * D + D) for i in range(c.heads)]
            o = [looked(q[i], [k[at] for k, _ in pairs], [v[at] for _, v in pairs]) for i, at in enumerate(heads)]
            found.append(dense(w, "adaptor.out", torch.cat(o)))
        return found

    rows, g, j = [], torch.zeros(H).double(), 0
    while j < len(e):
        if not seen[j]:
            rows.append((text(e[j], h[j], g), j))
            j += 1
            continue
        z = j
        while z + 1 < len(e) and seen[z + 1] and (c.media == "merge" or seen[z + 1] == seen[j]):
            z += 1
        answers = asked(list(e[j : z + 1]))
        if c.summaries:
            rows += [(answers[i], z - c.num_q + 2 + i) for i in range(c.num_q - 1)]
        g, j = answers[-1], z + 1
    return rows, lambda x, feature: text(x, feature, g)


def rows_of_msd(drafter: Any, e: Tensor, h: Tensor, seen: list[int]) -> tuple[list[Row], More]:
    w, c = weights(drafter), drafter.config

    def text(x: Tensor, feature: Tensor) -> Tensor:
        return dense(w, "fc", torch.cat([rms(w, "embed_norm", x, c.norm_eps), feature]))

    rows = []
    for j, medium in enumerate(seen):
        rows.append((rms(w, "embed_norm", e[j], c.norm_eps) if medium else text(e[j], h[j]), j))
    return rows, text


CASES: list[tuple[str, dict[str, Any]]] = [
    ("published", {"num_q": 2, "media": "merge"}),
    ("biases", {"num_q": 2, "media": "split"}),
    ("zoo", {"num_q": 4, "media": "split"}),
    ("published", {"num_q": 1}),
    ("zoo", {"num_q": 3, "summaries": False}),
    ("zoo", {"num_q": 3, "media": "merge", "global_vector": False}),
]


MSD = [(switches, {}) for switches in transcribed_drafters.SWITCHES]
WRITTEN = [(ViSpecDrafter, walk_of_vispec, *case) for case in CASES] + [(MsdDrafter, rows_of_msd, *c) for c in MSD]
TRAINED = [(ViSpecDrafter, walk_of_vispec, *case) for case in CASES[:3]] + WRITTEN[-len(MSD) :]


@pytest.mark.parametrize(("kind", "enter", "switches", "options"), WRITTEN)
def test_drafts_are_those_that_were_published(kind: Any, enter: Any, switches: str, options: dict[str, Any]) -> None:
    made = lively(kind, **transcribed_drafters.SWITCHES[switches], **options)
    transcribed_drafters.drafts_as_written(made, transcribed_drafters.texts(), enter)


@pytest.mark.parametrize(("made", "enter"), [(lambda: lively(ViSpecDrafter, num_q=3), walk_of_vispec),
                                             (lambda: lively(MsdDrafter), rows_of_msd)])  # fmt: skip
def test_memories_that_join_keep_their_own_images(made: Any, enter: Any) -> None:
    transcribed_drafters.drafts_as_written(made(), transcribed_drafters.texts(1), enter, apart=True)


@pytest.mark.parametrize(("kind", "enter", "switches", "options"), TRAINED)
def test_training_unroll_is_decoding(kind: Any, enter: Any, switches: str, options: dict[str, Any]) -> None:
    made, texts = lively(kind, **transcribed_drafters.SWITCHES[switches], **options), transcribed_drafters.texts(2)
    compressed = kind is ViSpecDrafter
    assert transcribed_drafters.unrolls_as_written(made, texts, enter, compressed=compressed) == 9


def test_text_alone_is_eagle_and_images_are_not() -> None:
    msd, eagle = lively(MsdDrafter), lively(EagleDrafter)
    e, h = torch.randn(2, 1, 6, H).double()
    for seen in (torch.zeros(1, 6, dtype=torch.long), torch.tensor([[0, 1, 1, 0, 0, 0]])):
        same = torch.equal(msd(e, h, seen, seen >= 0, 1)[0][:, 3:], eagle(e, h, seen, seen >= 0, 1)[0][:, 3:])
        assert same is not bool(seen.any())


def test_gradients_reach_every_weight_through_an_image() -> None:
    made = lively(ViSpecDrafter, num_q=3).train()
    e, h = torch.randn(2, 1, 9, H).double()
    seen = torch.tensor([[0, 1, 1, 2, 2, 0, 0, 0, 0]])
    made(e, h, seen, seen >= 0, 2)[1][:, 5:].square().sum().backward()
    assert all(w.grad is not None and w.grad.abs().sum() > 0 for w in made.parameters())


def test_positions_jump_over_what_was_compressed() -> None:
    """Ten shifted rows, an image at rows 3..6: seven rows remain, and the next position is 10."""
    made = lively(ViSpecDrafter, num_q=2)
    seen = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 0, 0, 0]])
    x = torch.randn(1, 10, H).double()
    e = made.encode_prompt(x, x, seen, seen >= 0, torch.arange(10)[None])
    assert e.positions.tolist() == [[0, 1, 2, 6, 7, 8, 9]] and e.source.tolist() == [[0, 1, 2, -1, 7, 8, 9]]
    text = transcribed_drafters.Text(torch.cat([x[0, :1], x[0]]), torch.cat([x[0], x[0, :1]]), [0, *seen[0].tolist()])
    memory = made.start(None, transcribed_drafters.Target(), transcribed_drafters.prompt([text]))
    assert memory.lengths.host == (7,) and memory.positions.tolist() == [10]


def test_a_new_drafter_drafts_text_as_eagle() -> None:
    """img_fc lets the feature pass before it has learned anything."""
    torch.manual_seed(0)
    made = ViSpecDrafter(ViSpecConfig(**transcribed_drafters.SHAPE))
    e, h = torch.randn(2, 3, H)
    expected = made.fc(torch.cat([e, h], -1))
    torch.testing.assert_close(made.inputs(e, h)[1], expected)


@pytest.mark.parametrize("kind", ["several images", "video", "text only"])
def test_stats_show_what_compression_saves(kind: str) -> None:
    target = tiny_vlms.model("qwen2_5_vl")
    inputs = tiny_vlms.prompt("qwen2_5_vl", kind)
    seen = int(((inputs["input_ids"] == tiny_vlms.IMAGE) | (inputs["input_ids"] == tiny_vlms.VIDEO)).sum())
    media = {"several images": 3, "video": 3, "text only": 0}[kind]  # the video has two frames
    found = {}
    for media_rule, count in (("split", media), ("merge", media - (kind == "video"))):
        made = feature_drafter("vispec", target, num_q=3, media=media_rule)
        handle = as_stock(target, inputs, made)
        found = handle.stats.drafter
        assert found["visual rows before"] == seen and found["visual rows"] == 2 * count and found["prompts"] == 1
        assert found["rows"] == inputs["input_ids"].shape[1] - 1 - seen + 2 * count
        assert found["memory bytes"] == found["rows"] * 2 * 2 * 16 * 4
    assert f" {seen} visual tokens, {2 * count} after compression, " in str(handle.stats)
