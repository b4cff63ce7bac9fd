"""`--model mmspec` of lmms-eval: requests as its tasks make them, by lmms-eval itself where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import clips
import fake_lmms
import pytest
from PIL import Image

from mmspec import zoo
from mmspec.app.media.video import FramePolicy
from mmspec.statistics import Stats

THERE = importlib.util.find_spec("lmms_eval") is not None
MODULE = "benchmarks.lmms"
PICTURES = [Image.open(path) for path in sorted(zoo.samples().glob("*.png"))[:4]]
SHORT = zoo.PROMPTS["short"]
DOCS = [{"asked": SHORT, "seen": PICTURES[:1]}, {"asked": f"<image>{SHORT}", "seen": PICTURES[1:3]},
        {"asked": SHORT, "seen": PICTURES[3:]}]  # fmt: skip
GREEDY = {"max_new_tokens": 16, "temperature": 0, "do_sample": False, "top_p": 1.0, "num_beams": 1}


@pytest.fixture(scope="module")
def adapter() -> Iterator[Any]:
    """The embedded model as lmms-eval makes it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in {} if THERE else fake_lmms.modules().items():
            patch.setitem(sys.modules, name, module)
        made = importlib.import_module(MODULE).Mmspec(device="cpu", batch_size="2", max_new_tokens=16, depth=4)
        made.task_dict = {"task": {"test": DOCS}}
        yield made
        made.clean()
        sys.modules.pop(MODULE, None)  # its base class may be a stand-in


def messages(doc: dict[str, Any]) -> list[dict[str, Any]]:
    seen = [{"type": "image", "url": one} for one in doc["seen"]]
    return [{"role": "user", "content": [*seen, {"type": "text", "text": doc["asked"]}]}]


def requests(*settings: dict[str, Any], to: Callable[..., Any] = messages) -> list[Any]:
    """One for each of the documents, with settings of its own."""
    from lmms_eval.api.instance import Instance

    about = {"task": "task", "doc_id": 0, "repeats": 1}
    return [Instance("generate_until", (doc["asked"], to, each, number, "task", "test"), 0, about)
            for number, (doc, each) in enumerate(zip(DOCS, settings, strict=False))]  # fmt: skip


def stock(adapter: Any, doc: dict[str, Any], **settings: Any) -> tuple[str, int]:
    """The text, and how many tokens it has, by transformers alone."""
    (turn,) = messages(doc | {"asked": SHORT})
    parts = [{"type": "image", "image": part["url"]} if "url" in part else part for part in turn["content"]]
    processor = adapter.engine.processor
    inputs = processor.apply_chat_template([turn | {"content": parts}], add_generation_prompt=True, tokenize=True,
                                           return_dict=True, return_tensors="pt")  # fmt: skip
    with adapter.engine.stock():
        out = adapter.model.generate(**inputs, **{"max_new_tokens": 16, "do_sample": False} | settings)
    new = out[0, inputs["input_ids"].shape[1] :]
    return processor.decode(new, skip_special_tokens=True), len(new)


def test_answers_are_those_of_stock_in_the_order_of_the_requests(adapter: Any, capsys: Any) -> None:
    found = adapter.generate_until(requests(GREEDY, {"max_new_tokens": 9, "num_frames": 4}, GREEDY))
    expected = [stock(adapter, DOCS[0]), stock(adapter, DOCS[1], max_new_tokens=9), stock(adapter, DOCS[2])]
    assert [(one.text, one.token_counts.output_tokens) for one in found] == expected
    assert "num_frames of this task's generation_kwargs has no effect" in capsys.readouterr().err


def test_settings_of_a_task(adapter: Any) -> None:
    text, tokens = stock(adapter, DOCS[2])
    until = text.split()[4]
    drawn = {"temperature": 1.0, "top_p": 1e-6, "max_new_tokens": 16}
    beams, sampled, ended = adapter.generate_until(requests({"num_beams": 3}, drawn, {"until": [until, ""]}))
    assert ended.text == text[: text.index(until)] and 4 <= ended.token_counts.output_tokens < tokens
    assert sampled.text == stock(adapter, DOCS[1])[0] and beams.text == stock(adapter, DOCS[0], num_beams=3)[0]


def test_statistics(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    logged = list[tuple[Any, ...]]()
    monkeypatch.setattr(sys.modules[MODULE], "log_metrics", lambda *told: logged.append(told))
    adapter.stats = Stats()
    for _ in range(2):
        adapter.generate_until(requests(GREEDY, GREEDY))
    (seconds, tokens, _, first), (_, again, _, second) = logged
    assert seconds > 0.01
    assert tokens == again == adapter.stats.tokens // 2 and first == second
    assert 2 < first["tokens_per_forward"] == adapter.stats.tokens_per_target_call


def test_videos_are_shown_by_frames_and_what_cannot_be_shown_is_refused(adapter: Any, tmp_path: Path) -> None:
    def shown(**part: Any) -> Any:
        return requests(GREEDY, to=lambda doc: [{"role": "user", "content": [part, *messages(doc)[0]["content"]]}])

    clips.write_clip(tmp_path / "clip.mp4", 6)
    adapter.frames = FramePolicy("uniform", 3, 3)
    (found,) = adapter.generate_until(shown(type="video", url=str(tmp_path / "clip.mp4")))
    one, two = (each.token_counts.input_tokens for each in adapter.generate_until(requests(GREEDY, GREEDY)))
    assert found.token_counts.input_tokens == one + 3 * (two - one)
    with pytest.raises(ValueError, match="this task has a part of a video"):
        adapter.generate_until(shown(type="video", url=str(tmp_path / "clip.mp4"), start_time=1.0))
    with pytest.raises(ValueError, match="this task has audio"):
        adapter.generate_until(shown(type="audio", url="a.wav"))
    with pytest.raises(NotImplementedError, match="no use for drafts"):
        adapter.loglikelihood([])


def test_what_model_args_may_say(adapter: Any) -> None:
    with pytest.raises(ValueError, match=r"--model_args: has no 'dephts' with the drafter ngram\..* depth"):
        type(adapter)(drafter="ngram", dephts=3)


@pytest.mark.skipif(not THERE, reason="lmms-eval is not installed: pip install -e '.[lmms]'")
def test_lmms_eval_finds_it_and_has_the_interface_that_is_assumed(adapter: Any) -> None:
    from lmms_eval import __main__, models

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(__main__, "cli_evaluate", lambda: None)
        sys.modules[MODULE].main()
    assert models.get_model("mmspec") is type(adapter)
    for name, held in fake_lmms.HELD.items():
        for ours in held:
            real = getattr(importlib.import_module(name), ours.__name__)
            methods = [one for one in vars(ours) if inspect.isfunction(vars(ours)[one])]
            for one, twin in [(ours, real), *((getattr(ours, m), getattr(real, m)) for m in methods)]:
                takes = list(inspect.signature(one).parameters)
                assert takes == list(inspect.signature(twin).parameters)[: len(takes)], one


def test_each_of_several_processes_takes_its_own_device(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    own = vars(sys.modules[MODULE])["_own"]
    assert own("cuda") == "cuda"
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (own("cuda"), own("cuda:1"), own("cpu")) == ("cuda:3", "cuda:1", "cpu")
