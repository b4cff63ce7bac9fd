"""The demo without a browser: streamed steps, coloured tokens, numbers, limits, what it refuses, what it serves."""

from __future__ import annotations

import argparse
import asyncio
import gc
import inspect
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import httpx
import pytest
import tiny_llamagen
import tiny_llava
import torch
from gradio import networking
from gradio.state_holder import SessionState
from PIL import Image

import mmspec
from benchmarks.suites.faithful import PictureReader
from mmspec.app import embedded, engine
from mmspec.app.demo import caption_tab, guard, image_tab, image_view, look, records, sight, view
from mmspec.app.demo import command as demo
from mmspec.app.demo.answer import CORRECTED, DRAFTED, OWN, PLAIN, Ask, ChatTurn, ShownAnswer, Token, cut
from mmspec.app.demo.desk import QUEUE, Desk, RefusedError
from mmspec.app.demo.duo import Duo, fitting
from mmspec.app.demo.easel import METHODS, SEED_EXACT, Easel, Wish
from mmspec.app.demo.race import DONE, STOPPED, TIMED_OUT
from mmspec.app.devices import EngineError
from mmspec.app.embedded import SHIPPED
from mmspec.app.engine import Engine
from mmspec.app.media.decoder import Decoder
from mmspec.app.painter import ImageSubject
from mmspec.app.painter import load as load_painter
from mmspec.pipelines.prompts import chat_inputs
from mmspec.pipelines.serving.stream import Step, stream
from mmspec.registry import OF_TEXT, USUAL
from mmspec.zoo import scenes

PROMPT = "w5 w6 w7 w5 w6 w7"
PATIENCE = 300  # seconds, for what a busy machine may delay
VISIT = SimpleNamespace(session_hash="visit")


@pytest.fixture(scope="module")
def eyes() -> Iterator[Decoder]:
    with sight.decoder() as made:
        yield made


@pytest.fixture(scope="module")
def duo(eyes: Decoder) -> Duo:
    return Duo(Engine(tiny_llava.model(), tiny_llava.processor(), "ngram", 32), eyes)


@pytest.fixture(scope="module")
def easel() -> Easel:
    return Easel(ImageSubject(tiny_llamagen.pipeline(grid=8), clean_caption=False))


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
    path = tmp_path_factory.mktemp("clips") / "grey.mp4"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=6, width=64, height=48, pix_fmt="yuv420p")
        for grey in range(0, 240, 20):
            file.mux(stream.encode(av.VideoFrame.from_image(Image.new("RGB", (64, 48), (grey, grey, grey)))))
        file.mux(stream.encode())
    return str(path)


def about(picture: str | None, prompt: str = PROMPT, **options: Any) -> Ask:
    return Ask("image", picture, None, prompt, **options)


def threads() -> set[threading.Thread]:
    """Those that run; a progress bar or a server may start one of its own at any time."""
    return {thread for thread in threading.enumerate() if re.search(r"\((run|whole)\)", thread.name)}


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


def test_a_run_colours_every_token_once_and_its_counts_add_up(duo: Duo, picture: str) -> None:
    turn = last(duo.run(about(picture, PROMPT, max_new_tokens=48), threading.Event()))
    plain, fast = turn.plain, turn.fast
    assert (plain.state, fast.state, turn.over, turn.difference) == (DONE, DONE, True, None)
    assert plain.ids == fast.ids and len(fast.ids) == 48
    assert plain.text == fast.text == duo.processor.decode(fast.ids, skip_special_tokens=True)
    assert {token.kind for token in plain.tokens} == {PLAIN}
    drafted = [token for token in fast.tokens if token.kind == DRAFTED]
    own = [token for token in fast.tokens if token.kind in (OWN, CORRECTED)]
    assert len(drafted) + len(own) == 48 and 0 < len(drafted) <= fast.accepted
    assert {OWN, CORRECTED} == {token.kind for token in own}
    assert sum(fast.calls) == 48 == sum(plain.calls) and plain.accepted == 0
    assert fast.tokens_per_target_call == 1 + fast.accepted / fast.rounds
    assert plain.tokens_per_target_call == 1
    assert 0 < fast.vision < fast.prefill <= fast.first <= fast.at[-1] and fast.at == sorted(fast.at)
    assert view.acceptance(turn) == ("same", "✓ identical output: 48 of 48 tokens")
    texts = re.findall(r'<div class="mm-text"[^>]*>(.*?)</div>', view.stage(turn), re.S)
    for answer, text in zip((plain, fast), texts, strict=True):
        assert unescape(re.sub(r"<[^>]*>", "", text)) == answer.text
        assert text.count('<span class="mm-t ') == len(answer.tokens)
        shown = [float(at) for at in re.findall(r'style="--t:([\d.]+)"', text)]
        assert shown == pytest.approx(answer.at, abs=1e-3)  # each token is replayed at its own moment, on one clock
    assert [int(n) for n in re.findall(r'data-n="(\d+)"', texts[1])] == fast.calls and "data-n" not in texts[0]
    assert not hasattr(type(duo.model), "_mmspec_patch")


def test_a_call_begins_where_its_first_token_stands() -> None:
    answer = ShownAnswer(accelerated=True)
    for tokens, accepted in (((), 0), ((1,), 0), ((2, 3, 4), 2), ((5,), 3)):  # the last draft was cut by the end
        answer.take(Step(tokens, accepted, 1.0, corrected=accepted == 2))
    kinds = [(OWN, 1), (DRAFTED, 3), (DRAFTED, 0), (CORRECTED, 0), (DRAFTED, 1)]
    assert [(t.kind, t.begins) for t in answer.tokens] == kinds
    assert (answer.calls, answer.accepted, answer.accepted_draft_tokens_per_call) == ([1, 3, 1], 5, 2.5)


def test_both_sides_are_measured_before_anything_is_shown_and_a_long_race_is_replayed_faster() -> None:
    plain, fast = ShownAnswer(at=[1.0, 30.0], seconds=30.0, state=DONE), ShownAnswer(at=[6.0], seconds=6.0, state=DONE)
    turn = ChatTurn(plain, fast, about(None), 0.0)
    plain.tokens, fast.tokens = [Token(1, PLAIN, 1, "a"), Token(2, PLAIN, 1, "b")], [Token(1, OWN, 1, "a")]
    assert re.findall(r"mm-t [^>]*--t:([\d.]+)", view.stage(turn)) == ["0.400", "12.000", "2.400"]
    assert re.findall(r"--w:([\d.]+)%;--for:([\d.]+)", view.stage(turn)) == [("100.0", "12.000"), ("20.0", "2.400")]
    assert "Replayed 2.5× as fast as it ran." in view.headline(turn)


def test_the_first_prefill_does_not_inflate_the_headline(duo: Duo, picture: str) -> None:
    cold = []

    def slow(*_: Any) -> None:
        if not cold:
            cold.append(time.sleep(2))

    hook = duo.model.register_forward_pre_hook(slow)
    try:
        turn = last(duo.run(about(picture, max_new_tokens=8), threading.Event()))
    finally:
        hook.remove()
    assert cold and turn.plain.seconds < 2


def test_an_answer_that_was_cut_off_says_so(duo: Duo, picture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = last(duo.run(about(picture, max_new_tokens=8), threading.Event()))
    assert turn.plain.cut and turn.fast.cut
    assert "Cut off at 8 tokens" in view.headline(turn) and "8, cut off | 8, cut off" in view.figures(turn)
    monkeypatch.setattr(duo.model.generation_config, "eos_token_id", turn.plain.ids[3])
    turn = last(duo.run(about(picture, max_new_tokens=8), threading.Event()))
    assert len(turn.plain.tokens) <= 4 and not turn.plain.cut and "Cut off" not in view.headline(turn)


def test_only_a_gain_is_green() -> None:
    gain, loss, none = (look.headline(much, 2.0, "forward", "") for much in (1.2, 0.9, None))
    assert "mm-gain" in gain and "1.20×</strong> as fast" in gain and "2.00</strong> tokens per forward" in gain
    assert "mm-gain" not in loss + none and "0.90×</strong> the speed" in loss
    assert re.search(r"\.mm-gain[^}]*color", demo.STYLE.read_text())


def test_photos_of_phones_are_made_smaller(eyes: Decoder, tmp_path: Path) -> None:
    path = tmp_path / "phone.jpg"
    Image.new("RGB", (8160, 6120), "red").save(path)  # 50 million pixels
    [shown] = sight.look_at(about(str(path)), eyes, threading.Event())
    assert max(shown.size) == sight.LONGEST and shown.getpixel((0, 0))[0] > 200


def test_a_difference_is_found_with_its_gap(duo: Duo, picture: str) -> None:
    ask = about(picture, PROMPT, max_new_tokens=8)
    turn = last(duo.run(ask, threading.Event()))
    turn.fast.tokens[3].id += 1
    found = duo._difference(turn, duo._inputs(ask, (Image.open(picture),)))
    assert found is not None and found[0] == 3 and found[1] is not None and found[1] >= 0
    kind, words = view.acceptance(ChatTurn(turn.plain, turn.fast, ask, 0.0, over=True, difference=found))
    assert kind == "different" and "token 4" in words


@pytest.mark.parametrize("same", [True, False], ids=["same draws", "own draws"])
def test_sampled_answers_are_compared_only_where_they_must_be_the_same(duo: Duo, picture: str, same: bool) -> None:
    ask = about(picture, temperature=1, top_p=0.9, seed=3, reproducible=same, max_new_tokens=16)
    turn = last(duo.run(ask, threading.Event()))
    assert view.acceptance(turn)[0] == ("same" if same else "chance") and turn.difference is None
    assert (turn.plain.ids == turn.fast.ids) or not same


def test_a_second_turn_reads_the_first(duo: Duo, picture: str) -> None:
    ask = about(picture, "w9", before=(("w5 w6", "w7 w8"),), max_new_tokens=8)
    inputs = duo._inputs(ask, (Image.open(picture),))
    words = duo.processor.decode(inputs["input_ids"][0]).replace("<image>", "").split()
    assert words == ["w5", "w6", "w7", "w8", "w9"] and "pixel_values" in inputs
    one, two = (last(duo.run(a, threading.Event())) for a in (about(picture, "w9", max_new_tokens=8), ask))
    assert two.plain.ids == two.fast.ids != one.plain.ids
    said = view.talk(ask.before, ask.prompt, ())
    assert re.findall(r"<li class=.mm-(\w+).>([^<]*)", said) == [
        ("asked", "w5 w6"),
        ("answered", "w7 w8"),
        ("asked", "w9"),
    ]


def test_a_video_is_looked_at_frame_by_frame(duo: Duo, clip: str) -> None:
    asks = [Ask("video", None, clip, PROMPT, frames=n, max_new_tokens=8) for n in (2, 5)]
    turns = [last(duo.run(ask, threading.Event())) for ask in asks]
    assert [len(turn.frames) for turn in turns] == [2, 5]
    greys = [frame.getpixel((5, 5))[0] for frame in turns[1].frames]
    assert greys == sorted(greys) and greys[-1] > greys[0] + 100
    for turn in turns:
        assert turn.plain.ids == turn.fast.ids and view.acceptance(turn)[0] == "same"
    pixels = [len(duo._inputs(ask, turn.frames)["pixel_values"]) for ask, turn in zip(asks, turns, strict=True)]
    assert pixels == [2, 5]
    assert view.talk((), "", turns[1].frames).count("<img ") == 5
    with pytest.raises(RefusedError, match="no video"):
        last(duo.run(Ask("video", None, None, PROMPT), threading.Event()))


def test_stop_and_the_time_limit_end_both_answers(duo: Duo, picture: str) -> None:
    stop, before = threading.Event(), threads()
    run = duo.run(about(picture, PROMPT, max_new_tokens=400), stop)
    next(run)
    stop.set()
    turn = last(run)
    assert turn.plain.state == turn.fast.state == STOPPED and len(turn.plain.tokens) < 400
    assert view.acceptance(turn)[0] in ("open", "partial")
    run = duo.run(about(picture, PROMPT), threading.Event())
    next(run)
    run.close()  # as when the browser went away
    assert threads() <= before
    slow = Duo(Engine(tiny_llava.model(), tiny_llava.processor(), "ngram", 32), duo.decoder, time_limit=0.0)
    turn = last(slow.run(about(picture, PROMPT), threading.Event()))
    assert turn.plain.state == turn.fast.state == TIMED_OUT


@pytest.mark.parametrize("named, name", [(SHIPPED, USUAL), ("recycle", "recycle")])
def test_all_drafters_that_fit_can_be_chosen(named: str, name: str, eyes: Decoder, picture: str) -> None:
    """Of a model that ships with nothing, and whose files hold no heads: those without weights."""
    made = Engine(tiny_llava.model(), tiny_llava.processor(), named, 32)
    both = Duo(made, eyes, drafters=fitting(made, "somebody/tiny"))
    assert both.name == next(iter(both.drafters)) == name and set(both.drafters) == set(OF_TEXT)
    for drafter in both.drafters:
        assert view.acceptance(both.whole(about(picture, drafter=drafter, max_new_tokens=8)))[0] == "same"
    with pytest.raises(RefusedError, match="width must be at most 8"):
        both.whole(about(picture, drafter="recycle", width=12))
    with pytest.raises(EngineError, match="needs weights"):
        fitting(made, "somebody/tiny", ["eagle"])


@pytest.mark.full
def test_the_embedded_drafters_fit_the_embedded_model() -> None:
    made = engine.load(embedded.MODEL, embedded.DRAFTER, "cpu", "float32", 8, 0.0)
    own = {"eagle", "msd", "vispec", "flash", "specvlm", "block"}
    assert set(fitting(made, embedded.MODEL)) == own | set(OF_TEXT)


def test_letters_of_several_tokens() -> None:
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    for text in ("aé€🙂b".encode(), "aé€🙂".encode()[:-1], b""):  # the second breaks off inside a letter
        tokens = [Token(byte, OWN) for byte in text]
        cut(tokens, decode)
        assert "".join(token.text for token in tokens) == decode(list(text))


# ------------------------------------------------------------------------------------------------ refusals

REFUSED = {
    "no picture": ({"image": None}, "no picture"),
    "no prompt": ({"prompt": "  "}, "prompt is empty"),
    "long prompt": ({"prompt": "w" * 2001}, "2000 are allowed"),
    "depth": ({"depth": 99}, "between 0 and 16"),
    "tokens": ({"max_new_tokens": 10**6}, "between 1 and 512"),
    "heat": ({"temperature": float("nan")}, "between 0 and 2"),
    "drafter": ({"drafter": "vispc"}, "choose from ngram"),
    "room": ({"max_new_tokens": 512}, "room for 512"),
    "kind": ({"kind": "sound"}, "image, video"),
    "seed": ({"seed": None}, "between 0 and"),
    "half a token": ({"max_new_tokens": 1.5}, "whole number between 1 and 512"),
    "turns": ({"before": (("w5", "w6"),) * 8}, "at most 8 turns"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_question_that_is_not_run_says_why(duo: Duo, picture: str, name: str) -> None:
    change, why = REFUSED[name]
    with pytest.raises(RefusedError, match=why):
        last(
            duo.run(
                Ask(**{"kind": "image", "image": picture, "video": None, "prompt": PROMPT, **change}), threading.Event()
            )
        )


def test_pictures_that_are_none(duo: Duo, tmp_path: Path) -> None:
    Image.new("1", (12000, 12000)).save(tmp_path / "huge.png")
    (tmp_path / "text.png").write_text("not a picture")
    for name, why in (("huge.png", "pixels"), ("text.png", "not an image"), ("gone.png", "missing")):
        with pytest.raises(RefusedError, match=why):
            last(duo.run(about(str(tmp_path / name)), threading.Event()))


def test_trees_fit_their_depth_and_width() -> None:
    rest = {"reproducible": False, "compile": False, "auto": False}
    assert about(None).options == rest  # as the drafter recommends
    assert about(None, "", depth=4, width=1, size=96).options == {"depth": 4, "width": 1, "size": 5} | rest
    assert about(None, "", depth=1, width=2, size=32).options == {"depth": 1, "width": 2, "size": 3} | rest
    assert about(None, "", depth=5, width=8, size=2).options == {"depth": 5, "width": 8, "size": 6} | rest


# ------------------------------------------------------------------------------------------------ the tab


VALUES = (PROMPT, "ngram", 5, 0, 0, 0, 1, 0, True, 8, 4, False, False)  # Ask's fields after the media


def test_the_tabs_events(duo: Duo, picture: str) -> None:
    tab = caption_tab.Caption(duo, Desk())
    assert len(tab.begin(VISIT)) == 5
    looks = list(tab.run(VISIT, "image", picture, None, *VALUES))
    assert "identical output: 8 of 8" in looks[-1][0] and tab.desk._ends == {}
    assert all("Measuring" in look[0] and not isinstance(look[1], str) for look in looks[:-1])  # then both at once
    said = looks[-1][4]
    assert [asked for asked, _ in said] == [PROMPT]
    *_, end = tab.go_on(VISIT, said, "w9", "image", picture, None, *VALUES)
    assert [asked for asked, _ in end[4]] == [PROMPT, "w9"]
    assert next(tab.run(VISIT, "image", picture, None, *VALUES))[4] == []  # stopped, it leaves no earlier conversation
    (refused,) = list(tab.run(VISIT, "image", None, None, *VALUES))
    assert 'role="alert"' in refused[0] and tab.desk._ends == {}
    tab.begin(VISIT)
    tab.stop(VISIT)  # pressed while the run waits for its turn
    *_, end = tab.run(VISIT, "image", picture, None, *VALUES)
    assert 'role="alert"' in end[0] or "nothing to compare" in end[0]
    assert len(tab.clear(VISIT)) == 9


def test_a_failing_model_is_reported_and_not_fatal(duo: Duo, picture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("<b>no room</b>")

    tab = caption_tab.Caption(duo, Desk())
    with monkeypatch.context() as patch:
        patch.setattr(duo.model, "generate", fail)
        looks = list(tab.run(VISIT, "image", picture, None, *VALUES))
    assert "MemoryError: &lt;b&gt;no room" in looks[-1][0]
    assert "identical" in list(tab.run(VISIT, "image", picture, None, *VALUES))[-1][0]


def test_the_desk_serves_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspec.app.demo.desk.BUSY", 0.05)
    desk = Desk()

    def wait(stop: threading.Event) -> Iterator[str]:
        yield "begun"
        assert stop.wait(10)
        yield "stopped"

    first = desk.serve("ann", wait, str)
    assert next(first) == "begun"
    assert "busy" in "".join(desk.serve("bob", wait, str))
    desk.begin("ann")  # she starts something else, in whatever tab
    assert list(first) == ["stopped"]
    second = desk.serve("bob", wait, str)
    assert next(second) == "begun"
    second.close()  # his page went away
    assert not desk._lock.locked() and "bob" not in desk._ends


def test_a_stopped_run_frees_its_memory(duo: Duo, easel: Easel, picture: str) -> None:
    def held() -> int:
        gc.collect()
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        return sum(t.untyped_storage().nbytes() for t in tensors)

    desk = Desk()
    for run in (
        lambda stop: duo.run(about(picture, max_new_tokens=400), stop),
        lambda stop: easel.run(Wish("a small circle", seed=1), stop),
    ):
        sizes = []
        for _ in range(2):  # the first leaves what all others need, too
            looks = desk.serve("ann", run, str)
            next(looks)
            desk.stop("ann")
            assert last(looks).over
            del looks
            sizes.append(held())
        assert sizes[1] <= sizes[0]


# ------------------------------------------------------------------------------------------------ pictures


@pytest.mark.parametrize("method", METHODS)
def test_a_picture_fills_its_grid_and_the_counts_add_up(easel: Easel, method: str) -> None:
    pair = last(easel.run(Wish("a small circle", method, window=4, seed=5), threading.Event()))
    for drawn in (pair.plain, pair.fast):
        assert drawn.state == DONE and drawn.count == len(drawn.at) == 64 and drawn.image is not None
        assert len(drawn.calls) == len(drawn.begins) == drawn.result.forwards and 0 < drawn.first < drawn.seconds
        assert drawn.at == sorted(drawn.at) and max(drawn.at) <= drawn.seconds
    assert pair.plain.result.stats.accepted == 0 and len(pair.plain.calls) == 64
    accepted = pair.fast.result.stats.accepted
    assert accepted > 0 and accepted + len(pair.fast.calls) in (64, 65)  # the last may end in a draft
    assert easel.subject.pipe._plan(True).reproducible  # plain again
    html = image_view.stage(pair, marked=True)
    assert html.count("mm-call") == len(pair.fast.calls) and html.count("--t:") == 128 + 2 and "mm-open" not in html
    kind, words = image_view.acceptance(pair)
    assert kind == ("same" if method == SEED_EXACT or pair.same == 64 else "kept"), words


def test_a_lossy_picture_tells_its_distortion(easel: Easel) -> None:
    wish = Wish("a small circle", "jacobi, maximal coupling", window=4, rule="scaled", boldness=5, seed=2)
    pair = last(easel.run(wish, threading.Event()))
    kind, words = image_view.acceptance(pair)
    [spent] = pair.fast.result.spent
    assert spent > 0 and kind == "lossy" and f"{spent:.2f}" in words and pair.rule in image_view.headline(pair)
    limited = last(easel.run(Wish(**{**vars(wish), "budget": 0.25}), threading.Event()))
    assert 0 < limited.fast.result.spent[0] <= 0.25 + 1e-9 and "budget of 0.25" in image_view.headline(limited)


WRONG = {
    "prompt": ({"prompt": " "}, "prompt is empty"),
    "method": ({"method": "magic"}, "choose from jacobi, seed-exact"),
    "window": ({"window": 1000}, "between 2 and 64"),
    "bent": ({"rule": "scaled"}, "the very picture of plain decoding"),
    "heat": ({"temperature": float("nan")}, "between 0 and 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wish_that_is_not_drawn_says_why(easel: Easel, name: str) -> None:
    change, why = WRONG[name]
    with pytest.raises(RefusedError, match=why):
        last(easel.run(Wish(**{"prompt": "a circle", **change}), threading.Event()))


def test_a_picture_can_be_stopped(easel: Easel) -> None:
    stop, before = threading.Event(), threads()
    run = easel.run(Wish("a small circle"), stop)
    next(run)
    stop.set()
    pair = last(run)
    assert pair.plain.state == pair.fast.state == STOPPED and pair.plain.count < 64
    assert image_view.acceptance(pair) == ("open", "nothing to compare")
    assert threads() <= before
    slow = Easel(easel.subject, time_limit=0.0)
    assert last(slow.run(Wish("a small circle"), threading.Event())).plain.state == TIMED_OUT


def test_the_image_tabs_events(easel: Easel) -> None:
    tab = image_tab.Image(easel, Desk(), own=True)
    assert len(tab.begin(VISIT)) == 5
    values = ("a zebra circle", SEED_EXACT, 4, "exact", 1, 0, 7, 3.0, 1.0)
    looks = list(tab.run(VISIT, *values))
    assert "the same picture: 64 of 64" in looks[-1][0] and "does not know: zebra" in looks[-1][0]
    assert looks[-1][1].count('src="data:image/png;base64,') == 2 and "tokens per forward | 1.00 |" in looks[-1][2]
    (refused,) = list(tab.run(VISIT, "", *values[1:]))
    assert 'role="alert"' in refused[0]


def test_text_from_the_model_is_escaped() -> None:
    html = view.token(Token(1, OWN, 0, '<script>"&'))
    assert "<script>" not in html and "&lt;script&gt;" in html


# ------------------------------------------------------------------------------------------------ the bench's records


RECORD = {
    "suite": "vlm", "batch": 1, "temperature": 0.0, "speedup_e2e": 2.0, "speedup_e2e_p25": 1.5, "speedup_e2e_p75": 2.5,
    "tokens_per_target_call": 3.0, "acceptance_by_depth": [0.9, 0.5],
}  # fmt: skip


@pytest.fixture
def bench(tmp_path: Path) -> records.ResultFolder:
    made = [
        {**RECORD, "method": "eagle"},
        {**RECORD, "method": "<i>", "batch": 4, "speedup_e2e": None},
        {**RECORD, "method": "stock", "speedup_e2e": 1.0},
    ]
    pictures = [
        {"suite": "image", "method": "jacobi+scaled", "lossless": False, "spent": 3.5, "compression": 4.0},
        {"suite": "image", "method": "ar", "lossless": True, "spent": 0.0, "compression": 1.0},
    ]
    told = {"provenance": {"commit": "c0ffee", "model": "scenes"}}
    (tmp_path / "vlm.json").write_text(json.dumps(told | {"records": made}))
    (tmp_path / "a.json").write_text(json.dumps(told | {"records": pictures}))
    (tmp_path / "b.json").write_text("{broken")
    (tmp_path / "expected.json").write_text(json.dumps({"provenance": {}, "expected": []}))  # the bench's, no records
    (tmp_path / "reads.json").write_text(json.dumps({"provenance": {}, "records": [{"method": "ar", "reads": 261}]}))
    return records.read(tmp_path)


def test_runs_are_shown_one_at_a_time(bench: records.ResultFolder) -> None:
    assert list(bench.runs) == ["a.json", "vlm.json"] and bench.first("scenes") == "vlm.json" == bench.first(
        "another model"
    )
    assert bench.trouble == ["b.json: it has no records of mmspec bench"]
    assert records.measures(bench.runs["a.json"]["records"]) == ["compression", "spent"]
    one, four = bench.conditions("vlm.json")
    assert (one, four) == ("batch 1, temperature 0", "batch 4, temperature 0")
    bars, rows, notes = records.shown(bench, "vlm.json", one, "speedup_e2e")
    assert rows["method"].to_list() == ["eagle", "stock"] and rows["speed-up, end to end"].to_list() == [2, 1]
    assert rows["upper quartile"].to_list() == [2.5, 2.5] and bars.title == f"Speed-up, end to end; {one}"
    assert "c0ffee" in notes and "wall time" in notes and bench.trouble[0] in notes
    assert records.shown(bench, "vlm.json", four, "speedup_e2e")[1]["method"].to_list() == ["<i>"]  # not measured there
    assert records.shown(bench, "a.json", "as it is", "spent")[1]["distribution"].to_list() == [
        "lossy",
        "without mmspec",
    ]
    assert bench.quality("image", "scenes")["ar"]["compression"] == 1 and bench.quality("image", "other") == {}


def test_a_run_has_a_title_in_words(bench: records.ResultFolder) -> None:
    assert bench.title("vlm.json") == "Answers about pictures, scenes"
    assert bench.title("a.json") == "Pictures from prompts, scenes: a"
    own = records.read(demo.RESULTS)
    titles = [own.title(run) for run in own.runs]
    assert len(set(titles)) == len(titles) and not any(".json" in title or "-short" in title for title in titles)
    assert "scenes-video" in own.title(own.first(embedded.MODEL))


def test_of_many_bars_the_best_are_shown(bench: records.ResultFolder) -> None:
    many = [{**RECORD, "method": f"eagle-{n}", "speedup_e2e": 1 + n / 10} for n in range(30)]
    run = {"many.json": {"records": many, "provenance": {}}}
    bars, *_ = records.shown(
        records.ResultFolder(Path(), run, []), "many.json", records.condition(RECORD), "speedup_e2e"
    )
    best = [row[0] for row in bars.value["data"]]
    assert len(best) == records.BARS <= 12 and best[0] == "eagle-29" and "eagle-17" not in best


def test_no_measurements_is_said_clearly(tmp_path: Path) -> None:
    assert "No measurements yet" in records.origins(records.read(tmp_path / "nowhere"), "", "")


# ------------------------------------------------------------------------------------------------ the door


def test_another_host_needs_a_password() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.3.2.1"):
        assert guard.credentials(host, None) is None
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(guard.AccessError, match="--auth USER:PASSWORD"):
            guard.credentials(host, None)
        assert guard.credentials(host, "ann:pass:word") == ("ann", "pass:word")
    for wrong in ("ann", "ann:", ":pass", ""):
        with pytest.raises(guard.AccessError, match="USER:PASSWORD"):
            guard.credentials("127.0.0.1", wrong)


@pytest.fixture(scope="module")
def served(duo: Duo, easel: Easel, picture: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    offer = caption_tab.Offer(
        [Path(picture)], [PROMPT, "w9"], note="knows drawn scenes only", hard="w9", draw=scenes.drawn
    )
    page = demo.build(duo, offer, records.read(tmp_path_factory.mktemp("none")), easel)
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
    address = {"path": "http://127.0.0.1:9/x.png", "meta": {"_type": "gradio.FileData"}}
    runs = [f for f in served.page.fns.values() if f.concurrency_id == QUEUE]
    assert len(runs) == 3  # a question, a further one, a picture: all of them wait in one line
    assert {run.concurrency_limit for run in runs} == {1}
    assert all(inspect.isgeneratorfunction(run.fn) for run in runs)  # of others gradio shows no looks
    others = {f.name for f in served.page.fns.values() if f.queue and f.fn and f not in runs}
    assert others == {"stop"}  # of a page that is closed
    for media in ([address, None], [None, address]):
        with pytest.raises(Exception, match="fetches nothing"):
            asyncio.run(served.page.preprocess_data(runs[0], ["image", *media, *VALUES], None))
    assert served.page.share is False and served.page.allowed_paths == []
    assert served.page.max_file_size == 40 * 2**20 and served.page._queue.max_size == demo.MAX_QUEUE


def parts(page: Any) -> dict[str, Any]:
    """The page's components by their id in the document, in the order of the page."""
    return {block.elem_id: block for block in page.blocks.values() if getattr(block, "elem_id", None)}


def test_an_example_is_chosen_and_the_note_stands_where_one_uploads(served: Any, picture: str) -> None:
    named = parts(served.page)
    assert Path(named["mm-image"].value["path"]).read_bytes() == Path(picture).read_bytes()
    order = list(named)
    assert (
        order.index("mm-image") < order.index("mm-note") < order.index("mm-prompt") < order.index("mm-caption-summary")
    )
    assert "drawn scenes only" in named["mm-note"].value


def test_a_new_scene_is_drawn_and_the_hard_question_is_named(served: Any) -> None:
    named = parts(served.page)
    assert named["mm-prompt"].value == PROMPT
    assert served.page.config and "w9 (a stress test: hard to draft)" in str(served.page.config)
    [new] = [f for f in served.page.fns.values() if f.targets == [(named["mm-new"]._id, "click")]]
    state = SessionState(served.page)
    pictures = [asyncio.run(served.page.process_api(new, [], state=state))["data"][0] for _ in range(2)]
    first, second = (Image.open(picture["path"]) for picture in pictures)
    assert first.size == (scenes.SIDE, scenes.SIDE) and first.tobytes() != second.tobytes()


def test_the_embedded_model_is_asked_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    demo.configure(parser)
    monkeypatch.setattr(engine, "load", lambda *_, **__: SimpleNamespace(drafter=object(), notes=[]))
    monkeypatch.setattr("mmspec.app.demo.duo.Duo", lambda *_: SimpleNamespace(warm_up=lambda *_: None))
    monkeypatch.setattr("mmspec.app.demo.duo.fitting", lambda *_: {})
    _, offer = demo._captions(parser.parse_args([]), None, [], [])
    assert offer.prompts == ["Describe this image.", "Describe this image in detail."]
    assert offer.hard == offer.prompts[1]
    assert offer.draw is scenes.drawn and "its own generator" in offer.note


HOSTILE = {"pdf": b"%PDF-1.4", "html": b"<html>", "heic": b"\0\0\0\x18ftypheic", "nothing": b""}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_uploads_are_not_opened_by_the_server_even_after_an_example(
    content: bytes, served: Any, duo: Duo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An example makes gradio build the component anew, by its class: what guards it has to be the class's own."""
    page, image = served.page, parts(served.page)["mm-image"]
    upload = served.client.post("/gradio_api/upload", files={"files": ("photo.jpg", content)}).json()[0]
    state = SessionState(page)
    [load] = [f for f in page.fns.values() if f.outputs == [image] and f.name == "load_example"]
    asyncio.run(page.process_api(load, [0], state=state))
    assert state[image._id] is not image, "it was built anew"
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("the server opened an upload"))
    run = next(f for f in page.fns.values() if f.concurrency_id == QUEUE)
    file = {"path": upload, "meta": {"_type": "gradio.FileData"}}
    kind, path, *_ = asyncio.run(page.preprocess_data(run, ["image", file, None, *VALUES], state))
    with pytest.raises(RefusedError, match=r"^This picture .*\.$") as refused:
        last(duo.run(Ask(kind, path, None, PROMPT), threading.Event()))
    assert "--" not in str(refused.value) and "pip install" not in str(refused.value)


def test_a_run_that_cannot_be_read_is_answered(served: Any) -> None:
    """What fails before our functions are called, too; else the page would wait for ever."""
    fns = served.page.fns
    for run in (f for f in fns.values() if f.concurrency_id == QUEUE):
        [answers] = [f for f in fns.values() if f.trigger_after == run._id and f.trigger_only_on_failure]
        assert answers.outputs and look.FAILED in answers.fn()


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(monkeypatch, capsys) -> None:
    monkeypatch.setattr(demo, "load", lambda *_: pytest.fail("models were loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        parser = argparse.ArgumentParser()
        demo.configure(parser)
        assert demo.run(parser.parse_args(["--port", str(port)])) == 1
    assert f"cannot listen at 127.0.0.1:{port} (" in capsys.readouterr().err


def test_the_first_prompt_is_drawn_right() -> None:
    """As the embedded model of pictures draws it on the page, told by the embedded model of words."""
    easel = Easel(load_painter(embedded.IMAGE_MODEL, "cpu", "float32"))
    [image] = easel.subject.paint([demo.WISHES[0]], [0], guidance_scale=easel.guidance).images
    [said] = PictureReader().describe([image])
    assert "one object on a white background: a large plain green ring" in said
