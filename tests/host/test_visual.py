"""Which tokens are whose: borders of images and frames that touch, from whatever a call brings with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tiny_vlms
import torch
from hostile_drafters import Scripted
from tiny_vlms import IMAGE, VIDEO
from torch import Tensor

import mmspec
from mmspec.pipelines.host.vision import media, placeholders

P, F = IMAGE, VIDEO
CONFIG = SimpleNamespace(
    image_token_id=IMAGE, video_token_id=VIDEO, vision_config=SimpleNamespace(spatial_merge_size=2)
)
TWO_ROWS = [[5, P, P, P, P, 6, P, P], [0, 0, 7, P, P, P, P, 8]]


def seen(*tokens: int) -> Any:
    return SimpleNamespace(pooler_output=tuple(torch.zeros(n, 3) for n in tokens))


CASES: dict[str, tuple[list[list[int]], dict[str, Any], list[list[int]]]] = {
    "text only": ([[5, 6, 7]], {}, [[0, 0, 0]]),
    "apart": ([[P, P, 5, P]], {}, [[1, 1, 0, 2]]),
    "touching, and nobody tells": ([[5, P, P, P]], {}, [[0, 1, 1, 1]]),
    "image beside video": ([[P, P, F, F]], {}, [[1, 1, 2, 2]]),
    "equal pictures": (
        TWO_ROWS, {"pixel_values": torch.zeros(5, 3, 4, 4)}, [[0, 1, 1, 2, 2, 0, 3, 3], [0, 0, 0, 1, 1, 2, 2, 0]],
    ),
    "pictures that cannot be equal": (
        TWO_ROWS, {"pixel_values": torch.zeros(3, 3, 4, 4)}, [[0, 1, 1, 1, 1, 0, 2, 2], [0, 0, 0, 1, 1, 1, 1, 0]],
    ),
    "equal parts across a gap": ([[P, 5, P, P, P]], {"pixel_values": torch.zeros(2, 3, 4, 4)}, [[1, 0, 2, 2, 2]]),
    "tower": (
        TWO_ROWS, {"mm_encoder_outputs": {"image": seen(1, 3, 2, 4)}},
        [[0, 1, 2, 2, 2, 0, 3, 3], [0, 0, 0, 1, 1, 1, 1, 0]],
    ),
    "grids": (
        TWO_ROWS, {"image_grid_thw": torch.tensor([[1, 2, 6], [1, 2, 2], [1, 2, 4], [1, 4, 4]])},
        [[0, 1, 1, 1, 2, 0, 3, 3], [0, 0, 0, 1, 1, 1, 1, 0]],
    ),
    "frames by the grid": ([[F, F, F, F, 5]], {"video_grid_thw": torch.tensor([[2, 2, 4]])}, [[1, 1, 2, 2, 0]]),
    "frames apart": ([[F, F, 9, F, F]], {"video_grid_thw": torch.tensor([[2, 2, 4]])}, [[1, 1, 0, 2, 2]]),
    "clips of equal frames": (
        [[F, F, F, F, F, F]], {"pixel_values_videos": torch.zeros(1, 3, 3, 4, 4)}, [[1, 1, 2, 2, 3, 3]],
    ),
    "frames by their times": (
        [[5, F, F, F, F, 6]],
        {"position_ids": torch.tensor([[0, 1, 1, 2, 2, 3], [0, 1, 1, 1, 1, 3], [0, 1, 2, 1, 2, 3]])[:, None]},
        [[0, 1, 1, 2, 2, 0]],
    ),
    "a grid that does not fit": ([[F, F, F]], {"video_grid_thw": torch.tensor([[2, 2, 4]])}, [[1, 1, 1]]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_media_are_numbered_row_by_row(name: str) -> None:
    ids, arguments, expected = CASES[name]
    assert media(torch.tensor(ids), CONFIG, arguments).tolist() == expected


@pytest.mark.parametrize("kind", ["several images", "ragged", "ragged video"])
@pytest.mark.parametrize("family", tiny_vlms.FAMILIES)
def test_generate_and_the_processors_output_tell_the_same(family: str, kind: str, monkeypatch: Any) -> None:
    """By the time that a prompt is read, `generate` may have taken the pictures out of its arguments."""
    if not tiny_vlms.has_kind(family, kind):
        pytest.skip("no videos")
    model, inputs = tiny_vlms.model(family), tiny_vlms.prompt(family, kind)
    told: list[Tensor] = []

    class Listener(Scripted):
        def start(self, session: Any, target: Any, prompt: Any) -> None:
            told.append(prompt.visual)

    with mmspec.enable(model, drafter=Listener(lambda *_: ([], []))):
        tiny_vlms.generate(model, inputs, max_new_tokens=2)  # for one alone, no drafter reads the prompt
    ids = inputs["input_ids"]
    assert torch.equal(told[0] > 0, torch.isin(ids, torch.tensor(placeholders(model.config))))
    if family not in ("llava_next", "lfm2_vl"):  # how many tokens their pictures have is known to the tower alone
        assert torch.equal(told[0], media(ids, model.config, inputs))
    if not tiny_vlms.FAMILIES[family].per_row:  # those never touch: their processors write something between
        pictures = [row.count("image") + 2 * row.count("video") for row in tiny_vlms.KINDS[kind]]
        assert told[0].max(1).values.tolist() == pictures  # the clips have two frames
