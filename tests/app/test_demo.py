"""The demo without a browser: streamed steps, coloured tokens, numbers, limits, what it refuses, what it serves."""

from __future__ import annotations

import argparse
import asyncio
import gc
import inspect
import json
import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import clips
import httpx
import pytest
import tiny_llamagen
import tiny_llava
import torch
from gradio import networking
from gradio.state_holder import SessionState
from PIL import Image
from pydantic import ValidationError
from transformers import LogitsProcessor

import mmspec
from benchmarks.zoo.faithful import PictureReader
from mmspec import zoo
from mmspec.app import embedded, engine
from mmspec.app.demo import caption_tab, captions, image_tab
from mmspec.app.demo import command as demo
from mmspec.app.demo import race as races
from mmspec.app.demo.captions import CORRECTED, DRAFTED, OWN, PLAIN, Answer, CaptionRace, CaptionRequest, Token, Turn
from mmspec.app.demo.images import COUPLED, METHODS, SEED_EXACT, Drawing, ImageRace
from mmspec.app.demo.race import DONE, MODELS, TIMED_OUT, RefusedError
from mmspec.app.embedded import SHIPPED
from mmspec.app.engine import Engine
from mmspec.app.image_model import load as load_painter
from mmspec.app.media.decoder import Decoder
from mmspec.app.painter import ImageSubject
from mmspec.pipelines.prompts import chat_inputs
from mmspec.pipelines.serving.stream import Step, stream
from mmspec.registry import OF_TEXT, USUAL
from mmspec.zoo import scenes

PROMPT = "w5 w6 w7 w5 w6 w7"
PATIENCE = 300  # seconds, for what a busy machine may delay


@pytest.fixture(scope="module", autouse=True)
def uploads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Files of these tests count as uploads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(tmp_path_factory.getbasetemp()))
        yield


@pytest.fixture(scope="module")
def eyes() -> Iterator[Decoder]:
    with captions.media_decoder() as made:
        yield made


@pytest.fixture(scope="module")
def asks(eyes: Decoder) -> CaptionRace:
    return CaptionRace(Engine(tiny_llava.model(), tiny_llava.processor(), "ngram", 32), eyes)


@pytest.fixture(scope="module")
def draws() -> ImageRace:
    return ImageRace(ImageSubject(tiny_llamagen.pipeline(grid=8), clean_caption=False))


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pictures") / "red.png"
    Image.new("RGB", (40, 30), "red").save(path)
    return str(path)


@pytest.fixture
def inputs(picture: str) -> Any:
    return chat_inputs(tiny_llava.processor(), [PROMPT], [[Image.open(picture)]])


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Twelve frames, from black to white."""
    frames = [Image.new("RGB", (64, 48), (grey, grey, grey)) for grey in range(0, 240, 20)]
    return str(clips.write_clip(tmp_path_factory.mktemp("clips") / "grey.mp4", frames, fps=6))


def about(picture: str | None, prompt: str = PROMPT, **options: Any) -> CaptionRequest:
    return CaptionRequest(**{"kind": "image", "media": picture, "prompt": prompt, **options})


def answered(race: CaptionRace, question: CaptionRequest) -> Turn:
    return last(race.run(Turn.of(question)))


def drawn(race: ImageRace, **drawing: Any) -> Any:
    return last(race.run(race.pair(Drawing(**{"prompt": "a small circle", **drawing}))))


def settle() -> None:
    """Wait until the models rest."""
    MODELS.submit(int).result()


def threads() -> set[threading.Thread]:
    """Those that run; a progress bar or a server may start one of its own at any time."""
    return {thread for thread in threading.enumerate() if "(run)" in thread.name}


def last(run: Iterator[Any]) -> Any:
    *_, turn = run
    return turn


# ------------------------------------------------------------------------------------------------ stream


@pytest.mark.parametrize("enabled", [False, True], ids=["stock", "enabled"])
def test_a_stream_gives_the_tokens_of_generate(inputs: Any, enabled: bool) -> None:
    model = tiny_llava.model()
    settings = {"max_new_tokens": 24, "do_sample": False}
    expected = model.generate(**inputs, **settings)[0, inputs["input_ids"].shape[1] :].tolist()
    if enabled:
        handle = mmspec.enable(model)
    steps = list(stream(model, inputs, **settings))
    assert steps[0].tokens == ()  # the prompt has been read
    assert [token for step in steps for token in step.tokens] == expected
    assert [step.seconds for step in steps] == sorted(step.seconds for step in steps)
    if enabled:
        assert sum(step.accepted for step in steps) == handle.stats.accepted > 0
        assert len(steps) - 2 == handle.stats.rounds
    assert not model._forward_hooks


def test_a_stream_computes_under_the_callers_autocast(inputs: Any) -> None:
    casts: list[bool] = []

    class Seen(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            casts.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16)
            return scores

    with torch.autocast("cpu", torch.bfloat16):
        steps = stream(tiny_llava.model(), inputs, max_new_tokens=3, do_sample=False, logits_processor=[Seen()])
        assert len(list(steps)) == 4
    assert casts == [True] * 3


@pytest.mark.parametrize("enabled", [False, True], ids=["stock", "enabled"])
def test_a_closed_or_stopped_stream_leaves_no_thread(inputs: Any, enabled: bool) -> None:
    model, before = tiny_llava.model(), threads()
    if enabled:
        mmspec.enable(model)
    steps = stream(model, inputs, max_new_tokens=400, do_sample=False)
    next(steps)
    assert threads() - before
    steps.close()
    assert threads() <= before
    stop = threading.Event()
    count = 0
    for step in stream(model, inputs, stop, max_new_tokens=400, do_sample=False):
        count += len(step.tokens)
        stop.set()
    assert count < 400 and threads() <= before


def test_a_stream_raises_what_generate_raised(inputs: Any) -> None:
    with pytest.raises(ValueError, match="max_new_tokens"):
        list(stream(tiny_llava.model(), inputs, max_new_tokens=-1))
    two = {"input_ids": inputs["input_ids"].repeat(2, 1)}
    with pytest.raises(ValueError, match="input_ids \\[1, T\\]; got"):
        list(stream(tiny_llava.model(), two))
    with pytest.raises(ValueError, match="one answer; got num_return_sequences=3"):
        list(stream(tiny_llava.model(), inputs, do_sample=True, num_return_sequences=3))
    with pytest.raises(ValueError, match="leave streamer out"):
        list(stream(tiny_llava.model(), inputs, streamer=object()))


def test_a_stream_has_no_steps_of_a_call_within_it(inputs: Any) -> None:
    """A criterion may ask the model itself, about the answer so far."""
    model, settings = tiny_llava.model(), {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**inputs, **settings)[0, inputs["input_ids"].shape[1] :].tolist()

    def asks(ids: Any, scores: Any, **_: Any) -> bool:
        return len(model.generate(torch.tensor([[5, 6, 7]]), **settings)[0]) < 9

    mmspec.enable(model)
    steps = list(stream(model, inputs, **settings, stopping_criteria=[asks]))
    assert [token for step in steps for token in step.tokens] == expected


# ------------------------------------------------------------------------------------------------ a run


def test_a_run_colours_every_token_once_and_its_counts_add_up(asks: CaptionRace, picture: str) -> None:
    turn = answered(asks, about(picture, PROMPT, max_new_tokens=48))
    plain, fast = turn.plain, turn.fast
    assert (plain.state, fast.state, turn.over, turn.difference) == (DONE, DONE, True, None)
    assert plain.ids == fast.ids and len(fast.ids) == 48
    text = asks.processor.decode(fast.ids, skip_special_tokens=True)
    assert text == "".join(token.text for token in plain.tokens) == "".join(token.text for token in fast.tokens)
    assert {token.kind for token in plain.tokens} == {PLAIN}
    drafted = [token for token in fast.tokens if token.kind == DRAFTED]
    own = [token for token in fast.tokens if token.kind in (OWN, CORRECTED)]
    assert len(drafted) + len(own) == 48 and 0 < len(drafted) <= fast.accepted
    assert {OWN, CORRECTED} == {token.kind for token in own}
    assert sum(fast.calls) == 48 == sum(plain.calls) and plain.accepted == 0
    assert fast.tokens_per_target_call == 1 + fast.accepted / (fast.forwards - 1)
    assert plain.tokens_per_target_call == 1
    assert 0 < fast.first <= fast.at[-1] and fast.at == sorted(fast.at)
    assert caption_tab.acceptance(turn) == ("same", "✓ identical output: 48 of 48 tokens")
    texts = re.findall(r'<div class="mm-text"[^>]*>(.*?)</div>', caption_tab.show_texts(turn), re.S)
    for answer, pane in zip((plain, fast), texts, strict=True):
        assert unescape(re.sub(r"<[^>]*>", "", pane)) == text
        assert pane.count('<span class="mm-t ') == len(answer.tokens)
        shown = [float(at) for at in re.findall(r'style="--t:([\d.]+)"', pane)]
        assert shown == pytest.approx(answer.at, abs=1e-3)  # each token is replayed at its own moment, on one clock
    assert [int(n) for n in re.findall(r'data-n="(\d+)"', texts[1])] == fast.calls and "data-n" not in texts[0]
    assert not hasattr(type(asks.model), "_mmspec_patch")


def test_a_call_begins_where_its_first_token_stands() -> None:
    answer = Answer(accelerated=True)
    for tokens, accepted in (((), 0), ((1,), 0), ((2, 3, 4), 2), ((5,), 3)):  # the last draft was cut by the end
        answer.take(Step(tokens, accepted, 1.0, corrected=accepted == 2))
    kinds = [(OWN, 1), (DRAFTED, 3), (DRAFTED, 0), (CORRECTED, 0), (DRAFTED, 1)]
    assert [(t.kind, t.begins) for t in answer.tokens] == kinds
    assert (answer.calls, answer.accepted, answer.tokens_per_target_call) == ([1, 3, 1], 5, 3.5)


def test_both_sides_are_measured_before_anything_is_shown_and_a_long_race_is_replayed_faster() -> None:
    plain, fast = Answer(at=[1.0, 30.0], seconds=30.0, state=DONE), Answer(at=[6.0], seconds=6.0, state=DONE)
    turn = Turn(plain, fast, about(None))
    plain.tokens, fast.tokens = [Token(1, PLAIN, 1, "a"), Token(2, PLAIN, 1, "b")], [Token(1, OWN, 1, "a")]
    html = caption_tab.show_texts(turn)
    assert re.findall(r"mm-t [^>]*--t:([\d.]+)", html) == ["0.400", "12.000", "2.400"]
    assert re.findall(r"--w:([\d.]+)%;--for:([\d.]+)", html) == [("100.0", "12.000"), ("20.0", "2.400")]
    assert "Replayed 2.5× as fast as it ran." in caption_tab.show_headline(turn)


def test_the_first_prefill_does_not_inflate_the_headline(asks: CaptionRace, picture: str) -> None:
    cold = []

    def slow(*_: Any) -> None:
        if not cold:
            cold.append(time.sleep(2))

    with asks.model.register_forward_pre_hook(slow):
        turn = answered(asks, about(picture, max_new_tokens=8))
    assert cold and turn.plain.seconds < 2


def test_an_answer_that_was_cut_off_says_so(asks: CaptionRace, picture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = answered(asks, about(picture, max_new_tokens=8))
    assert turn.plain.cut and turn.fast.cut
    assert "Cut off at 8 tokens" in caption_tab.show_headline(turn)
    monkeypatch.setattr(asks.model.generation_config, "eos_token_id", turn.plain.ids[3])
    turn = answered(asks, about(picture, max_new_tokens=8))
    assert len(turn.plain.tokens) <= 4 and not turn.plain.cut and "Cut off" not in caption_tab.show_headline(turn)


def test_only_a_gain_is_green() -> None:
    view = Turn(Answer(), Answer(), about(None))
    gain, loss, none = (races.headline(view, much, 2.0, ("same", "")) for much in (1.2, 0.9, None))
    assert "mm-gain" in gain and "1.20×</strong> as fast" in gain and "2.00</strong> tokens per forward" in gain
    assert "mm-gain" not in loss + none and "0.90×</strong> the speed" in loss
    assert re.search(r"\.mm-gain[^}]*color", demo.STYLE.read_text())


def test_photos_of_phones_are_made_smaller(eyes: Decoder, tmp_path: Path) -> None:
    path = tmp_path / "phone.jpg"
    Image.new("RGB", (8160, 6120), "red").save(path)  # 50 million pixels
    [shown] = captions.read_media(about(str(path)), eyes)
    assert max(shown.size) == captions.LONGEST and shown.getpixel((0, 0))[0] > 200


def test_a_difference_is_found(asks: CaptionRace, picture: str) -> None:
    turn = answered(asks, about(picture, PROMPT, max_new_tokens=8))
    turn.fast.tokens[3].id += 1
    kind, words = caption_tab.acceptance(turn)
    assert turn.difference == 3 and kind == "different" and "token 4" in words
    turn.fast.tokens[3].id -= 1
    turn.fast.tokens.pop()
    assert turn.difference == 7
    turn.fast.state = TIMED_OUT
    assert turn.difference is None and caption_tab.acceptance(turn)[0] == "partial"


@pytest.mark.parametrize("same", [True, False], ids=["same draws", "own draws"])
def test_sampled_answers_are_compared_only_where_they_must_be_the_same(
    asks: CaptionRace, picture: str, same: bool
) -> None:
    ask = about(picture, temperature=1, top_p=0.9, seed=3, reproducible=same, max_new_tokens=16)
    turn = answered(asks, ask)
    assert caption_tab.acceptance(turn)[0] == ("same" if same else "chance")
    assert (turn.plain.ids == turn.fast.ids) or not same


def test_a_video_is_looked_at_frame_by_frame(asks: CaptionRace, clip: str) -> None:
    questions = [about(clip, kind="video", frames=n, max_new_tokens=8) for n in (2, 5)]
    turns = [answered(asks, question) for question in questions]
    assert [len(turn.frames) for turn in turns] == [2, 5]
    greys = [frame.getpixel((5, 5))[0] for frame in turns[1].frames]
    assert greys == sorted(greys) and greys[-1] > greys[0] + 100
    for turn, question in zip(turns, questions, strict=True):
        assert turn.plain.ids == turn.fast.ids and caption_tab.acceptance(turn)[0] == "same"
        assert len(asks.inputs(question, turn.frames)["pixel_values"]) == question.frames
    assert caption_tab.show_texts(turns[1]).count('alt="frame ') == 5
    with pytest.raises(RefusedError, match="no video"):
        answered(asks, about(None, kind="video"))


def test_a_closed_run_ends_and_the_time_limit_ends_both_answers(asks: CaptionRace, picture: str) -> None:
    before = threads()
    long = Turn.of(about(picture, PROMPT, max_new_tokens=400))
    run, waiting = asks.run(long), asks.run(Turn.of(about(picture)))
    next(run)
    next(waiting)  # of another visitor
    waiting.close()
    run.close()  # as when Stop is pressed, or the browser goes away
    settle()
    assert len(long.plain.tokens) < 400 and not long.fast.tokens and threads() <= before
    slow = CaptionRace(Engine(tiny_llava.model(), tiny_llava.processor(), "ngram", 32), asks.decoder, time_limit=0.0)
    turn = answered(slow, about(picture, PROMPT))
    assert turn.plain.state == turn.fast.state == TIMED_OUT and caption_tab.acceptance(turn)[0] == "open"


@pytest.mark.parametrize("named, name", [(SHIPPED, USUAL), ("recycle", "recycle")])
def test_all_drafters_that_fit_can_be_chosen(named: str, name: str, eyes: Decoder, picture: str) -> None:
    """Of a model that ships with nothing, and whose files hold no heads: those without weights."""
    made = Engine(tiny_llava.model(), tiny_llava.processor(), named, 32)
    both = CaptionRace(made, eyes, drafters=demo.fitting(made, "somebody/tiny"))
    assert both.name == next(iter(both.drafters)) == name and set(both.drafters) == set(OF_TEXT)
    for drafter in both.drafters:
        assert caption_tab.acceptance(answered(both, about(picture, drafter=drafter, max_new_tokens=8)))[0] == "same"
    with pytest.raises(RefusedError, match="width must be at most 8"):
        answered(both, about(picture, drafter="recycle", width=12))


@pytest.mark.full
def test_the_embedded_drafters_fit_the_embedded_model() -> None:
    made = engine.load(embedded.MODEL, embedded.DRAFTER, "cpu", "float32", 8, 0.0)
    own = {"eagle", "msd", "vispec", "flash", "specvlm", "block"}
    assert set(demo.fitting(made, embedded.MODEL)) == own | set(OF_TEXT)


def test_letters_of_several_tokens() -> None:
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    for text in ("aé€🙂b".encode(), "aé€🙂".encode()[:-1], b""):  # the second breaks off inside a letter
        tokens = [Token(byte, OWN) for byte in text]
        captions.split(tokens, decode)
        assert "".join(token.text for token in tokens) == decode(list(text))


# ------------------------------------------------------------------------------------------------ refusals

REFUSED = {
    "no picture": ({"media": None}, "no picture"),
    "no prompt": ({"prompt": "  "}, "prompt is empty"),
    "long prompt": ({"prompt": "w" * 2001}, "prompt.*at most 2000"),
    "depth": ({"depth": 99}, "depth.*less than or equal to 16"),
    "tokens": ({"max_new_tokens": 10**6}, "max_new_tokens.*equal to 512"),
    "heat": ({"temperature": float("nan")}, "temperature.*equal to"),
    "room": ({"max_new_tokens": 512}, "room for 512"),
    "seed": ({"seed": None}, "seed.*integer"),
    "drafter": ({"drafter": "nix"}, "There is no drafter 'nix'"),
    "half a token": ({"max_new_tokens": 1.5}, "max_new_tokens.*integer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_question_that_is_not_run_says_why(asks: CaptionRace, picture: str, name: str) -> None:
    change, why = REFUSED[name]
    with pytest.raises((RefusedError, ValidationError), match=f"(?s){why}"):
        answered(asks, about(picture, **change))


def test_pictures_that_are_none(asks: CaptionRace, tmp_path: Path) -> None:
    Image.new("1", (12000, 12000)).save(tmp_path / "huge.png")
    (tmp_path / "text.png").write_text("not a picture")
    for name, why in (("huge.png", "pixels"), ("text.png", "not an image"), ("gone.png", "missing")):
        with pytest.raises(RefusedError, match=why):
            answered(asks, about(str(tmp_path / name)))


def test_the_shape_is_the_drafters_own_unless_it_is_set() -> None:
    assert about(None).options == {"reproducible": False}
    assert about(None, depth=4, temperature=1).options == {"depth": 4, "reproducible": True}


# ------------------------------------------------------------------------------------------------ the tab


VALUES = (PROMPT, "ngram", 5, 0, 0, 0, 1, 0, True, 8, 4)  # a CaptionRequest's fields after the media


def test_the_tabs_events(asks: CaptionRace, picture: str) -> None:
    file = {"path": picture}
    looks = list(caption_tab.run(asks, "image", file, None, *VALUES))
    assert {len(look) for look in looks} == {2} and "Waiting" in looks[0][0]
    assert "identical output: 8 of 8" in looks[-1][0] and "8 tokens in 8 forwards" in looks[-1][1]
    assert all("Measuring" in look[0] and not isinstance(look[1], str) for look in looks[1:-1])  # then both at once
    for media, values, why in (
        *((upload, VALUES, "There is no picture. Upload one") for upload in (None, {}, {"path": None})),
        (file, (PROMPT, "ngram", 99, *VALUES[3:]), "depth: Input should be less than or equal to 16."),
    ):
        *_, refused = caption_tab.run(asks, "image", media, None, *values)
        assert 'role="alert"' in refused[0] and why in refused[0]


def test_a_failing_model_is_reported_and_not_fatal(
    asks: CaptionRace, picture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("<b>no room</b>")

    with monkeypatch.context() as patch:
        patch.setattr(asks.model, "generate", fail)
        looks = list(caption_tab.run(asks, "image", {"path": picture}, None, *VALUES))
    assert "MemoryError: &lt;b&gt;no room" in looks[-1][0]
    *_, end = caption_tab.run(asks, "image", {"path": picture}, None, *VALUES)
    assert "identical" in end[0]


def test_a_stopped_run_frees_its_memory(asks: CaptionRace, draws: ImageRace, picture: str) -> None:
    def held() -> int:
        gc.collect()
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        return sum(t.untyped_storage().nbytes() for t in tensors)

    question = about(picture, max_new_tokens=400)
    for run in (
        lambda: asks.run(Turn.of(question)),
        lambda: draws.run(draws.pair(Drawing(prompt="a small circle", seed=1))),
    ):
        sizes = []
        for _ in range(2):  # the first leaves what all others need, too
            looks = run()
            next(looks)
            looks.close()
            del looks
            settle()
            sizes.append(held())
        assert sizes[1] <= sizes[0]


# ------------------------------------------------------------------------------------------------ pictures


@pytest.mark.parametrize("method", METHODS)
def test_a_picture_fills_its_grid_and_the_counts_add_up(draws: ImageRace, method: str) -> None:
    pair = drawn(draws, method=method, window=4, seed=5)
    for one in (pair.plain, pair.fast):
        assert one.state == DONE and one.count == len(one.at) == 64 and one.image is not None
        assert len(one.calls) == len(one.begins) == one.result.forwards and 0 < one.first < one.seconds
        assert one.at == sorted(one.at) and max(one.at) <= one.seconds
    assert pair.plain.result.stats.accepted == 0 and len(pair.plain.calls) == 64
    accepted = pair.fast.result.stats.accepted
    assert accepted > 0 and accepted + len(pair.fast.calls) in (64, 65)  # the last may end in a draft
    html = image_tab.show_pictures(pair)
    assert html.count("mm-call") == len(pair.fast.calls) and html.count("--t:") == 128 + 2 and "mm-open" not in html
    kind, words = image_tab.acceptance(pair)
    assert kind == ("same" if method == SEED_EXACT or pair.same == 64 else "kept"), words


def test_a_lossy_picture_tells_its_distortion(draws: ImageRace) -> None:
    pair = drawn(draws, method=SEED_EXACT, window=4, rule="scaled(omega=6.0)", seed=2)
    assert "jacobi, maximal coupling: one forward" in image_tab.show_pictures(pair)  # which allows a relaxed rule
    kind, words = image_tab.acceptance(pair)
    [spent] = pair.fast.result.spent
    assert spent > 0 and kind == "lossy" and f"{spent:.2f}" in words
    assert "scaled(omega=6.0) changes" in image_tab.show_headline(pair)


def test_at_temperature_0_a_rule_is_lossy_where_it_has_an_effect(draws: ImageRace) -> None:
    pair = drawn(draws, method=COUPLED, window=4, rule="lantern(k=40, delta=0.9)", temperature=0)
    assert pair.same < 64 and image_tab.acceptance(pair)[0] == "lossy" and "changes" in image_tab.show_headline(pair)
    with pytest.warns(UserWarning, match="no effect on greedy calls"):
        pair = drawn(draws, method=COUPLED, window=4, rule="typical(epsilon=0.3, delta=0.05)", temperature=0)
    assert image_tab.acceptance(pair)[0] == "same" and "changes" not in image_tab.show_headline(pair)


DRAWING = {
    "prompt": "a zebra circle", "method": SEED_EXACT, "window": 4, "rule": "exact", "seed": 7,
    "guidance": 3.0, "temperature": 1.0,
}  # fmt: skip
WRONG = {
    "prompt": ({"prompt": " "}, "prompt is empty"),
    "rule": ({"rule": "landern(k=1)"}, "unknown rule &#x27;landern"),
    "method": ({"method": "nix"}, "There is no method &#x27;nix"),
    "window": ({"window": 1000}, "window: Input should be less than or equal to 64."),
    "heat": ({"temperature": float("nan")}, "temperature: Input should be"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_picture_that_is_not_drawn_says_why(draws: ImageRace, name: str) -> None:
    change, why = WRONG[name]
    *_, refused = image_tab.run(draws, *{**DRAWING, **change}.values())
    assert 'role="alert"' in refused[0] and why in refused[0]


def test_a_picture_can_be_stopped(draws: ImageRace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspec.app.demo.race.REFRESH", 0.001)
    pair = draws.pair(Drawing(prompt="a small circle"))
    run = draws.run(pair)
    while not pair.plain.count:
        next(run)
    run.close()
    settle()
    assert pair.plain.state == pair.fast.state == TIMED_OUT and pair.fast.count < 64
    assert image_tab.acceptance(pair) == ("open", "nothing to compare")
    assert drawn(ImageRace(draws.subject, time_limit=0.0)).plain.state == TIMED_OUT


def test_the_image_tabs_events(draws: ImageRace) -> None:
    looks = list(image_tab.run(draws, *DRAWING.values()))
    assert "the same picture: 64 of 64" in looks[-1][0]
    assert looks[-1][1].count('src="data:image/png;base64,') == 2 and "64 tokens in 64 forwards" in looks[-1][1]


def test_text_from_the_model_is_escaped() -> None:
    html = caption_tab.show_token(Token(1, OWN, 0, '<script>"&'))
    assert "<script>" not in html and "&lt;script&gt;" in html


# ------------------------------------------------------------------------------------------------ the door


def test_another_host_needs_a_password() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.3.2.1"):
        assert demo.credentials(host, None) is None
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(OSError, match="is needed, since"):
            demo.credentials(host, None)
        assert demo.credentials(host, "ann:pass:word") == ("ann", "pass:word")
    for wrong in ("ann", "ann:", ":pass", ""):
        with pytest.raises(OSError, match="USER:PASSWORD"):
            demo.credentials("127.0.0.1", wrong)


@pytest.fixture(scope="module")
def served(
    asks: CaptionRace, draws: ImageRace, picture: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    results, own = tmp_path_factory.mktemp("results"), {"note": "knows drawn scenes only", "draw": scenes.drawn}
    (results / "image.md").write_text("# Pictures")
    (results / "drafters.md").write_text("# Texts")
    rows = [("stock", 1.0, 1, True), ("eagle", 2.351, 1, False), ("eagle", 2.0, 4, False), ("refused", None, 1, False)]
    records = [{"method": m, "speedup_e2e": s, "batch": b, "stock_path": p} for m, s, b, p in rows]
    (results / "drafters.json").write_text(json.dumps({"records": records}))
    page = demo.build({
        "Caption": partial(caption_tab.build, asks, Path(picture).parent, {PROMPT: PROMPT, "w9": "hard"}, **own),
        "Image": partial(image_tab.build, draws),
        "Results": partial(demo.show_results, results),
    })  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:  # gradio gives up when its first page takes three seconds
        patch.setattr(networking, "url_ok", lambda url: httpx.head(url, trust_env=False, timeout=PATIENCE).is_success)
        _, address, _ = demo.launch(page, "127.0.0.1", None, None, prevent_thread_lock=True, quiet=True)
    with httpx.Client(base_url=address, trust_env=False, timeout=PATIENCE) as client:
        yield SimpleNamespace(page=page, client=client)
    page.close()


def test_the_page_loads_nothing_from_elsewhere(served: Any) -> None:
    page = served.client.get("/").text
    loaded = re.findall(r'<(?:script|link|img|iframe)[^>]*?(?:src|href)="([^"]+)"', page)
    base = str(served.client.base_url).rstrip("/")
    assert loaded and [u for u in loaded if re.match(r"(https?:)?//", u) and not u.startswith(base)] == []
    config = served.client.get("/config").json()
    assert config["analytics_enabled"] is False and config["stylesheets"] == []
    assert not re.search(r"url\(|@import", demo.STYLE.read_text())
    theme = served.client.get("/theme.css").text
    assert not re.search(r"(url\(|@import)\W*https?:", theme)


def test_the_server_gives_no_files_and_fetches_none(served: Any) -> None:
    assert served.client.get("/gradio_api/file=/etc/passwd").status_code == 403
    assert served.client.get(f"/gradio_api/file={Path(demo.__file__).resolve()}").status_code == 403
    big = served.client.post("/gradio_api/upload", files={"files": ("big.png", b"0" * (41 * 2**20))})
    assert big.status_code == 413
    runs = [f for f in served.page.fns.values() if f.concurrency_id == races.QUEUE]
    assert len(runs) == 2  # a question, a picture: all of them wait in one line
    assert {run.concurrency_limit for run in runs} == {1}
    assert all(inspect.isgeneratorfunction(run.fn) for run in runs)  # of others gradio shows no looks
    assert not [f for f in served.page.fns.values() if f.queue and f.fn and f not in runs]
    stops = [f.cancels for f in served.page.fns.values() if f.cancels]
    assert sorted(run for cancels in stops for run in cancels) == sorted(run._id for run in runs)
    assert served.page.share is False and served.page.allowed_paths == []
    assert served.page.max_file_size == 40 * 2**20 and served.page._queue.max_size == demo.MAX_QUEUE


def parts(page: Any) -> dict[str, Any]:
    """The page's components by their id in the document, in the order of the page."""
    return {block.elem_id: block for block in page.blocks.values() if getattr(block, "elem_id", None)}


def test_an_example_is_chosen_and_the_note_stands_where_one_uploads(served: Any, picture: str) -> None:
    named = parts(served.page)
    assert Path(named["mm-image"].value["path"]).read_bytes() == Path(picture).read_bytes()
    shown = ["mm-image", "mm-note", "mm-prompt", "mm-caption-summary"]
    assert [one for one in named if one in shown] == shown
    assert "drawn scenes only" in named["mm-note"].value


def test_a_new_scene_is_drawn_and_the_prompts_have_labels(served: Any) -> None:
    named = parts(served.page)
    assert named["mm-prompt"].value == PROMPT
    assert served.page.config and "'hard'" in str(served.page.config)
    [new] = [f for f in served.page.fns.values() if f.targets == [(named["mm-new"]._id, "click")]]
    state = SessionState(served.page)
    pictures = [asyncio.run(served.page.process_api(new, [], state=state))["data"][0] for _ in range(2)]
    first, second = (Image.open(picture["path"]) for picture in pictures)
    assert first.size == (scenes.SIDE, scenes.SIDE) and first.tobytes() != second.tobytes()


def test_the_embedded_model_is_asked_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    demo.configure(parser)
    loaded = SimpleNamespace(drafter=object(), notes=[], processor=SimpleNamespace(tokenizer=None))
    monkeypatch.setattr(engine, "load", lambda *_, **__: loaded)
    monkeypatch.setattr(captions, "CaptionRace", lambda *_: None)
    monkeypatch.setattr(demo, "fitting", lambda *_: {})
    offer = demo.load_captions(parser.parse_args([]), None)["Caption"]
    prompts = offer.args[2]
    assert list(prompts)[:2] == ["Describe this image.", "Describe this image in detail."]
    assert [text for text, label in prompts.items() if label != text] == ["Describe this image in detail."]
    assert offer.keywords["draw"] is scenes.drawn and "its own generator" in offer.keywords["note"]
    assert offer.args[1] == zoo.samples()


def test_a_page_of_results_is_shown(served: Any) -> None:
    (show,) = (f for f in served.page.fns.values() if parts(served.page)["mm-results"] in f.outputs)
    assert show.inputs[0].value == "drafters"
    bars, text = show.fn("drafters")
    assert text == "# Texts" and bars.value["data"] == [["stock", 1.0, "without mmspec"], ["eagle", 2.35, "mmspec"]]
    bars, text = show.fn("image")  # without records
    assert text == "# Pictures" and not bars.visible


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"records": 3}', '{"records": [3]}', '{"records": []}'])
def test_other_files_have_no_speedups(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    assert demo.speedups(tmp_path / "a.json")[0] == demo.speedups(tmp_path / "missing.json")[0] == []


HOSTILE = {"pdf": b"%PDF-1.4", "html": b"<html>", "heic": b"\0\0\0\x18ftypheic", "nothing": b""}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_uploads_are_not_opened_by_the_server(content: bytes, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = served.client.post("/gradio_api/upload", files={"files": ("photo.jpg", content)}).json()[0]
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("the server opened an upload"))
    run = next(f for f in served.page.fns.values() if f.concurrency_id == races.QUEUE)
    file = {"path": upload, "meta": {"_type": "gradio.FileData"}}
    values = asyncio.run(served.page.preprocess_data(run, ["image", file, None, *VALUES], None))
    *_, refused = run.fn(*values)
    assert "This picture " in refused[0] and "--" not in refused[0] and "pip install" not in refused[0]


@pytest.mark.parametrize("path", ["/etc/passwd", "http://127.0.0.1:9/x.png"])
def test_only_uploads_are_read(served: Any, path: str) -> None:
    run = next(f for f in served.page.fns.values() if f.concurrency_id == races.QUEUE)
    values = asyncio.run(served.page.preprocess_data(run, ["image", {"path": path}, None, *VALUES], None))
    *_, refused = run.fn(*values)
    assert "no uploaded file" in refused[0]


def test_the_first_prompt_is_drawn_right() -> None:
    """As the embedded model of pictures draws it on the page, told by the embedded model of words."""
    draws = ImageRace(load_painter(embedded.IMAGE_MODEL, "cpu", "float32"))
    [image] = draws.subject.paint([demo.WISHES[0]], [0], guidance_scale=draws.sampling["guidance"]).images
    [said] = PictureReader().describe([image])
    assert "one object on a white background: a large plain green ring" in said
