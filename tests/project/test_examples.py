"""Every file of examples/ runs, offline and from elsewhere, and does what it says; a new file is run at once."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import httpx
import pytest
import transformers
import uvicorn
from PIL import Image

import mmspec
from mmspec import registry, zoo
from mmspec.pipelines.serving.batcher import Batcher

EXAMPLES = Path(__file__).parents[2] / "examples"
SERVERS = {"serve.py"}  # they run until they are stopped, and have tests of their own below
WORDS: dict[str, list[str]] = {  # for what would take long by default
    "caption_pipeline.py": [str(zoo.samples() / "scene-02.png")],
    "watch_drafts.py": [str(zoo.samples() / "scene-02.png"), "--prompt", zoo.PROMPTS["short"], "--svg", "drafts.svg"],
    "train_drafter.py": ["--steps", "2", "--samples", "8", "--batch", "2", "--max-new-tokens", "12", "--out", "run"],
}
PATIENCE = 300  # seconds, for what a busy machine may delay
SCENE_2 = "red circle is left of the cyan diamond"


def test_the_first_lines_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "README.md").read_text(), re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    Image.open(zoo.samples() / "scene-02.png").convert("RGB").save("photo.jpg", quality=95)
    names: dict[str, Any] = {}
    exec(code.replace("Qwen/Qwen3.5-9B", str(zoo.path("scenes-hybrid"))), names)
    answer = names["out"][0, names["inputs"]["input_ids"].shape[1] :]
    assert SCENE_2 in names["processor"].decode(answer)


def numbers(said: str, form: str) -> list[float]:
    """The numbers where the form has #."""
    return [float(n) for found in re.findall(form.replace("#", r"(\d+\.?\d*)"), said) for n in (found,)]


def captions(said: str, _: Path) -> bool:
    lines = [json.loads(line) for line in said.splitlines()]
    names = sorted(path.name for path in zoo.samples().glob("*.png"))
    texts = {line["file_name"]: line["text"] for line in lines}
    return sorted(texts) == names and len(lines) == len(names) and SCENE_2 in texts["scene-02.png"]


def picture(said: str, here: Path) -> bool:
    (fast,), (plain,) = numbers(said, "# forwards"), numbers(said, "instead of #")
    return "same picture: True" in said and 2 * fast < plain == 256 and Image.open(here / "picture.png").width == 64


def rules(said: str, _: Path) -> bool:
    exact, relaxed, limited = zip(numbers(said, "# tokens per"), numbers(said, "charged #"), strict=True)
    return exact[1] == 0 and relaxed[0] > exact[0] and relaxed[1] > 0.5 >= limited[1] > 0


def rounds(said: str, _: Path) -> bool:
    greedy, _, sampled = said.partition("sampled:")
    accepted = [sum(numbers(each, "# of")) for each in (greedy, sampled)]
    return "stock generate's: True" in said and min(accepted) >= 1


def trained(said: str, here: Path) -> bool:
    return "identical to stock" in said and mmspec.load_drafter(here / "run" / "drafter").config.vocab == 2048


def coloured(said: str, here: Path) -> bool:
    (tokens,), (calls,) = numbers(said, "# tokens in"), numbers(said, "in # calls")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in said.splitlines()]
    drawn = (here / "drafts.svg").read_text(encoding="utf-8")
    same = SCENE_2 in "".join(lines) and len(lines) == calls + 1
    return same and 2 * calls < tokens == drawn.count("<rect") and f"call {calls:.0f}<" in drawn


CLAIMS: dict[str, Callable[[str, Path], bool]] = {  # of what was printed, and the folder it ran in
    "caption_pipeline.py": lambda said, _: SCENE_2 in said and numbers(said, "tokens_per_target_call #")[0] > 2,
    "caption_folder.py": captions,
    "draw_pipeline.py": picture,
    "own_drafter.py": lambda said, _: "identical to stock" in said and numbers(said, "# tokens per")[0] > 1.5,
    "own_rule.py": rules,
    "loop.py": rounds,
    "train_drafter.py": trained,
    "watch_drafts.py": coloured,
}


@pytest.fixture(autouse=True)
def as_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What an example registers, and where it writes, is gone afterwards."""
    for table in ("DRAFTERS", "RULES"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    monkeypatch.chdir(tmp_path)
    for library in (diffusers, transformers):
        library.logging.enable_progress_bar()


def test_the_notebook_runs_and_says_what_it_shows(capsys: pytest.CaptureFixture) -> None:
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    said = capsys.readouterr().out
    shown = "".join(text for cell in cells for out in cell.get("outputs", ()) for text in out.get("text", ()))
    assert said.count("same tokens: True") == said.count("same draws: True") == 1
    assert _without_numbers(said) == _without_numbers(shown) != []


def _without_numbers(text: str) -> list[str]:
    return [re.sub(r"[\d.]+", "#", line) for line in text.splitlines()]


def test_every_example_has_a_claim() -> None:
    assert set(CLAIMS) | SERVERS == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize("name", sorted({path.name for path in EXAMPLES.glob("*.py")} - SERVERS))
@pytest.mark.every(12)
def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", [name, *WORDS.get(name, [])])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    said = capsys.readouterr()
    assert CLAIMS[name](said.out, tmp_path), said.out
    bars = [line for line in said.err.splitlines() if "%|" in line and "answers (" not in line and "train:" not in line]
    assert not bars and "deprecated" not in said.err  # the noise of libraries; training shows how far it is
    assert {path.name for path in tmp_path.iterdir()} <= {"picture.png", "run", "drafts.svg"}


def test_every_example_is_on_its_page() -> None:
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if f"\n--8<--\n{path.name}\n--8<--\n" not in page] == []


@pytest.mark.full
def test_a_type_checker_can_check_a_drafter(tmp_path: Path) -> None:
    """mypy takes examples/own_drafter.py for a Drafter, and refuses it without its `nodes`."""
    root, package = EXAMPLES.parent, tmp_path / "types" / "mmspec"
    package.mkdir(parents=True)
    for path in (*(root / "mmspec").iterdir(), *(root / name for name in ("pipelines", "kernels", "app"))):
        (package / path.name).symlink_to(path)
    source = (EXAMPLES / "own_drafter.py").read_text(encoding="utf-8")
    (tmp_path / "whole.py").write_text(source, encoding="utf-8")
    lacking = source.replace("def nodes(", "def size(").replace("self.nodes", "self.size")
    (tmp_path / "lacking.py").write_text(lacking, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"), "whole.py", "lacking.py"]
    path = {**os.environ, "MYPYPATH": str(package.parent)}
    said = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True).stdout
    assert said.count("error:") == 1 and "lacking.py" in said and '"Drafter"' in said, said


def test_a_drafter_has_a_name_once_it_stands_in_the_table() -> None:
    """What docs/protocols.md says: one line, from outside."""
    registry.DRAFTERS["mine"] = registry.Entry("mmspec.drafters.ngram", "NgramDrafter", "ours")
    assert type(registry.drafter_class("mine")()).__name__ == "NgramDrafter" and "mine" in registry.drafters()


# -- the server ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where examples/serve.py listens: a port that is free."""
    example = runpy.run_path(str(EXAMPLES / "serve.py"))
    app, batches = example["app"], example["batcher"].batches
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, name="server", daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/caption"
    assert ends_within(PATIENCE, batches)
    server.should_exit = True
    thread.join(PATIENCE)


def asked(address: str, picture: bytes | None = None, **fields: str) -> httpx.Response:
    image = (zoo.samples() / "scene-02.png").read_bytes() if picture is None else picture
    return httpx.post(address, files={"image": image}, data=fields, timeout=PATIENCE)


def test_the_server_streams_events(address: str) -> None:
    image = (zoo.samples() / "scene-02.png").read_bytes()
    with httpx.stream("POST", address, files={"image": image}, timeout=PATIENCE) as answer:
        kind, lines = answer.headers["content-type"], [line for line in answer.iter_lines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith('data: {"text')]
    texts = [event["text"] for event in events]
    assert kind.startswith("text/event-stream") and lines[-2:] == ["event: done", "data: {}"]
    assert SCENE_2 in "".join(texts) and len(texts) > 2
    assert events[-1]["tokens"] > events[-1]["accepted"] > 5


def test_the_server_serves_again_once_a_client_has_left(address: str) -> None:
    image = (zoo.samples() / "scene-02.png").read_bytes()
    with httpx.stream("POST", address, files={"image": image}, timeout=PATIENCE) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
    lines = [line.removeprefix("data: ") for line in asked(address).text.split("\n") if line.startswith('data: {"text')]
    assert SCENE_2 in "".join(json.loads(line)["text"] for line in lines)


def ends_within(seconds: float, batches: Batcher) -> bool:
    """Whether no answer is under way any more."""
    deadline = time.monotonic() + seconds
    while batches.busy and time.monotonic() < deadline:
        time.sleep(0.05)
    return not batches.busy


@pytest.mark.parametrize(
    ("picture", "fields"), [(b"no picture", {}), (None, {"max_new_tokens": "0"}), (None, {"max_new_tokens": "9999"})]
)
def test_the_server_says_what_is_wrong(address: str, picture: bytes | None, fields: dict[str, str]) -> None:
    answer = asked(address, picture, **fields)
    assert answer.status_code == 422 and ("is not an image" in answer.text or "max_new_tokens" in answer.text)
