"""The demo without a browser: streamed steps, coloured tokens, numbers, limits, what it refuses, what it serves."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tiny_llava
from PIL import Image

import mmspec
from mmspec.app import demo, demo_bench, demo_caption, demo_guard, demo_view
from mmspec.app.demo_answer import (
    DONE,
    DRAFTED,
    OWN,
    PLAIN,
    STOPPED,
    TIMED_OUT,
    Answer,
    Ask,
    RefusedError,
    Token,
    Transcript,
    Turn,
)
from mmspec.app.demo_run import Duo
from mmspec.app.engine import Engine
from mmspec.pipelines.prompts import chat_inputs
from mmspec.pipelines.stream import stream

PROMPT = "w5 w6 w7 w5 w6 w7"
VISIT = SimpleNamespace(session_hash="visit")


@pytest.fixture(scope="module")
def duo() -> Duo:
    return Duo(Engine(tiny_llava.model(), tiny_llava.processor(), "ngram", 32))


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pictures") / "red.png"
    Image.new("RGB", (40, 30), "red").save(path)
    return str(path)


@pytest.fixture
def inputs(picture: str) -> Any:
    return chat_inputs(tiny_llava.processor(), [PROMPT], [[Image.open(picture)]])


def last(run: Iterator[Turn]) -> Turn:
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
    model, before = tiny_llava.model(), threading.active_count()
    if enabled:
        mmspec.enable(model)
    steps = stream(model, inputs, max_new_tokens=400, do_sample=False)
    next(steps)
    steps.close()
    assert threading.active_count() == before
    stop = threading.Event()
    count = 0
    for step in stream(model, inputs, stop, max_new_tokens=400, do_sample=False):
        count += len(step.tokens)
        stop.set()
    assert count < 400 and threading.active_count() == before


def test_a_stream_raises_what_generate_raised(inputs: Any) -> None:
    with pytest.raises(ValueError, match="max_new_tokens"):
        list(stream(tiny_llava.model(), inputs, max_new_tokens=-1))
    two = {"input_ids": inputs["input_ids"].repeat(2, 1)}
    with pytest.raises(ValueError, match="one row; got 2"):
        list(stream(tiny_llava.model(), two))


# ------------------------------------------------------------------------------------------------ a run


def test_a_run_colours_every_token_once_and_its_counts_add_up(duo: Duo, picture: str) -> None:
    turn = last(duo.run(Ask(picture, PROMPT, max_new_tokens=48), threading.Event()))
    plain, fast = turn.plain, turn.fast
    assert (plain.state, fast.state, turn.over, turn.difference) == (DONE, DONE, True, None)
    assert plain.ids == fast.ids and len(fast.ids) == 48
    assert plain.text == fast.text == duo.processor.decode(fast.ids, skip_special_tokens=True)
    assert {token.kind for token in plain.tokens} == {PLAIN}
    drafted = [token for token in fast.tokens if token.kind == DRAFTED]
    own = [token for token in fast.tokens if token.kind == OWN]
    assert len(drafted) + len(own) == 48 and 0 < len(drafted) <= fast.accepted
    assert 1 + sum(fast.gains) == 48 == 1 + sum(plain.gains) and plain.accepted == 0
    assert fast.tokens_per_target_call == 1 + fast.accepted / len(fast.gains)
    assert plain.tokens_per_target_call == 1
    assert 0 < fast.prefill <= fast.first <= fast.at[-1] and fast.at == sorted(fast.at)
    assert demo_view.verdict(turn) == ("same", "✓ identical output: 48 of 48 tokens")
    for answer in (plain, fast):
        html = demo_view.pane(answer, "title", "about")
        text = re.search(r'<div class="mm-text"[^>]*>(.*?)</div>', html, re.S)
        assert text is not None and unescape(re.sub(r"<[^>]*>", "", text[1])) == answer.text
        assert text[1].count('<span class="mm-t ') == len(answer.tokens)
    assert not hasattr(type(duo.model), "_mmspec_handle")


def test_depths_follow_each_other() -> None:
    answer = Answer(True)
    for tokens, accepted in (((), 0), ((1,), 0), ((2, 3, 4), 2), ((5,), 3)):  # the last draft was cut by the end
        answer.take(SimpleNamespace(tokens=tokens, accepted=accepted, seconds=1.0))  # type: ignore[arg-type]
    assert [(t.kind, t.depth) for t in answer.tokens] == [(OWN, 0), (DRAFTED, 1), (DRAFTED, 2), (OWN, 0), (DRAFTED, 1)]
    assert (answer.gains, answer.accepted, answer.accepted_draft_tokens_per_call) == ([3, 1], 5, 2.5)


def test_a_difference_is_found_with_its_gap(duo: Duo, picture: str) -> None:
    ask = Ask(picture, PROMPT, max_new_tokens=8)
    turn = last(duo.run(ask, threading.Event()))
    turn.fast.tokens[3].id += 1
    found = duo._difference(turn, ask, duo._inputs(ask))
    assert found is not None and found[0] == 3 and found[1] is not None and found[1] >= 0
    kind, words = demo_view.verdict(Turn(turn.plain, turn.fast, False, 0.0, True, found))
    assert kind == "different" and "token 4" in words


def test_sampling_has_no_badge(duo: Duo, picture: str) -> None:
    turn = last(duo.run(Ask(picture, PROMPT, temperature=1.0, top_p=0.9, max_new_tokens=8), threading.Event()))
    assert demo_view.verdict(turn)[0] == "chance" and turn.difference is None


def test_stop_and_the_time_limit_end_both_answers(duo: Duo, picture: str) -> None:
    stop, before = threading.Event(), threading.active_count()
    run = duo.run(Ask(picture, PROMPT, max_new_tokens=400), stop)
    next(run)
    stop.set()
    turn = last(run)
    assert turn.plain.state == turn.fast.state == STOPPED and len(turn.plain.tokens) < 400
    assert demo_view.verdict(turn)[0] in ("open", "partial")
    run = duo.run(Ask(picture, PROMPT), threading.Event())
    next(run)
    run.close()  # as when the browser went away
    assert threading.active_count() == before and not duo._lock.locked()
    slow = Duo(Engine(tiny_llava.model(), tiny_llava.processor(), "ngram", 32), time_limit=0.0)
    turn = last(slow.run(Ask(picture, PROMPT), threading.Event()))
    assert turn.plain.state == turn.fast.state == TIMED_OUT


def test_letters_of_several_tokens() -> None:
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    for text in ("aé€🙂b".encode(), "aé€🙂".encode()[:-1], b""):  # the second breaks off inside a letter
        transcript = Transcript(decode)
        for byte in text:
            transcript.add(Token(byte, OWN, 0))
        transcript.close()
        assert "".join(token.text for token in transcript.tokens) == decode(list(text))


# ------------------------------------------------------------------------------------------------ refusals

REFUSED = {
    "no picture": ({"image": None}, "no picture"),
    "no prompt": ({"prompt": "  "}, "prompt is empty"),
    "long prompt": ({"prompt": "w" * 2001}, "2000 are allowed"),
    "depth": ({"depth": 99}, "between 1 and 10"),
    "tokens": ({"max_new_tokens": 10**6}, "between 1 and 512"),
    "heat": ({"temperature": float("nan")}, "between 0 and 2"),
    "drafter": ({"drafter": "vispc"}, "choose from ngram"),
    "room": ({"max_new_tokens": 512}, "room for 512"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_question_that_is_not_run_says_why(duo: Duo, picture: str, name: str) -> None:
    change, why = REFUSED[name]
    with pytest.raises(RefusedError, match=why):
        last(duo.run(Ask(**{"image": picture, "prompt": PROMPT, **change}), threading.Event()))
    assert not duo._lock.locked()


def test_pictures_that_are_none(duo: Duo, tmp_path: Path) -> None:
    Image.new("1", (12000, 12000)).save(tmp_path / "huge.png")
    (tmp_path / "text.png").write_text("not a picture")
    for name, why in (("huge.png", "pixels"), ("text.png", "not an image"), ("gone.png", "missing")):
        with pytest.raises(RefusedError, match=why):
            last(duo.run(Ask(str(tmp_path / name), PROMPT), threading.Event()))


def test_trees_fit_their_depth_and_width() -> None:
    assert Ask(None, "", depth=4, width=1, size=96).tree == {"depth": 4, "width": 1}
    assert Ask(None, "", depth=1, width=2, size=32).tree == {"depth": 1, "width": 2, "size": 3}
    assert Ask(None, "", depth=5, width=8, size=2).tree == {"depth": 5, "width": 8, "size": 6}


# ------------------------------------------------------------------------------------------------ the tab


def test_the_tabs_events(duo: Duo, picture: str) -> None:
    tab = demo_caption.Caption(duo)
    assert len(tab.begin(VISIT)) == 5
    looks = list(tab.run(VISIT, picture, PROMPT, "ngram", 5, 1, 6, 0, 1, 8))
    assert "identical output: 8 of 8" in looks[-1][0] and tab._stops == {}
    (refused,) = list(tab.run(VISIT, None, PROMPT, "ngram", 5, 1, 6, 0, 1, 8))
    assert 'role="alert"' in refused[0] and tab._stops == {}
    tab.begin(VISIT)
    tab.stop(VISIT)  # pressed while the run waits for its turn
    *_, end = tab.run(VISIT, picture, PROMPT, "ngram", 5, 1, 6, 0, 1, 8)
    assert "nothing to compare" in end[0]
    assert len(tab.clear(VISIT)) == 5


def test_a_failing_model_is_reported_and_not_fatal(duo: Duo, picture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("<b>no room</b>")

    monkeypatch.setattr(duo.model, "generate", fail)
    tab = demo_caption.Caption(duo)
    looks = list(tab.run(VISIT, picture, PROMPT, "ngram", 5, 1, 6, 0, 1, 8))
    assert "MemoryError: &lt;b&gt;no room" in looks[-1][0] and not duo._lock.locked()


def test_text_from_the_model_is_escaped() -> None:
    html = demo_view.token(Token(1, OWN, 0, '<script>"&'))
    assert "<script>" not in html and "&lt;script&gt;" in html


# ------------------------------------------------------------------------------------------------ the bench's records


def test_no_measurements_is_said_clearly(tmp_path: Path) -> None:
    assert "No measurements yet" in demo_bench.draw(demo_bench.read(tmp_path / "nowhere"), "speedup_e2e", *["all"] * 4)


def test_records_are_filtered_and_escaped(tmp_path: Path) -> None:
    record = {"suite": "scenes", "batch": 1, "temperature": 0.0, "speedup_e2e": 2.0}
    records = [{**record, "method": "eagle"}, {**record, "method": "<i>", "batch": 4, "speedup_e2e": None}]
    (tmp_path / "a.json").write_text(json.dumps({"provenance": {"commit": "c0ffee"}, "records": records}))
    (tmp_path / "b.json").write_text("{broken")
    bench = demo_bench.read(tmp_path)
    assert bench.choices("batch") == ["all", "1", "4"]
    everything = demo_bench.draw(bench, "speedup_e2e", "all", "all", "all", "all")
    assert (
        "<i>&lt;" not in everything and "&lt;i&gt;" in everything and "c0ffee" in everything and "b.json" in everything
    )
    assert everything.count("<tr>") == 3 and everything.count("<li>") == 1
    assert "eagle" not in demo_bench.draw(bench, "speedup_e2e", "all", "all", "4", "all")
    assert "No record passes" in demo_bench.draw(bench, "speedup_e2e", "all", "eagle", "4", "all")


# ------------------------------------------------------------------------------------------------ the door


def test_another_host_needs_a_password() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.3.2.1"):
        assert demo_guard.credentials(host, None) is None
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(demo_guard.DoorError, match="--auth USER:PASSWORD"):
            demo_guard.credentials(host, None)
        assert demo_guard.credentials(host, "ann:pass:word") == ("ann", "pass:word")
    for wrong in ("ann", "ann:", ":pass", ""):
        with pytest.raises(demo_guard.DoorError, match="USER:PASSWORD"):
            demo_guard.credentials("127.0.0.1", wrong)


@pytest.fixture(scope="module")
def served(duo: Duo, picture: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    offer = demo_caption.Offer([Path(picture)], [PROMPT])
    page = demo.build(duo, offer, tmp_path_factory.mktemp("none"))
    _, address, _ = demo.launch(page, "127.0.0.1", None, None, prevent_thread_lock=True, quiet=True)
    with httpx.Client(base_url=address, trust_env=False, timeout=60) as client:
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
    big = served.client.post("/gradio_api/upload", files={"files": ("big.png", b"0" * (21 * 2**20))})
    assert big.status_code == 413
    run = next(f for f in served.page.fns.values() if f.concurrency_id == demo_caption.MODEL)
    address = {"path": "http://127.0.0.1:9/x.png", "meta": {"_type": "gradio.FileData"}}
    with pytest.raises(Exception, match="fetches nothing"):
        import asyncio

        asyncio.run(served.page.preprocess_data(run, [address, PROMPT, "ngram", 5, 1, 6, 0, 1, 8], None))
    assert run.concurrency_limit == 1 and served.page.max_file_size == 20 * 2**20
    assert served.page.share is False and served.page.allowed_paths == []
