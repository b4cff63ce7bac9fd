"""`mmspec caption` from the command line: bad files, second runs, options, and what is on disk."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import clips
import numpy as np
import pytest
import quick_engine
import tiny_llava
import yaml
from PIL import Image
from transformers import CLIPVisionModel

from mmspec.app import cli
from mmspec.app.caption import options as settings
from mmspec.app.caption import run as running
from mmspec.app.caption.journal import Journal
from mmspec.app.caption.plan import ask_key
from mmspec.app.caption.run import FatalError
from mmspec.pipelines.target import prefix_keys

OK, FATAL, SENSELESS, SOME_FAILED, INTERRUPTED = 0, 1, 2, 3, 130
GOOD = ("a.png", "b.jpg", "c.webp", "d.png")
BAD = {"empty.png": "empty", "text.jpg": "not an image", "cut.png": "cut off"}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llava.save(tmp_path_factory.mktemp("tiny") / "llava")


def paint(path: Path, seed: str = "") -> Path:
    """Noise that differs from name to name, and is the same in every run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(list((seed or path.name).encode())).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(values).save(path)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    for name in GOOD:
        paint(folder / name)
    return folder


@pytest.fixture
def caption(tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run `mmspec caption photos ...` in an empty folder with an engine that answers at once; the exit code."""
    monkeypatch.chdir(tmp_path)

    def run(*options: str, folder: Path | str = "photos") -> int:
        words = ["--engine", "quick_engine:load", "--model", "quick", "--max-new-tokens", "1", *options]
        return cli.main(["caption", str(folder), *words])

    return run


@pytest.fixture
def truly(tmp_path: Path, photos: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The same with a tiny random LLaVA."""
    monkeypatch.chdir(tmp_path)

    def run(*options: str, drafter: str = "none") -> int:
        words = ["caption", "photos", "--model", str(model), "--drafter", drafter, "--max-new-tokens", "6"]
        return cli.main([*words, *options])

    return run


def spoil(folder: Path) -> None:
    (folder / "empty.png").touch()
    (folder / "text.jpg").write_text("hello")
    data = paint(folder / "cut.png").read_bytes()
    (folder / "cut.png").write_bytes(data[: len(data) // 2])


def lines(path: Path | str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()] if Path(path).exists() else []


def captions(folder: Path | str = "captions") -> dict[str, str]:
    """The captions by file name, none twice."""
    records = lines(Path(folder, "metadata.jsonl"))
    assert len({record["file_name"] for record in records}) == len(records)
    return {record["file_name"]: record["text"] for record in records}


def journal(folder: Path | str = "captions") -> list[dict]:
    return lines(Path(folder, ".mmspec/worker-0.jsonl"))


def failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], BaseException | None]) -> None:
    """Let the model fail where `fails(number of the item)` returns an error."""
    real, count = quick_engine.Quick.step, []

    def step(self):
        [answer] = real(self)
        count.append(answer)
        answer.error = fails(len(count))
        if isinstance(answer.error, KeyboardInterrupt):
            raise answer.error
        return [answer]

    monkeypatch.setattr(quick_engine.Quick, "step", step)


def test_what_is_written(caption):
    assert caption("--prompt", "w5 w6") == OK
    found = captions()
    assert list(found) == sorted(GOOD) and len(set(found.values())) == 4
    for name, text in found.items():
        assert Path("captions", name).with_suffix(".txt").read_text(encoding="utf-8") == text + "\n"
    names = {path.name for path in Path("captions").iterdir()}
    assert names == {"a.txt", "b.txt", "c.txt", "d.txt", "metadata.jsonl", "run.yaml", ".mmspec"}
    assert sorted(path.name for path in Path("photos").iterdir()) == sorted(GOOD)  # nobody's folder is littered
    for record in journal():
        assert (record["prompt"], record["model"], record["tokens"]) == ("w5 w6", "quick", 3)


def test_captions_are_those_of_stock_generate(truly, model: Path):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    assert truly("--prompt", "w5 w6", "--batch-size", "3") == OK
    assert truly("--prompt", "w5 w6", "--out", "two", drafter="ngram") == OK
    processor, network = AutoProcessor.from_pretrained(model), AutoModelForImageTextToText.from_pretrained(model)
    assert captions() == captions("two") and len(set(captions().values())) > 1  # the picture matters
    for name, text in captions().items():
        inputs = processor(images=Image.open(Path("photos", name)), text="<image> w5 w6 ", return_tensors="pt")
        out = network.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert text == processor.decode(out, skip_special_tokens=True).strip()


def test_the_last_line_is_the_measured_speed_up(truly, capsys: pytest.CaptureFixture):
    assert truly("--batch-size", "4", "--report", "report.json", drafter="ngram") == OK
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("4 captions, ") and "on 4 of them stock generate took" in last
    assert last.endswith("identical text on 4 of 4")
    report = json.loads(Path("report.json").read_text())
    assert report["counts"]["captioned"] == report["comparison"]["identical"] == 4
    assert report["tokens_per_target_call"] >= 1 and report["workers"][0]["provenance"]["device"]
    assert report["tokens"] == sum(record["tokens"] for record in journal())
    named = ("--drafter", "shipped")  # as if none was named: what the model ships with, here nothing, so `suffix`
    assert truly(*named, "--no-compare", "--no-resume", "--report", "report.json") == OK
    records = json.loads(Path("report.json").read_text())["workers"] + journal()[-4:]
    assert {record["drafter"] for record in records} == {"suffix"}
    capsys.readouterr()
    assert truly(*named, "--dry-run") == OK and "0 to caption, 4 done" in capsys.readouterr().out
    assert truly("--no-compare", "--no-resume", drafter="ngram") == OK
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("4 captions") and "stock" not in last


def test_rounds_run_in_inference_mode_and_prefills_do_not(model: Path, monkeypatch: pytest.MonkeyPatch):
    """A model may keep something of a prefill."""
    import torch

    from mmspec.app import engine
    from mmspec.app.prompt import PromptChoice

    loaded = engine.load(str(model), "ngram", "cpu", "auto", 5, 0)
    modes: list[list[bool]] = [[], []]
    parts = (loaded.model.model.vision_tower, loaded.model.get_decoder())

    def noted(seen: list[bool], stock: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            seen.append(torch.is_inference_mode_enabled())
            return stock(*args, **kwargs)

        return forward

    for part, seen in zip(parts, modes, strict=True):  # not by hooks: with these rounds run in `no_grad`
        monkeypatch.setattr(type(part), "forward", noted(seen, type(part).forward))
    flow = loaded.flow(1)
    flow.add("x", [Image.new("RGB", (30, 40))], PromptChoice("w5 w6"))
    while flow.busy:
        flow.step()
    assert modes[0] == [False] and not modes[1][0] and len(modes[1]) > 2 and all(modes[1][1:])


def test_limits_on_bytes_and_memory_can_be_moved(caption, photos: Path, capsys: pytest.CaptureFixture):
    with tarfile.open("shard.tar", "w") as tar:
        tar.add(photos / "a.png", "a.png")
    for folder in ("photos", "shard.tar"):
        assert caption("--max-bytes", "1K", "--out", folder[0], folder=folder) == SOME_FAILED
        said = "MiB, over 0; make it smaller, or raise --max-bytes, with --retry-failed"
        assert said in capsys.readouterr().err
        assert caption("--retry-failed", "--out", folder[0], folder=folder) == OK
    if os.path.exists("/proc/self/statm"):  # only Linux counts it
        assert caption("--max-memory", "1M", "--out", "m") == SOME_FAILED
        assert "raise --max-memory, with --retry-failed" in capsys.readouterr().err


def test_a_temperature_is_repeatable(truly):
    for out, seed, size in (("one", "1", "1"), ("two", "1", "3"), ("three", "2", "1")):
        assert truly("--temperature", "1.5", "--seed", seed, "--out", out, "--batch-size", size, drafter="ngram") == OK
    assert captions("one") == captions("two") != captions("three")


@pytest.mark.parametrize("size", ("1", "auto"))
def test_bad_files_never_stop_a_run(size: str, caption, photos: Path, capsys: pytest.CaptureFixture):
    spoil(photos)
    assert caption("--batch-size", size) == SOME_FAILED
    assert list(captions()) == sorted(GOOD)
    failures = {record["file_name"]: record for record in lines("captions/failed.jsonl")}
    assert failures.keys() == BAD.keys()
    for name, reason in BAD.items():
        assert failures[name]["error"] == "MediaError" and reason in failures[name]["message"]
        assert Path(failures[name]["path"]) == photos / name
    said = capsys.readouterr()
    assert "4 captions" in said.out.splitlines()[-1] and said.err.count("failed:") == 3


def test_a_folder_of_nothing_but_bad_files(caption, photos: Path, capsys: pytest.CaptureFixture):
    spoil(photos)
    for name in GOOD:
        (photos / name).unlink()
    assert caption("--batch-size", "2") == SOME_FAILED
    assert "captions: " not in capsys.readouterr().out, "none was written"
    assert not Path("captions/metadata.jsonl").exists() and len(lines("captions/failed.jsonl")) == 3


def test_a_second_run_does_only_what_is_missing(caption, photos: Path, capsys: pytest.CaptureFixture):
    spoil(photos)
    assert caption("--limit", "2") == OK  # a.png and b.jpg come first
    before = captions()
    assert len(before) == 2 and caption() == SOME_FAILED
    assert before.items() <= captions().items() and len(captions()) == 4
    paint(photos / "e.png")
    capsys.readouterr()
    assert caption() == SOME_FAILED  # what failed before is not tried again, and not forgotten
    said = capsys.readouterr().out
    assert "1 to caption, 4 done before, 3 failed before" in said and "1 caption" in said
    paint(photos / "empty.png")  # another content is another piece of work
    assert caption() == SOME_FAILED
    assert "empty.png" in captions() and len(lines("captions/failed.jsonl")) == 2
    (photos / "text.jpg").unlink()
    paint(photos / "cut.png")
    assert caption("--retry-failed") == OK
    assert not Path("captions/failed.jsonl").exists() and len(journal()) == 4 + 3 + 3


def test_a_touched_file_is_not_another_piece_of_work(caption, photos: Path, capsys: pytest.CaptureFixture):
    assert caption() == OK
    os.utime(photos / "a.png", ns=(1, 1))
    paint(photos / "b.jpg", seed="another picture")
    assert caption() == OK
    assert "1 to caption, 3 done before" in capsys.readouterr().out and len(journal()) == 5


def test_what_shapes_the_answer_recomputes_it_and_nothing_else_does(caption):
    assert caption("--prompt", "w5") == OK
    assert caption("--prompt", "w5", "--batch-size", "4", "--limit", "9", "--decoders", "1", "--seed", "5") == OK
    assert len(journal()) == 4
    changes = (["--model", "other"], ["--drafter", "none"], ["--max-new-tokens", "2"], ["--temperature", "1"])
    changes += (["--system", "s"], ["--append", "!"], ["--dtype", "bfloat16"])
    for number, change in enumerate(changes, 2):
        assert caption("--prompt", "w5", *change) == OK
        assert len(journal()) == 4 * number, change
    assert caption("--prompt", "w6 w7") == OK
    for name, text in captions().items():
        assert "w6 w7" in text and Path("captions", name).with_suffix(".txt").read_text().strip() == text


def test_what_is_captioned_anew_is_said(caption, capsys: pytest.CaptureFixture):
    assert caption("--prompt", "w5") == OK and caption("--prompt", "w6") == OK
    assert "4 of them again (since the prompt or a setting has changed" in capsys.readouterr().out
    assert caption("--prompt", "w6", "--no-resume") == OK and len(journal()) == 12


def test_captions_that_were_cut_off_are_marked(caption, capsys: pytest.CaptureFixture):
    assert caption("--model", "cut", "--report", "report.json", "--format", "parquet") == OK
    assert "4 cut off at --max-new-tokens" in capsys.readouterr().out
    assert {line["finish"] for line in journal()} == {"length"}
    assert json.loads(Path("report.json").read_text())["counts"]["cut_off_at_max_new_tokens"] == 4
    from pyarrow import parquet

    assert parquet.read_table("captions/captions.parquet")["finish"].to_pylist() == ["length"] * 4


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_the_engine_tells_a_cut_from_an_end(drafter: str, truly, model: Path, monkeypatch: pytest.MonkeyPatch):
    from mmspec.app import engine

    assert truly("--no-compare", drafter=drafter) == OK
    assert {line["finish"] for line in journal()} == {"length"} and journal()[0]["tokens"] == 6
    real = engine.load

    def load(*args):  # whatever it says second ends its answer
        made = real(*args)
        made.model.generation_config.eos_token_id = list(range(1, made.model.config.get_text_config().vocab_size))
        return made

    monkeypatch.setattr(engine, "load", load)
    assert truly("--no-compare", "--no-resume", drafter=drafter) == OK
    assert {(line["finish"], line["tokens"]) for line in journal()[4:]} == {("stop", 1)}


def test_a_log_has_the_state_of_the_bar_now_and_then(caption, monkeypatch: pytest.MonkeyPatch, capsys):
    from mmspec import progress

    assert caption() == OK and "2/4" not in capsys.readouterr().err  # too short for one
    monkeypatch.setattr(progress, "EVERY", 0.0)
    assert caption("--no-resume") == OK
    said = capsys.readouterr()
    assert "2/4 [" in said.err and "\r" not in said.err + said.out  # each state is a line
    assert all("/4 [" in line for line in said.err.splitlines())


def test_subfolders_that_are_not_looked_into_are_named(caption, photos: Path, capsys: pytest.CaptureFixture):
    paint(photos / "sub" / "e.png")
    assert caption() == OK
    assert "1 subfolder(s) are not read (--recursive reads them too)" in capsys.readouterr().out
    assert caption("--recursive") == OK and "subfolder" not in capsys.readouterr().out


def test_pictures_are_made_as_small_as_suits_the_model(caption, photos: Path, monkeypatch, capsys):
    """What reads pictures at their own size is given no more than so many tokens; said in one line."""
    from types import SimpleNamespace

    reader = SimpleNamespace(patch_size=14, merge_size=2, size={"shortest_edge": 3136, "longest_edge": 12_845_056})
    monkeypatch.setattr(quick_engine.Quick, "processor", SimpleNamespace(image_processor=reader), raising=False)
    seen, real = [], quick_engine.Quick.add
    monkeypatch.setattr(quick_engine.Quick, "add", lambda *a, **k: seen.append(a[2][0].size) or real(*a, **k))
    for path in photos.iterdir():
        path.unlink()
    Image.new("RGB", (4000, 3000)).save(photos / "large.png")
    assert caption() == OK
    said = "pictures of more than 1.0 million pixels (1280 visual tokens) are scaled down; --max-pixels-per"
    assert said in capsys.readouterr().err
    assert caption("--max-pixels-per-image", "none") == OK and caption("--max-pixels-per-image", "12000") == OK
    capped, whole, small = (width * height for width, height in seen)
    assert 0.99 < capped / (1280 * 28 * 28) <= 1.001 and whole == 12_000_000 and small <= 12_000 * 1.01
    reader.size = {"longest_edge": 500_000}  # it caps them itself
    assert caption("--no-resume") == OK and seen[-1] == (4000, 3000)


def test_retry_failed(caption, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        failing(patch, lambda number: RuntimeError("out of luck") if number == 2 else None)
        assert caption() == SOME_FAILED
    assert lines("captions/failed.jsonl")[0]["error"] == "RuntimeError"
    assert caption() == SOME_FAILED and len(captions()) == 3
    assert caption("--retry-failed") == OK and len(captions()) == 4


def test_what_failed_before_says_nothing_of_the_model(caption, photos: Path, monkeypatch: pytest.MonkeyPatch):
    for number in range(running.PATIENCE - 2):
        paint(photos / f"more{number}.png")
    for first, last in ((2, 9), (1, running.PATIENCE + 1)):
        with monkeypatch.context() as patch:
            failing(patch, lambda number: RuntimeError("no") if first <= number < last else None)  # noqa: B023
            assert caption("--retry-failed") == SOME_FAILED
    assert len(captions()) == 2
    for number in range(running.PATIENCE):
        paint(photos / f"new{number}.png")
    assert caption("--model", "broken", "--retry-failed") == FATAL  # for what is new, it does


def test_a_torn_last_line_is_healed(caption, capsys: pytest.CaptureFixture):
    assert caption() == OK
    before, path = captions(), Path("captions/.mmspec/worker-0.jsonl")
    path.write_bytes(path.read_bytes()[:-20])
    Path("captions/metadata.jsonl").unlink()  # both are written only after the line
    Path("captions/d.txt").unlink()
    Path("captions/.mmspec/worker-1.partial").write_text("hal")  # this run has no second worker
    assert caption() == OK
    assert "1 broken line(s)" in capsys.readouterr().out
    assert captions() == before and len(journal()) == 4 and not list(Path("captions").rglob("*.partial"))


def test_images_of_one_stem_do_not_share_a_caption_file(caption, photos: Path):
    assert caption() == OK
    paint(photos / "a.jpg")  # a.png keeps a.txt
    paint(photos / "e.jpg"), paint(photos / "e.png")
    assert caption() == OK
    for name, sidecar in (("a.png", "a.txt"), *((name, f"{name}.txt") for name in ("a.jpg", "e.jpg", "e.png"))):
        assert Path("captions", sidecar).read_text().strip() == captions()[name]


def test_a_lost_caption_file_is_made_again_and_an_edited_one_is_kept(caption):
    assert caption() == OK
    Path("captions/a.txt").unlink()
    Path("captions/b.txt").write_text("a better caption")
    assert caption() == OK
    assert Path("captions/a.txt").read_text().strip() == captions()["a.png"]
    assert Path("captions/b.txt").read_text() == "a better caption"
    assert caption("--prompt", "w9") == OK
    assert Path("captions/b.txt").read_text() == "a better caption"
    assert caption("--prompt", "w9", "--on-existing", "overwrite") == OK
    assert Path("captions/b.txt").read_text().strip() == captions()["b.jpg"]


def test_beside_the_images(caption, photos: Path, capsys: pytest.CaptureFixture):
    paint(photos / "sub" / "e.png")
    assert caption("--out", "beside", "--recursive") == OK
    assert set(captions(photos)) == {*GOOD, "sub/e.png"} and (photos / "sub" / "e.txt").exists()
    assert not Path("captions").exists()
    capsys.readouterr()
    assert caption("--out", "beside", folder="photos/a.png") == OK  # it is done
    assert capsys.readouterr().out.endswith("nothing to do; the captions are in photos\n")
    shutil.rmtree(photos / ".mmspec")  # now they are those of somebody else
    assert caption("--out", "beside", "--format", "txt", folder="photos/a.png") == OK
    assert capsys.readouterr().out.endswith("nothing to do\n")


@pytest.mark.parametrize(("mode", "text"), [("skip", "old"), ("overwrite", "new")])
def test_on_existing(mode: str, text: str, caption, photos: Path):
    assert caption("--out", "elsewhere") == OK
    new = captions("elsewhere")["a.png"]
    (photos / "a.txt").write_text("old\n")
    for _ in range(2):  # the second time there is nothing left to add
        assert caption("--out", "beside", "--on-existing", mode) == OK
        assert (photos / "a.txt").read_text().strip() == text.replace("new", new)
        assert captions(photos).get("a.png") == (None if mode == "skip" else text.replace("new", new))
    assert len(journal(photos)) == 4 - (mode == "skip")


def test_a_metadata_file_of_somebody_else_is_kept(caption, photos: Path, capsys: pytest.CaptureFixture):
    (photos / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "by hand"}')
    assert caption("--out", "beside") == FATAL
    assert "photos/metadata.jsonl would be replaced, but no run wrote it" in capsys.readouterr().err
    assert captions(photos) == {"a.png": "by hand"} and not journal(photos)
    assert caption("--out", "beside", "--on-existing", "overwrite") == OK and len(captions(photos)) == 4


def test_two_folders_in_one_output_do_not_overwrite_each_other(caption, capsys: pytest.CaptureFixture):
    assert caption() == OK
    shutil.copytree("photos", "moved")
    assert caption(folder="moved") == OK  # the same images: nothing to do
    paint(Path("other/x/b.png")).rename("other/a.png")
    assert caption(folder="other") == FATAL
    assert "already holds a caption of a.png, from another folder; choose another --out" in capsys.readouterr().err


def test_a_model_that_never_works_ends_the_run(caption, photos: Path, capsys):
    for number in range(running.PATIENCE):
        paint(photos / f"more{number}.png")
    assert caption("--model", "broken") == FATAL
    assert "the model fails on every item. RuntimeError: it is broken" in capsys.readouterr().err
    assert caption("--engine", "quick_engine:nosuch") == FATAL
    assert "has no attribute 'nosuch'" in (said := capsys.readouterr().err) and "item/s" not in said  # before the bar
    assert not captions() and not Path("captions/failed.jsonl").exists()  # the items are not to blame


def test_a_device_that_is_lost_does_not_fail_the_rest(caption, photos: Path, capsys: pytest.CaptureFixture):
    for number in range(6):
        paint(photos / f"z{number}.png")
    assert caption("--model", "lost", "--report", "report.json") == FATAL
    assert "the device no longer works" in capsys.readouterr().err
    counts = json.loads(Path("report.json").read_text())["counts"]
    assert counts["captioned"] == 3 and counts["failed"] == 1 and counts["not_reached"] == 6
    assert caption("--model", "lost", "--retry-failed") == FATAL and len(captions()) == 6  # a fresh device goes on


def test_interrupting_loses_nothing(caption, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    with monkeypatch.context() as patch:
        failing(patch, lambda number: KeyboardInterrupt() if number == 3 else None)
        assert caption() == INTERRUPTED
    assert "2 captions are in captions; run the same command again to resume" in capsys.readouterr().out
    first = captions()
    assert len(first) == 2
    assert caption() == OK
    assert len(captions()) == 4 and first.items() <= captions().items()


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), INTERRUPTED), (FatalError("no more"), FATAL)])
def test_trouble_at_an_early_end_does_not_hide_why_it_came(
    error: BaseException, code: int, caption, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    def step(self):
        Path("captions/captions.parquet").write_text("by hand")
        raise error

    monkeypatch.setattr(quick_engine.Quick, "step", step)
    assert caption("--format", "parquet", "--report", "report.json") == code
    said = capsys.readouterr()
    assert "captions/captions.parquet would be replaced" in said.err and Path("report.json").exists()
    assert "the same command again" in said.out if code == INTERRUPTED else "no more" in said.err


def test_shards_share_the_work_and_one_folder(caption, photos: Path):
    for number in range(12):
        paint(photos / f"more{number}.png")
    for shard in ("0/3", "1/3"):
        assert caption("--shard", shard) == OK
    journals = [lines(path) for path in sorted(Path("captions/.mmspec").glob("*.jsonl"))]
    assert all(journals) and 0 < len(captions()) == sum(map(len, journals)) < 16
    assert caption() == OK  # whoever comes last does the rest
    assert len(captions()) == 16 and len(journal()) == 16 - sum(map(len, journals))


def test_a_video_and_its_frames(caption, photos: Path):
    clips.write_clip(photos / "film.mp4", clips.grey_steps(20))
    assert caption("--frames", "4", "--prompt", "of {name}") == OK
    assert captions()["film.mp4"].split()[1:4] == ["4", "of", "film"]
    assert caption("--frames", "5", "--prompt", "of {name}") == OK
    assert captions()["film.mp4"].split()[1] == "5" and len(journal()) == 6  # pictures do not depend on --frames
    assert caption("--frames", "5", "--max-frames", "3", "--prompt", "of {name}") == OK
    assert captions()["film.mp4"].split()[1] == "3"
    for most in ("9", "1"):
        assert caption("--frames", "keyframes", "--max-frames", most, "--prompt", "of {name}") == OK
    assert captions()["film.mp4"].split()[1] == "1" and len(journal()) == 9


SEVERAL = ("w5 w6", "w7 {name}", "w8")
WORDS = [word for prompt in SEVERAL for word in ("--prompt", prompt)]


@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.every(3)
def test_several_prompts_are_answered_as_if_each_was_asked_alone(
    truly, photos: Path, drafter: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    from pyarrow import parquet

    monkeypatch.setattr(prefix_keys, "LEAST", 1)  # prompts are short here
    shutil.copy(photos / "a.png", photos / "z.png")
    alone = []
    for number, prompt in enumerate(SEVERAL):
        assert truly("--prompt", prompt, "--out", f"alone-{number}", "--append", "!", drafter=drafter) == OK
        alone.append(captions(f"alone-{number}"))
    more = ("--append", "!", "--format", "txt,metadata,parquet", "--report", "report.json", "--no-compare")
    assert truly(*WORDS, *more, drafter=drafter) == OK
    assert "15 captions of 5 items, " in capsys.readouterr().out.splitlines()[-1]
    [worker] = json.loads(Path("report.json").read_text())["workers"]
    assert worker["prefix"]["prompts"] == 15 and worker["prefix"]["reused tokens"] >= 10 * 4  # of a picture
    found = {record["file_name"]: record for record in lines("captions/metadata.jsonl")}
    for name in (*GOOD, "z.png"):
        assert found[name]["captions"] == [texts[name] for texts in alone]
        assert found[name]["text"] == alone[0][name] == Path("captions", name).with_suffix(".txt").read_text().strip()
    table = parquet.read_table("captions/captions.parquet")
    assert table["captions"].to_pylist() == [found[name]["captions"] for name in table["file_name"].to_pylist()]
    assert all(record["prompts"][0] == "w5 w6" and len(record["prompts"]) == 3 for record in journal())
    assert table["tokens"].to_pylist() == [18] * 5
    assert truly(*WORDS, *more, drafter=drafter) == OK and len(journal()) == 5  # nothing is done twice
    assert truly(*WORDS[:4], "--append", "!", drafter=drafter) == OK and len(journal()) == 10


def test_a_run_with_nothing_to_do_leaves_the_report(caption):
    assert caption("--report", "report.json") == OK
    before = Path("report.json").read_text()
    assert caption("--report", "report.json") == OK
    assert Path("report.json").read_text() == before and json.loads(before)["counts"]["captioned"] == 4
    Path("report.json").unlink()
    assert caption("--report", "report.json") == OK and json.loads(Path("report.json").read_text())["seconds"] == 0


def test_the_report_as_a_page(truly, photos: Path, capsys: pytest.CaptureFixture):
    spoil(photos)
    shutil.copy(photos / "a.png", photos / "<b>.png")
    for pictures, name in ((5, "report.html"), (4, "later.html")):  # the second has captions of the first
        assert truly("--report", name, "--score", drafter="ngram") == SOME_FAILED
        text = Path(name).read_text()
        assert text.count("<figure>") == 5 and text.count("data:image/jpeg;base64,") == pictures
        assert "&lt;b&gt;.png" in text and "<b>.png" not in text and text.count("log-probability -") == 5
        assert text.count("<li>") == 3 and ("stock generate took" in text) == (pictures == 5)
        (photos / "d.png").unlink(missing_ok=True)
    with Image.open(io.BytesIO(base64.b64decode(text.split("base64,")[1].split('"')[0]))) as picture:
        assert picture.size == (40, 30)
    Path("other.html").write_text("<!doctype html>")
    assert truly("--report", "other.html") == FATAL and "no run wrote" in capsys.readouterr().err


def test_captions_are_scored(truly, photos: Path, capsys: pytest.CaptureFixture):
    from pyarrow import parquet

    shutil.copy(photos / "a.png", photos / "z.png")
    for out, more in {"one": (), "several": WORDS[2:]}.items():
        words = ("--prompt", SEVERAL[0], *more, "--score", "--format", "metadata,parquet")
        assert truly(*words, "--out", out, drafter="ngram") == OK
    one, several = ({r["file_name"]: r for r in lines(f"{out}/metadata.jsonl")} for out in ("one", "several"))
    for name, record in one.items():
        assert record["score"] < 0 and "scores" not in record and several[name]["score"] == several[name]["scores"][0]
        assert several[name]["score"] == pytest.approx(record["score"], abs=1e-4) and len(several[name]["scores"]) == 3
    assert one["z.png"]["score"] == one["a.png"]["score"]
    table = parquet.read_table("several/captions.parquet")
    assert table["scores"].to_pylist()[0] == several["a.png"]["scores"] and table["score"].to_pylist()[0] < 0


def test_a_picture_is_encoded_once_for_several_prompts(model: Path, monkeypatch: pytest.MonkeyPatch):
    from mmspec.app import engine
    from mmspec.app.prompt import PromptChoice

    monkeypatch.setattr(prefix_keys, "LEAST", 1)
    seen, stock = [], CLIPVisionModel.forward
    for kept in ("64MB", None):
        loaded = engine.load(str(model), "ngram", "cpu", "auto", 5, 0, prefix_cache=kept)
        pictures: list[int] = []
        tower = type(loaded.model.model.vision_tower)

        def forward(self, pixel_values, *args, to=pictures, stock=stock, **kwargs):
            to.append(len(pixel_values))
            return stock(self, pixel_values, *args, **kwargs)

        monkeypatch.setattr(tower, "forward", forward)  # with a hook prompts are read whole
        flow = loaded.flow(2)
        for number in range(3):
            frame = Image.new("RGB", (30, 40), (number * 80, 0, 0))
            flow.add(number, [frame], PromptChoice("w5 w6", further=("w7", "w8 w9")))
        found = {}
        while flow.busy:
            found |= {answer.ticket: (answer.text, *answer.further) for answer in flow.step()}
        seen.append((sum(pictures), found))
    assert seen[0] == (3, seen[1][1]) and seen[1][0] == 9
    assert [len(texts) for texts in seen[0][1].values()] == [3] * 3


def test_several_prompts_of_which_one_fails(truly, photos: Path, monkeypatch: pytest.MonkeyPatch):
    from mmspec.pipelines.serving.batcher import FinishedPrompt
    from mmspec.pipelines.serving.continuous import ContinuousBatcher

    step, count = ContinuousBatcher.step, iter(range(99))

    def failing(self) -> list[FinishedPrompt]:
        return [replace(end, error=ValueError("no")) if next(count) == 5 else end for end in step(self)]

    monkeypatch.setattr(ContinuousBatcher, "step", failing)
    assert truly(*WORDS, "--no-compare") == SOME_FAILED
    assert len(captions()) == 3 and len(lines("captions/failed.jsonl")) == 1
    assert truly(*WORDS, "--retry-failed") == OK and len(captions()) == 4


def test_several_prompts_are_kept_and_checked(truly, caption, capsys: pytest.CaptureFixture):
    assert truly(*WORDS, "--no-compare") == OK
    assert yaml.safe_load(Path("captions/run.yaml").read_text())["prompt"] == list(SEVERAL)
    assert truly("--config", "captions/run.yaml") == OK and len(journal()) == 4
    assert truly("--dry-run", *WORDS, "--out", "other") == OK
    told = capsys.readouterr().out
    assert all(f"prompt: {text.format(name='a')}" in told for text in SEVERAL)
    assert truly("--prompt", "w5", "--prompt", "{nme}") == SENSELESS and "{nme}" in capsys.readouterr().err


def test_a_tar_gets_no_caption_files_unless_they_are_asked_for(caption, photos: Path):
    with tarfile.open("shard.tar", "w") as tar:
        for name in ("a.png", "d.png"):
            tar.add(photos / name, name)
    assert caption(folder="shard.tar") == OK
    assert len(captions()) == 2 and not list(Path("captions").rglob("*.txt"))


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("t.csv", "image,said\nphotos/a.png,red\nphotos/d.png,\n"),
        ("t.jsonl", '{"image": "photos/a.png", "said": "red"}\n{"image": "photos/d.png"}\n'),
    ],
)
def test_rows_without_a_caption_are_captioned(name: str, rows: str, caption, capsys: pytest.CaptureFixture[str]):
    Path(name).write_text(rows)
    for count, words in ((2, []), (1, ["--column-text", "said"])):
        assert caption("--prompt", "now: {existing}.", "--out", "none", "--dry-run", *words, folder=name) == OK
        assert f"2 to caption, {count} of them without a caption for {{existing}}" in capsys.readouterr().out
    assert caption("--column-text", "said", folder=name) == OK and list(captions()) == ["photos/d.png"]
    assert caption("--column-text", "said", "--prompt", "now: {existing}.", "--out", "two", folder=name) == OK
    found = {path: text.split(" ", 2)[2] for path, text in captions("two").items()}
    assert found == {"photos/a.png": "now: red. 0", "photos/d.png": "now: . 0"}


@pytest.mark.parametrize(
    ("words", "frames"),
    [((), 8), (("--frames", "3"), 3), (("--frames", "fps:1", "--max-frames", "5"), 5), (("pictures",), 1)],
)
def test_rows_are_suggested_for_as_many_frames_as_an_item_may_have(
    words: tuple[str, ...], frames: int, caption, photos: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = []
    monkeypatch.setattr(quick_engine.Quick, "suggest_rows", lambda _, n, size=None: seen.append(n) or 2, raising=False)
    if words != ("pictures",):
        clips.write_clip(photos / "clip.mp4")
    assert caption("--batch-size", "auto", *(w for w in words if w != "pictures")) in (OK, SOME_FAILED)
    assert seen == [frames]


def test_rows_are_suggested_by_the_true_sizes_of_the_pictures(caption, photos: Path, monkeypatch: pytest.MonkeyPatch):
    """--batch-size auto is the default, and looks at what was decoded, as small as it was made for the model."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(quick_engine.Quick, "suggest_rows", lambda _, n, size: seen.append(size) or 3, raising=False)
    Image.new("RGB", (900, 600)).save(photos / "a.png")
    assert caption("--report", "r.json") == OK and seen == [(900, 600)]
    assert [worker["rows"] for worker in json.loads(Path("r.json").read_text())["workers"]] == [3]
    assert caption("--no-resume", "--max-pixels-per-image", "60000") == OK and seen[-1][0] <= 300


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows for which an engine that can be compiled was compiled."""
    made: list[int] = []
    monkeypatch.setattr(quick_engine.Quick, "compilable", True, raising=False)
    warm_up = lambda self, frames, asked, rows: made.append(rows)  # noqa: E731
    monkeypatch.setattr(quick_engine.Quick, "warm_up", warm_up, raising=False)
    return made


def test_a_long_run_compiles_by_itself(caption, compiled: list[int], monkeypatch: pytest.MonkeyPatch, capsys):
    assert caption("--limit", "2") == OK and not compiled
    monkeypatch.setattr(running, "PAYS", 0.1)  # four items of one token by four rows are half a round
    assert caption("--no-resume") == OK and compiled == [4]
    assert "note: 4 items are about 0 rounds: the model is compiled first" in capsys.readouterr().err
    for said in (["--no-compile"], ["--enable", "compile=false"]):
        assert caption("--no-resume", *said) == OK and compiled == [4]
    monkeypatch.undo()


def test_compiling_can_be_asked_for(caption, compiled: list[int], capsys: pytest.CaptureFixture):
    assert caption("--compile", "--batch-size", "2") == OK and compiled == [2]
    assert "note: the model is compiled first, which takes a minute or two" in capsys.readouterr().err


def test_what_cannot_be_compiled_says_so(caption, capsys: pytest.CaptureFixture):
    assert caption("--compile") == OK and "this model cannot be compiled" in capsys.readouterr().err


def test_the_clock_counts_the_first_answer_too(caption, capsys: pytest.CaptureFixture):
    assert caption("--max-new-tokens", "400", folder="photos/a.png") == 0  # milliseconds of an answer
    pace = re.search(r"1 caption, (\d+\.\d\d) items/s", capsys.readouterr().out)
    assert pace is not None and float(pace[1]) <= 2.5


def test_the_clock_starts_when_the_model_has_warmed_up(caption, compiled: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quick_engine.Quick, "warm_up", lambda *_: time.sleep(3), raising=False)
    assert caption("--compile", "--report", "r.json") == OK
    assert json.loads(Path("r.json").read_text())["seconds"] < 3


def test_the_processor_has_threads_of_its_own(truly, model: Path, monkeypatch: pytest.MonkeyPatch):
    from mmspec.app import captioner

    real, threads = captioner.chat_inputs, []

    def noted(*args, **more):
        threads.append(threading.current_thread().name)
        return real(*args, **more)

    monkeypatch.setattr(captioner, "chat_inputs", noted)
    assert truly("--no-compare", "--batch-size", "2") == OK
    assert len(threads) == len(GOOD) and all(name.startswith("mmspec-processor") for name in threads)


def test_the_settings_of_a_run_lie_beside_its_captions(caption, capsys: pytest.CaptureFixture):
    assert caption("--prompt", "w8", "--enable", "depth=3", "--no-compile") == OK
    kept = Path("captions/run.yaml")
    held = yaml.safe_load(kept.read_text())
    assert (held["prompt"], held["enable"], held["compile"]) == ("w8", ["depth=3"], False)
    capsys.readouterr()
    assert cli.main(["caption", "--config", str(kept)]) == OK  # the same run again
    assert "4 done before" in capsys.readouterr().out and yaml.safe_load(kept.read_text()) == held
    Path("other").mkdir()
    Path("other/run.yaml").write_text("somebody: else")
    assert caption("--out", "other") == OK and Path("other/run.yaml").read_text() == "somebody: else"
    assert Path("other/.mmspec/run.yaml").exists()


def test_a_schema_may_be_any_json_object(tmp_path: Path):
    asks = set()
    for number, schema in enumerate(({"content": {"type": "string"}}, {"content": {"type": "number"}}, {"ask": 1})):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(schema), encoding="utf-8-sig")  # as editors on Windows save it
        options = settings.Options(json_schema=path).fitted()
        assert options.schema == schema
        asks.add(ask_key(options.shaping))
    assert len(asks) == 3
    Path(path).write_text('{"type": "thing"}')
    with pytest.raises(settings.SettingsError, match="not supported: Invalid type: thing"):  # before a model is loaded
        settings.Options(json_schema=path).check()


def test_a_full_disk_ends_the_run_and_loses_nothing(caption, monkeypatch: pytest.MonkeyPatch, capsys):
    real, count = Journal.append, iter(range(99))

    def append(self, record) -> None:
        if self.path.suffix == ".jsonl" and next(count) == 2:
            raise OSError(28, "No space left on device")
        real(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", append)
        assert caption() == FATAL
    assert "No space left on device; all finished captions are saved" in capsys.readouterr().err
    assert len(journal()) == 2 and caption() == OK and len(captions()) == len(journal()) == 4


def test_a_listed_file_that_is_missing_is_in_the_list_of_failures(caption, photos: Path, capsys: pytest.CaptureFixture):
    table = Path("list.txt")
    table.write_text("photos/a.png\nphotos/gone.png\n")
    for _ in range(2):  # the second run tries nothing again, and forgets nothing
        assert caption("--out", "out", folder="list.txt") == SOME_FAILED
        [failure] = lines("out/failed.jsonl")
        assert "gone.png: is missing" in failure["message"]
    assert "1 failed: out/failed.jsonl says why" in capsys.readouterr().out
    table.write_text("photos/a.png\n")
    assert caption("--out", "out", folder="list.txt") == OK and not Path("out/failed.jsonl").exists()


def test_rows_that_are_mended_leave_the_list_of_failures(caption, photos: Path):
    table = Path("photos/t.csv")
    table.write_text("path\na.png\n../b.png\n../c.png\n")
    assert caption("--out", "out", folder="photos/t.csv") == SOME_FAILED and len(lines("out/failed.jsonl")) == 2
    table.write_text("path\na.png\nb.jpg\nc.webp\n")
    assert caption("--out", "out", folder="photos/t.csv") == OK and not Path("out/failed.jsonl").exists()


def test_config(caption, photos: Path, capsys: pytest.CaptureFixture):
    config = {"prompt": "w8", "out": "one", "resume": True, "batch-size": "auto", "limit": 2, "enable": {"depth": 3}}
    Path("run.yaml").write_text(yaml.safe_dump(config))
    assert caption("--config", "run.yaml", "--out", "two", "--no-resume", "--retry-failed") == OK  # these words win
    assert len(captions("two")) == 2 and Path("two/a.txt").read_text().split()[2] == "w8"
    held = yaml.safe_load(Path("two/run.yaml").read_text())
    assert held["out"] == "two" and held["prompt"] == "w8" and held["inputs"] == ["photos"]
    assert held["enable"] == ["depth=3"] and not {"limit", "resume", "retry-failed", "config"} & set(held)
    assert cli.main(["caption", "--config", "two/run.yaml", "--limit", "9"]) == OK  # the same run again
    assert len(captions("two")) == 4 and len(journal("two")) == 4
    Path("frames.yaml").write_text("frames: 3")
    assert caption("--config", "frames.yaml", "--frames", "fps:1") == OK
    Path("wrong.yaml").write_text("model: x\nprompt: [")
    assert caption("--config", "wrong.yaml") == SENSELESS
    assert "read as YAML (line 2: expected the node content" in capsys.readouterr().err
    for key, near in {"modl": "model", "max_new_token": "max-new-tokens", "no-compar": "no-compare"}.items():
        Path("wrong.yaml").write_text(f"no-compare: true\n{key}: 3")
        assert caption("--config", "wrong.yaml") == SENSELESS
        assert f"wrong.yaml has an unknown '{key}'; the nearest key is '{near}'" in capsys.readouterr().err
    wrong = {"resume: 1": "argument --resume/--no-resume", "batch-size: 0": "'0' is not"}
    for text, reason in wrong.items():
        Path("wrong.yaml").write_text(text)
        with pytest.raises(SystemExit):
            caption("--config", "wrong.yaml")
        said = capsys.readouterr().err
        assert "--config wrong.yaml" in said and reason in said


def test_a_dry_run_writes_nothing(caption, capsys: pytest.CaptureFixture):
    assert caption("--dry-run", "--prompt", "what is {name}?", "--devices", "cpu,cpu") == OK
    said = capsys.readouterr().out
    assert "4 to caption" in said and "prompt: what is a?" in said
    assert {path.name for path in Path().iterdir()} == {"photos"}


@pytest.mark.parametrize(("kind", "library"), [("parquet", "pyarrow"), ("webdataset", "webdataset")])
def test_a_library_of_a_format_is_missed_before_the_work(
    kind: str, library: str, caption, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    assert caption("--format", f"txt,{kind}") == FATAL
    said = capsys.readouterr()
    assert f"--format {kind}: needs the library {library}; pip install" in said.err and "to caption" not in said.out


def test_fatal_errors_say_what_to_do(caption, truly, photos: Path, capsys: pytest.CaptureFixture):
    cases = {
        ("photos", "--model", "misspelt"): "no folder 'misspelt'",
        ("photos", "--model", "photos"): "cannot load the model",
        ("photos", "--device", "gpu9"): "no device 'gpu9'",
        ("photos", "--drafter", "no/such"): "cannot use the drafter",
    }
    for (_, *options), reason in cases.items():
        assert truly(*options) == FATAL and reason in capsys.readouterr().err, reason
    assert truly("--drafter", "vispc", "--out", "none") == 2
    told = capsys.readouterr()
    assert "unknown drafter 'vispc'. Choose from" in told.err and "to caption" not in told.out
    assert not Path("none").exists()
    cases = {
        ("nowhere",): "nowhere: no such file or folder",
        ("",): "'': no such file or folder",
        ("photos", "--out", "photos/a.png"): "choose another --out",
        ("photos", "--engine", "no_such:load"): "No module named 'no_such'",
    }
    for (folder, *options), reason in cases.items():
        assert caption(*options, folder=folder) == FATAL and reason in capsys.readouterr().err, reason


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--batch-size 0", "'0' is not a whole number"),
        ("--temperature -1", "'-1' is not a number from 0 on"),
        ("--shard 4/4", "'4/4' is not I/N"),
        ("--format xls", "'xls' is not a list of txt,metadata"),
        ("--report out.pdf", "'out.pdf' is not a local report's name, as r.json or r.html"),
        ("--report s3://bucket/r.json", "'s3://bucket/r.json' is not a local report's name"),
        ("--enable reproducible=true", "here every row has its own seed"),
        ("--frames fps:2000", "unknown frame policy"),
        ("--devices ,", "',' is not auto, cpu, cuda, mps, or a list as 0,1"),
        ("--max-bytes 2X", "'2X' is not a size"),
        ("--max-memory 0", "'0' is not a size"),
        ("--report photos/a.png", "'photos/a.png' is not a local report's name"),
        ("--prompt {nam}", "unknown variable {nam}"),
        ("--config no.yaml", "no.yaml: No such file"),
    ],
)
def test_options_that_make_no_sense(option: str, reason: str, caption, capsys: pytest.CaptureFixture):
    try:
        code = caption(*option.split())
    except SystemExit as stopped:
        code = stopped.code
    assert code == SENSELESS and reason in capsys.readouterr().err and not Path("captions").exists()


def test_names_and_captions_cannot_write_to_the_terminal(caption, photos: Path, capsys: pytest.CaptureFixture):
    paint(photos / "a.png").rename(photos / "\x1b[2J.png")
    os.rename(photos / "b.jpg", os.fsencode(photos) + b"/\xff.jpg")
    assert caption() == OK and len(captions()) == 4
    said = capsys.readouterr().out
    assert "\x1b" not in said and r"\x1b[2J.png: " in said and r"\udcff.jpg: " in said


def test_version_and_help(capsys: pytest.CaptureFixture):
    for words in (["--version"], ["--help"], ["caption", "--help"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(words)
        assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert "(True)" not in said and "(the default)" in said and "(128)" in said
    assert "mmspec 0." in said and all(name in said for name in cli.COMMANDS)
    assert all(f"--{name.replace('_', '-')}" in said for name in settings.OPTIONS if name != "inputs")
