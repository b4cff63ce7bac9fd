"""`mmspec bench image` of models that are no LlamaGen: Janus, Emu3, pipelines, and a file of one's own."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import tiny_image_models
import torch
import transformers as T
from tiny_image_models import CLOSE, END, FIRST_CODE, LINE

from benchmarks.__main__ import parser as workshop
from mmspec.app import cli, image_model
from mmspec.app.compare import PLAIN, Method
from mmspec.app.devices import EngineError
from mmspec.pipelines.host.image_models import ImageModel

WINDOW = {"window": 5}


def run(*words: object) -> int:
    args = workshop().parse_args(["image", *map(str, words)])
    return args.run(args)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tiny_image_models.saved(name, tmp_path_factory.mktemp(name)) for name in ("janus", "emu3")}


@pytest.mark.parametrize("name", ["janus", "emu3"])
def test_a_model_draws_the_same_pictures_in_fewer_forwards(folders: dict[str, Path], name: str) -> None:
    settings = {"temperature": 0, "guidance_scale": 2.0} | ({"image_area": 16 * 64} if name == "emu3" else {})
    subject = image_model.load(str(folders[name]), "cpu", "float32", **settings)
    prompts = ["red circle", "blue circle red"]
    subject.go(PLAIN)
    plain = subject.paint(prompts, [3, 4])
    subject.go(Method("jacobi", "jacobi", WINDOW))
    drafted = subject.paint(prompts, [3, 4])
    assert torch.equal(plain.tokens, drafted.tokens)
    assert [a.tobytes() for a in plain.images] == [b.tobytes() for b in drafted.images]
    assert plain.images[0].tobytes() != plain.images[1].tobytes() and plain.images[0].mode == "RGB"
    tokens = {"janus": 16, "emu3": 4 * 5 + 3}[name]
    assert plain.tokens.shape == (2, tokens) and plain.compression == 1.0 and drafted.compression > 1
    assert subject.codes == {"janus": tiny_image_models.CODES, "emu3": 64}[name]


def test_emu3s_pictures_stand_on_their_grid(folders: dict[str, Path]) -> None:
    subject = image_model.load(str(folders["emu3"]), "cpu", "float32", image_area=16 * 64)
    row = subject.paint(["red circle"], [0]).tokens[0].tolist()
    assert row[4:20:5] == [LINE] * 4 and row[-3:] == [CLOSE, 117, END]
    assert all(FIRST_CODE <= token < FIRST_CODE + 64 for i, token in enumerate(row[:20]) if i % 5 < 4)


def test_the_bench_times_and_measures_a_janus(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("red circle\nblue circle\n")
    words = ["--model", folders["janus"], "--device", "cpu", "--prompts", tmp_path / "prompts.txt", "--images", 2]
    words += ["--batch", 2, "--methods", "jacobi-exact-seed-16", "jacobi+scaled", "--guidance", 2]
    assert run(*words, "--json", tmp_path / "out.json") == 0
    found = {r["method"]: r for r in json.loads((tmp_path / "out.json").read_text())["records"]}
    assert set(found) == {"ar", "jacobi-exact-seed-16", "jacobi+scaled"}
    assert found["ar"]["compression"] == 1.0 and found["jacobi-exact-seed-16"]["identical_rate"] == 1.0
    assert found["jacobi+scaled"]["compression"] > 1 and found["jacobi+scaled"]["spent"] > 0
    assert not any(r["note"] for r in found.values())


OWN = """
import copy, sys
sys.path.insert(0, {support!r})
import tiny_image_models
from PIL import Image

def load(device, dtype):
    return copy.deepcopy(tiny_image_models.model("chameleon"))

def draw(model, prompts, **settings):
    pictures = []
    for prompt in prompts:
        ids = tiny_image_models.ragged([[1, *(5 + len(word) for word in prompt.split())]])
        out = model.generate(**ids, multimodal_generation_mode="image-only", do_sample=False)
        tokens = out[0, ids["input_ids"].shape[1]:].tolist()
        pictures.append(Image.frombytes("L", (4, 4), bytes(tokens[:16])).convert("RGB"))
    return pictures
"""


def test_a_file_of_ones_own_draws(tmp_path: Path) -> None:
    support = Path(tiny_image_models.__file__).parent
    (tmp_path / "anole.py").write_text(OWN.format(support=str(support)))
    subject = image_model.load(str(tmp_path / "anole.py"), "cpu", "float32")
    subject.go(Method("jacobi", "jacobi", WINDOW | {"rule": "lantern(k=3, delta=0.4)"}))
    drawn = subject.paint(["red circle", "a blue square"], [1, 2])
    assert len(drawn.images) == 2 == len(drawn.spent) and drawn.tokens.shape[0] == 2
    assert drawn.compression > 1 and subject.codes == 64 and sum(drawn.spent) > 0


def test_generate_draws_with_a_janus(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(folders["janus"]), "--device", "cpu", "--temperature", "0", "--guidance", "2", "--compare"]
    assert cli.main(["generate", "red circle", "blue circle", *words, "-o", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "identical pictures: 2 of 2" in said and len(list((tmp_path / "out").glob("*.png"))) == 2


UNEVEN = OWN.replace("import copy, sys", "import copy, itertools, sys\nlengths = itertools.count(4)").replace(
    'multimodal_generation_mode="image-only", do_sample=False',
    "max_new_tokens=(n := next(lengths)), min_new_tokens=n, do_sample=False",
).replace("bytes(tokens[:16])", "bytes(16)")  # fmt: skip


def test_pictures_of_several_lengths_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of models that choose the size of a picture."""
    (tmp_path / "own.py").write_text(UNEVEN.format(support=str(Path(tiny_image_models.__file__).parent)))
    words = ["--model", str(tmp_path / "own.py"), "--device", "cpu", "--compare", "-o", str(tmp_path / "out")]
    assert cli.main(["generate", "red circle", "a blue square", *words]) == 0
    said = capsys.readouterr().out
    assert "identical pictures: 0 of 2" in said and "1.00 tokens per forward; identical" in said


def test_a_pipeline_of_diffusers_draws(tmp_path: Path) -> None:
    tiny_image_models.glm_pipeline().save_pretrained(tmp_path / "glm")
    few = {"num_inference_steps": 1, "max_sequence_length": 16}
    subject = image_model.load(str(tmp_path / "glm"), "cpu", "float32", image_area=64 * 65, **few)
    plain = subject.paint(["w5 w6"], [3])
    subject.go(Method("jacobi", "jacobi", {"reproducible": True}))
    drafted = subject.paint(["w5 w6"], [3])
    assert drafted.images[0].tobytes() == plain.images[0].tobytes() and plain.images[0].size == (64, 64)
    assert plain.tokens.shape == (1, 261) and plain.compression == 1.0 and drafted.compression > 1
    subject.settings.pop("image_area")
    subject.pipe.default_sample_size = 64 // subject.pipe.vae_scale_factor
    assert subject.paint(["w5 w6"], [3]).images[0].size == (64, 64), "its own size, if none is given"
    with pytest.raises(EngineError, match="GlmImagePipeline takes no temperature; leave it out"):
        subject.paint(["w5 w6"], [3], temperature=0.5)


def test_what_cannot_draw_is_said(tmp_path: Path, folders: dict[str, Path]) -> None:
    with pytest.raises(EngineError, match=r"no file '.*absent\.py'; name a Python file with `load"):
        image_model.load(str(tmp_path / "absent.py"), "cpu", "float32")
    (tmp_path / "half.py").write_text("def load(device, dtype): return 1\n")
    with pytest.raises(EngineError, match=r"cannot load .*half\.py"):
        image_model.load(str(tmp_path / "half.py"), "cpu", "float32")
    (tmp_path / "pair.py").write_text("def load(device, dtype): return 1, 2\ndef draw(model, prompts): return []\n")
    with pytest.raises(EngineError, match=r"cannot load .*pair\.py.*that generates tokens; got tuple.*`load\(device"):
        image_model.load(str(tmp_path / "pair.py"), "cpu", "float32")
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(EngineError, match="a pipeline that generates tokens; got StableDiffusionPipeline"):
        image_model.load(str(tmp_path), "cpu", "float32")  # before its weights are looked for
    T.BertConfig().save_pretrained(tmp_path / "bert")
    with pytest.raises(EngineError, match=r"It must be a LlamaGenPipeline.*your own Python file"):
        image_model.load(str(tmp_path / "bert"), "cpu", "float32")
    subject = image_model.ModelSubject(
        ImageModel(copy.deepcopy(tiny_image_models.model("janus")), lambda prompts, **how: [])
    )
    with pytest.raises(EngineError, match="1 prompts gave 0 pictures, by 0 calls"):
        subject.paint(["red"], [0])
