"""`compile=True`: prompts of a shape that comes up again are read by a capture of the decoder, and read the same."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import tiny_vlms
import torch
import uncompiled
from compared import as_stock
from hostile_drafters import eagle
from torch import Tensor

import mmspec
from mmspec.compile import capture
from mmspec.compile.capture import PiecewiseFunction
from mmspec.compile.opaque import OpaqueCalls
from mmspec.pipelines.host.names import CACHE
from mmspec.pipelines.target import captured_prompt

CAPTURED = ("llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "smolvlm", "idefics3", "internvl", "qwen3_5",
            "lfm2_vl")  # fmt: skip
THEIRS = ("paligemma",)  # a prompt that is read in both directions


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts alone are captured, and towers."""
    uncompiled.pieces(monkeypatch, forwards=False, prompts=True)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the prompts that captures have read."""
    found: list[int] = []
    replayed = captured_prompt._replayed

    def counted(*args: Any) -> Any:
        out = replayed(*args)
        found.append(out.last_hidden_state.shape[1])
        return out

    monkeypatch.setattr(captured_prompt, "_replayed", counted)
    return found


SIX = {"max_new_tokens": 6}


def same(model: Any, *calls: dict[str, Any], drafter: Any = "ngram") -> None:
    """Calls of an enabled model give what they give without."""
    as_stock(model, list(calls), drafter, call=SIX, compile=True)


def pictures(name: str, count: int = 4, kind: str = "image first") -> list[dict[str, Any]]:
    """Prompts of the same shape, whose pictures differ."""
    return [tiny_vlms.prompt(name, kind, picture_seed=seed) for seed in range(count)]


def lengths(calls: list[dict[str, Any]]) -> list[int]:
    return [call["input_ids"].shape[1] for call in calls]


@pytest.mark.parametrize("name", CAPTURED)
@pytest.mark.every(4)
def test_what_comes_up_again_is_replayed(name: str, replays: list[int]):
    calls = pictures(name)
    same(tiny_vlms.model(name), *calls)
    assert replays == lengths(calls)[captured_prompt.AGAIN :]


@pytest.mark.parametrize("name", THEIRS)
def test_other_decoders_read_by_themselves(name: str, replays: list[int]):
    same(tiny_vlms.model(name), *pictures(name))
    assert not replays


def test_a_drafter_reads_the_features_of_a_replay(replays: list[int]):
    model, calls = tiny_vlms.model("llava"), pictures("llava")
    drafter = eagle(model, draft_vocab=64)
    heard: list[torch.Tensor] = []
    start = type(drafter).start
    same(model, *calls, drafter=drafter)
    assert replays
    for compile in (False, True):
        with pytest.MonkeyPatch.context() as patch, mmspec.enable(model, drafter, compile=compile):
            patch.setattr(type(drafter), "start", lambda *told: (heard.append(told[3].hidden), start(*told))[1])
            tiny_vlms.generate(model, calls[0])
    torch.testing.assert_close(*heard, rtol=1e-4, atol=1e-4)


def test_what_comes_in_may_lie_otherwise_in_memory(replays: list[int], monkeypatch: pytest.MonkeyPatch):
    """Compiled pieces do not check it, and would read other numbers."""
    monkeypatch.setattr(capture, "inductor", uncompiled.strictly)
    calls, ids = pictures("llava", 3), torch.arange(10, 34).view(2, 12)
    turned = calls[0]["pixel_values"].contiguous(memory_format=torch.channels_last)
    same(tiny_vlms.model("llava"), *calls, {**calls[0], "pixel_values": turned})
    places = torch.arange(12).repeat(2, 1)
    texts = [{"input_ids": ids, "position_ids": each} for each in (places, places, places, places[:1].expand(2, -1))]
    same(tiny_vlms.text(), *texts)
    assert len(replays) == 4


def test_rows_of_a_batch_are_replayed_and_padded_ones_are_not(replays: list[int]):
    even = tiny_vlms.prompt("llava", "image first", rows=[0, 0, 0])
    padded = {**even, "attention_mask": even["attention_mask"].clone()}
    padded["attention_mask"][1, :2] = 0
    same(tiny_vlms.model("llava"), *[even] * 3, *[padded] * 3)
    assert replays == lengths([even])


def test_behind_a_cached_text_the_decoder_reads_by_itself(replays: list[int]):
    model = tiny_vlms.text()
    ids = torch.randint(5, 100, (1, 12), generator=torch.Generator().manual_seed(0))

    def turns() -> list[int]:
        first = model.generate(ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
        more = torch.cat([first.sequences, ids], 1)
        return model.generate(more, **{CACHE: getattr(first, CACHE)}, max_new_tokens=8, do_sample=False).tolist()

    wanted = turns()
    with mmspec.enable(model, "ngram", compile=True):
        assert [turns() for _ in range(3)] == [wanted] * 3
    assert replays == [12]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return uncompiled.encodings(monkeypatch)


PARTS = {"decoder": lambda model: model.get_decoder(), "tower": lambda model: model.get_encoder(modality="image")}


@pytest.mark.parametrize("part", PARTS)
def test_weights_that_were_written_to_are_read(part: str, replays: list[int], encoded: list[int]):
    model, calls = copy.deepcopy(tiny_vlms.model("llava")), pictures("llava", 3)
    same(model, *calls)
    for weight in PARTS[part](model).parameters():
        weight.data = weight.data.roll(1, 0)
    same(model, *calls)
    assert len(replays) == 1 + 3 and encoded


@pytest.mark.full
def test_other_weights_are_captured_anew(replays: list[int]):
    model, calls = copy.deepcopy(tiny_vlms.model("llava")), pictures("llava", 3)
    same(model, *calls)
    for layer in model.get_decoder().layers:
        layer.mlp.up_proj.weight = torch.nn.Parameter(-layer.mlp.up_proj.weight.data)
    same(model, *calls)
    assert len(replays) == 1 + 2


@pytest.mark.parametrize("part", PARTS)
def test_hooks_see_what_is_read(part: str, replays: list[int], encoded: list[int]):
    model, calls, seen = copy.deepcopy(tiny_vlms.model("llava")), pictures("llava", 3), list[int]()
    same(model, *calls)
    layers = [m for m in PARTS[part](model).modules() if type(m).__name__.endswith(("DecoderLayer", "EncoderLayer"))]
    handle = layers[1].register_forward_hook(lambda module, told, out: seen.append(told[0].shape[1]))
    before = len(replays), len(encoded)
    same(model, calls[0])
    handle.remove()
    length = lengths(calls)[0] if part == "decoder" else seen[0]
    assert seen.count(length) == 2 and (len(replays), len(encoded))[part == "tower"] == before[part == "tower"]


def test_only_so_many_shapes_are_captured(replays: list[int]):
    model, g = tiny_vlms.text(), torch.Generator().manual_seed(0)
    calls = [{"input_ids": torch.randint(5, 100, (1, n), generator=g)} for n in range(8, 9 + captured_prompt.MOST)]
    same(model, *calls * (captured_prompt.OFTEN + 1))
    assert replays == lengths(calls)[: captured_prompt.MOST]


def test_a_shape_that_comes_back_now_and_then_is_captured_once_it_came_often(replays: list[int]):
    model, g = tiny_vlms.text(), torch.Generator().manual_seed(0)
    one, *others = ({"input_ids": torch.randint(5, 100, (1, n), generator=g)} for n in range(8, 20))
    between = iter(others)
    same(model, *(call for _ in range(captured_prompt.OFTEN) for call in (one, next(between))))
    assert not replays  # the last one was captured as it was read
    same(model, one, next(between), one)
    assert replays == [8, 8]


def test_windows_that_reach_as_far_as_the_prompt(replays: list[int]):
    model, g = tiny_vlms.text("Mistral", sliding_window=16), torch.Generator().manual_seed(0)
    calls = [{"input_ids": torch.randint(5, 100, (1, n), generator=g)} for n in (16, 17)]
    same(model, *(call for call in calls for _ in range(3)))
    assert replays == [16]


def test_what_gives_another_text_is_not_used(monkeypatch: pytest.MonkeyPatch, replays: list[int]):
    """A decoder that reads in both directions without a word of it."""
    attended = captured_prompt._attending
    monkeypatch.setattr(captured_prompt, "_attending", lambda slots: lambda *told: attended(slots)(*told).flip(2))
    same(tiny_vlms.model("llava"), *pictures("llava"))
    assert not replays


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_in_bfloat16(name: str, replays: list[int]):
    model = copy.deepcopy(tiny_vlms.model(name)).bfloat16()
    calls = [{k: v.bfloat16() if v.is_floating_point() else v for k, v in call.items()} for call in pictures(name, 3)]
    with mmspec.enable(model, "ngram", compile=True):
        for call in calls:
            tiny_vlms.generate(model, call)
    assert replays == lengths(calls)[-1:]


@pytest.mark.parametrize("short", [True, False])
def test_all_recurrent_layers_share_a_scan(short: bool, replays: list[int], monkeypatch: pytest.MonkeyPatch):
    """It is compiled for short prompts, and called as it is for long ones, where its loop would be unrolled."""
    calls, found = pictures("qwen3_5"), list[OpaqueCalls]()
    monkeypatch.setattr(captured_prompt, "UNROLLED", lengths(calls)[0] - (not short))
    monkeypatch.setattr(captured_prompt, "OpaqueCalls", lambda: found.append(OpaqueCalls()) or found[-1])
    model = tiny_vlms.model("qwen3_5")
    same(model, *calls)
    assert replays == lengths(calls)[captured_prompt.AGAIN :]
    assert model.config.get_text_config().layer_types.count("linear_attention") > 1
    [scans] = found
    assert [call.compiled is not None for call in scans.known.values()] == [short] * 2  # convolution, delta rule


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_opaque_calls_are_made_as_they_were_traced(compiled: bool, dtype: torch.dtype | None):
    g, calls = torch.Generator().manual_seed(0), OpaqueCalls()
    weight, *inputs = (torch.randn(4, 4, generator=g) for _ in range(3))

    def scan(x: Tensor, *more: Tensor, times: int, last: Tensor | None) -> dict[str, Any]:
        for _ in range(times):
            x = x @ more[0]
        return {"x": x.T, "last": last, "many": [x + 1, None]}

    def function(x: Tensor) -> list[Tensor]:
        for times in (1, 2, 1, 2):
            given = calls(scan, x, weight, times=times, last=None)
            assert given["last"] is None and given["many"][1] is None
            x = torch.sin(given["x"].float()) + given["many"][0]
        return [x]

    def unused(*args: object) -> Tensor:
        raise AssertionError

    with torch.autocast("cpu", dtype or torch.float32, enabled=dtype is not None):
        captured = PiecewiseFunction(function, inputs[:1], [weight], compile=uncompiled.strictly)
        assert len(calls.known) == 2
        for call in calls.known.values() if compiled else ():
            call.compiled = partial(PiecewiseFunction(call.run, call.examples(), ()), unused)
        for x in inputs:
            assert torch.equal(captured(unused, x)[0], function(x)[0])


def test_threads_share_an_opaque_call():
    calls, before = OpaqueCalls(), sys.getswitchinterval()
    calls(lambda x: [x + 1, x * 2], torch.zeros(1))
    [call] = calls.known.values()

    def run(start: int) -> bool:
        given = torch.arange(start, start + 3000.0)
        return all([float(t) for t in call.run(x)] == [x + 1, x * 2] for x in given)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(run, range(4)))
    finally:
        sys.setswitchinterval(before)
