"""`mmspec caption` from the command line on a tiny random LLaVA: bad files, second runs, kills, and what is on disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_llava
from PIL import Image

from mmspec.app import bulk, cli, engine

ROOT = Path(__file__).parent.parent
OK, FATAL, SOME_FAILED, INTERRUPTED = 0, 1, 3, 130
GOOD = ("a.png", "b.jpg", "c.webp", "d.png")
BAD = {"empty.png": "empty", "text.jpg": "not an image", "cut.png": "cut off"}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llava.save(tmp_path_factory.mktemp("tiny") / "llava")


def paint(path: Path) -> Path:
    """Noise that differs from name to name, and is the same in every run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(list(path.name.encode())).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(values).save(path)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    for name in GOOD:
        paint(folder / name)
    return folder


@pytest.fixture
def caption(tmp_path: Path, photos: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run `mmspec caption photos ...` in an empty folder; the exit code."""
    monkeypatch.chdir(tmp_path)

    def run(*options: str, folder: Path | str = "photos", drafter: str = "none") -> int:
        words = ["caption", str(folder), "--model", str(model), "--drafter", drafter, "--max-new-tokens", "6"]
        return cli.main([*words, *options])

    return run


def spoil(folder: Path) -> None:
    (folder / "empty.png").touch()
    (folder / "text.jpg").write_text("hello")
    data = paint(folder / "cut.png").read_bytes()
    (folder / "cut.png").write_bytes(data[: len(data) // 2])


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def captions(folder: Path | str = "captions") -> dict[str, dict]:
    """The recorded captions by file name, none twice."""
    records = lines(Path(folder, "metadata.jsonl"))
    assert len({record["file_name"] for record in records}) == len(records)
    return {record["file_name"]: record for record in records}


def failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int, int], BaseException | None]) -> list[int]:
    """Let the model fail where `fails(call number, batch size)` returns an error; the sizes of all batches."""
    sizes: list[int] = []
    real = engine.Engine.caption

    def ask(self, images, prompt, **settings):
        sizes.append(len(images))
        error = fails(len(sizes), len(images))
        if error is not None:
            raise error
        return real(self, images, prompt, **settings)

    monkeypatch.setattr(engine.Engine, "caption", ask)
    return sizes


def test_what_is_written(caption, model: Path):
    assert caption("--prompt", "w5 w6") == OK
    found = captions()
    assert list(found) == sorted(GOOD)
    for name, record in found.items():
        assert record["text"] and 1 <= record["tokens"] <= 6 and record["seconds"] > 0
        assert (record["prompt"], record["model"], record["drafter"]) == ("w5 w6", str(model), "none")
        text = Path("captions", Path(name).with_suffix(".txt")).read_text(encoding="utf-8")
        assert text == record["text"] + "\n"
    assert len({record["text"] for record in found.values()}) > 1  # the picture matters
    assert not Path("captions/failed.jsonl").exists()
    assert {path.name for path in Path("captions").iterdir()} == {"a.txt", "b.txt", "c.txt", "d.txt", "metadata.jsonl"}
    assert sorted(path.name for path in Path("photos").iterdir()) == sorted(GOOD)  # nobody's folder is littered


def test_captions_are_those_of_stock_generate(caption, model: Path):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    assert caption("--prompt", "w5 w6", "--batch-size", "3") == OK
    processor, network = AutoProcessor.from_pretrained(model), AutoModelForImageTextToText.from_pretrained(model)
    for name, record in captions().items():
        inputs = processor(images=Image.open(Path("photos", name)), text="<image> w5 w6 ", return_tensors="pt")
        out = network.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert record["text"] == processor.decode(out, skip_special_tokens=True).strip()


@pytest.mark.parametrize("size", (1, 3))
def test_bad_files_never_stop_a_run(size: int, caption, photos: Path, capsys: pytest.CaptureFixture):
    spoil(photos)
    assert caption("--batch-size", str(size)) == SOME_FAILED
    assert list(captions()) == sorted(GOOD)
    failures = {record["file_name"]: record for record in lines(Path("captions/failed.jsonl"))}
    assert failures.keys() == BAD.keys()
    for name, reason in BAD.items():
        assert failures[name]["error"] == "MediaError" and reason in failures[name]["message"]
        assert Path(failures[name]["path"]) == photos / name
    said = capsys.readouterr()
    assert "4 captions" in said.out.splitlines()[-1] and said.err.count("failed:") == 3


def test_a_folder_of_nothing_but_bad_files(caption, photos: Path):
    spoil(photos)
    for name in GOOD:
        (photos / name).unlink()
    assert caption("--batch-size", "2") == SOME_FAILED
    assert not captions() and len(lines(Path("captions/failed.jsonl"))) == 3


def test_a_second_run_does_only_what_is_missing(caption, photos: Path, capsys: pytest.CaptureFixture):
    spoil(photos)
    assert caption("--limit", "2") == OK  # a.png and b.jpg come first
    before = captions()
    assert caption() == SOME_FAILED
    assert {name: captions()[name] for name in before} == before and len(captions()) == 4
    paint(photos / "e.png")
    capsys.readouterr()
    assert caption() == SOME_FAILED  # what failed before is not tried again, and not forgotten
    said = capsys.readouterr().out
    assert "1 to caption, 4 done before, 3 failed before" in said and "1 caption" in said
    paint(photos / "empty.png")  # another content is another piece of work
    assert caption() == SOME_FAILED
    assert "empty.png" in captions() and len(lines(Path("captions/failed.jsonl"))) == 2
    (photos / "text.jpg").unlink()
    paint(photos / "cut.png")
    assert caption("--retry-failed") == OK
    assert not Path("captions/failed.jsonl").exists()


def test_another_prompt_is_another_piece_of_work(caption):
    assert caption("--prompt", "w5") == OK
    assert caption("--prompt", "w6 w7") == OK
    assert {record["prompt"] for record in captions().values()} == {"w6 w7"}
    for name, record in captions().items():
        assert Path("captions", name).with_suffix(".txt").read_text().strip() == record["text"]


def test_retry_failed(caption, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        failing(patch, lambda call, size: RuntimeError("out of luck") if call == 2 else None)
        assert caption() == SOME_FAILED
    assert lines(Path("captions/failed.jsonl"))[0]["error"] == "RuntimeError"
    assert caption() == SOME_FAILED and len(captions()) == 3
    assert caption("--retry-failed") == OK and len(captions()) == 4


def test_a_torn_last_line_is_healed(caption, capsys: pytest.CaptureFixture):
    assert caption() == OK
    before, path = captions(), Path("captions/metadata.jsonl")
    path.write_bytes(path.read_bytes()[:-20])
    Path("captions/d.txt").unlink()  # it is written only after its line
    assert caption() == OK
    after = captions()
    assert "1 broken line(s)" in capsys.readouterr().out
    assert {name: record["text"] for name, record in after.items()} == {n: r["text"] for n, r in before.items()}


def test_images_of_one_stem_do_not_share_a_caption_file(caption, photos: Path):
    assert caption() == OK
    assert Path("captions/a.txt").exists()
    paint(photos / "a.jpg")  # from now on a.txt would mean two images
    assert caption() == OK
    for name in ("a.png", "a.jpg"):
        assert Path("captions", f"{name}.txt").read_text().strip() == captions()[name]["text"]
    assert not Path("captions/a.txt").exists()


def test_a_lost_caption_file_is_made_again_and_an_edited_one_is_kept(caption):
    assert caption() == OK
    Path("captions/a.txt").unlink()
    Path("captions/b.txt").write_text("a better caption")
    assert caption() == OK
    assert Path("captions/a.txt").read_text().strip() == captions()["a.png"]["text"]
    assert Path("captions/b.txt").read_text() == "a better caption"
    assert caption("--prompt", "w9") == OK
    assert Path("captions/b.txt").read_text() == "a better caption"
    assert caption("--prompt", "w9", "--on-existing", "overwrite") == OK
    assert Path("captions/b.txt").read_text().strip() == captions()["b.jpg"]["text"]


def test_beside_the_images(caption, photos: Path):
    (photos / "a.txt").write_text("written by hand")
    paint(photos / "sub" / "e.png")
    assert caption("--out", "beside", "--recursive") == OK
    assert (photos / "a.txt").read_text() == "written by hand"
    assert set(captions(photos)) == {"b.jpg", "c.webp", "d.png", "sub/e.png"}
    assert (photos / "sub" / "e.txt").exists() and not Path("captions").exists()


def test_a_metadata_file_of_somebody_else_is_kept(caption, photos: Path):
    theirs = [{"file_name": "a.png", "text": "by hand", "split": "train"}, {"licence": "CC0"}]
    (photos / "metadata.jsonl").write_text("\n".join(map(json.dumps, theirs)))
    for _ in range(2):
        assert caption("--out", "beside") == OK
        records = lines(photos / "metadata.jsonl")
        assert all(record in records for record in theirs) and len(records) == 5
    assert not (photos / "a.txt").exists()


def test_two_folders_in_one_output_do_not_overwrite_each_other(caption, capsys: pytest.CaptureFixture):
    assert caption() == OK
    shutil.copytree("photos", "moved")
    assert caption(folder="moved") == OK  # the same images: nothing to do
    paint(Path("other/x/b.png")).rename("other/a.png")
    assert caption(folder="other") == FATAL
    assert "from another folder; choose another --out" in capsys.readouterr().err


def test_one_image(caption, photos: Path):
    paint(photos / "a.jpg")
    assert caption(folder=photos / "a.png") == OK
    assert list(captions()) == ["a.png"] and Path("captions/a.png.txt").exists()


def test_a_batch_that_fails_is_tried_image_by_image(caption, monkeypatch: pytest.MonkeyPatch):
    sizes = failing(monkeypatch, lambda call, size: MemoryError("too much") if size > 1 else None)
    assert caption("--batch-size", "4") == OK
    assert sizes == [4, 1, 1, 1, 1] and len(captions()) == 4


def test_a_model_that_never_works_ends_the_run(caption, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    for number in range(bulk.PATIENCE):
        paint(photos / f"more{number}.png")
    failing(monkeypatch, lambda call, size: ValueError("sizes do not match"))
    assert caption() == FATAL
    assert "the model fails on every image. ValueError: sizes do not match" in capsys.readouterr().err
    assert not captions() and not Path("captions/failed.jsonl").exists()  # the images are not to blame


def test_interrupting_loses_nothing(caption, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    with monkeypatch.context() as patch:
        failing(patch, lambda call, size: KeyboardInterrupt() if call == 3 else None)
        assert caption() == INTERRUPTED
    assert "2 captions are in captions; the same command again goes on" in capsys.readouterr().out
    first = captions()
    assert len(first) == 2
    assert caption() == OK
    assert len(captions()) == 4 and first.items() <= captions().items()


def test_kill_9_loses_nothing_that_was_recorded(caption, photos: Path, model: Path, tmp_path: Path):
    for number in range(20):
        paint(photos / f"more{number:02}.png")
    options = ["--model", str(model), "--drafter", "none", "--max-new-tokens", "100", "--out", "killed"]
    run = subprocess.Popen(
        [sys.executable, "-m", "mmspec.app.cli", "caption", str(photos), *options],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )
    journal = Path("killed/metadata.jsonl")
    patience = time.monotonic() + 500  # a loaded machine
    while time.monotonic() < patience and run.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") >= 3:
            break
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    first = [json.loads(line) for line in journal.read_bytes().split(b"\n")[:-1]]
    assert 3 <= len(first) < 24
    assert cli.main(["caption", str(photos), *options]) == OK
    second = captions("killed")
    assert len(second) == 24 and all(second[record["file_name"]] == record for record in first)
    for name, record in second.items():
        assert Path("killed", record["sidecar"]).read_text().strip() == record["text"], name
    assert not list(Path("killed").glob(".mmspec.partial"))


@pytest.mark.parametrize("size", (1, 4))
def test_the_last_line_is_the_measured_speed_up(size: int, caption, capsys: pytest.CaptureFixture):
    assert caption("--batch-size", str(size), drafter="ngram") == OK
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("4 captions, ") and "on 4 of them stock generate took" in last
    assert last.endswith("identical text on 4 of 4")
    assert caption("--no-compare", "--on-existing", "overwrite", drafter="ngram") == OK
    assert "stock" not in capsys.readouterr().out.splitlines()[-1]


def test_stock_and_mmspec_write_the_same(caption):
    assert caption("--out", "one") == OK
    assert caption("--out", "two", "--batch-size", "3", drafter="ngram") == OK
    assert {n: r["text"] for n, r in captions("one").items()} == {n: r["text"] for n, r in captions("two").items()}


def test_a_temperature_is_repeatable(caption):
    for out, seed in (("one", "1"), ("two", "1"), ("three", "2")):
        assert caption("--temperature", "1.5", "--seed", seed, "--out", out) == OK
    one, two, three = ({n: r["text"] for n, r in captions(out).items()} for out in ("one", "two", "three"))
    assert one == two != three


def test_a_processor_without_a_chat_template(photos: Path):
    processor = tiny_llava.processor(template=None)
    answers = engine.Engine(tiny_llava.model(), processor, None, 6).caption([Image.open(photos / "a.png")], "w5 w6")
    assert len(answers.texts) == len(answers.tokens) == 1


def test_fatal_errors_say_what_to_do(caption, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    cases = {
        ("nowhere",): "no such file or folder",
        ("photos", "--model", "misspelt"): "no folder 'misspelt'",
        ("photos", "--model", "photos"): "cannot load the model",
        ("photos", "--device", "gpu9"): "no device 'gpu9'",
        ("photos", "--drafter", "no/such"): "cannot use the drafter",
        ("photos", "--out", "photos/a.png"): "choose another --out",
    }
    for (folder, *options), reason in cases.items():
        assert caption(*options, folder=folder) == FATAL, reason
        assert reason in capsys.readouterr().err
    for options in (("--batch-size", "0"), ("--temperature", "-1"), ("--max-new-tokens", "many")):
        with pytest.raises(SystemExit) as stopped:
            caption(*options)
        assert stopped.value.code == 2


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
    assert "mmspec 0." in said and all(name in said for name in cli.COMMANDS) and "--retry-failed" in said
