"""CLIP score, inception score and FID: against their formulas, on tiny networks, and in whole runs of the bench."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_llamagen
import torch
import transformers as T
from PIL import Image

from benchmarks.suites import SUITES, measures
from benchmarks.suites.measures import Inception
from mmspec.app.bench import command as bench
from mmspec.app.prompt import PromptError

needs_fidelity = pytest.mark.skipif(importlib.util.find_spec("torch_fidelity") is None, reason="needs torch-fidelity")
WORDS = ["a", "red", "blue", "circle", "square", "on", "white"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random CLIP with a processor of its own."""
    folder = tmp_path_factory.mktemp("clip")
    letters = [letter + end for letter in "abcdefghijklmnopqrstuvwxyz" for end in ("", "</w>")]
    vocab = {token: i for i, token in enumerate([*letters, "<|startoftext|>", "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = T.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"bos_token_id": vocab["<|startoftext|>"], "eos_token_id": vocab["<|endoftext|>"], "pad_token_id": 0}
    config = T.CLIPConfig(
        text_config={**sizes, **ends, "vocab_size": len(vocab), "max_position_embeddings": 24},
        vision_config={**sizes, "image_size": 16, "patch_size": 8},
        projection_dim=16,
    )
    torch.manual_seed(0)
    T.CLIPModel(config).save_pretrained(folder)
    side = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    T.CLIPProcessor(T.CLIPImageProcessor(**side), tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_inception(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A network of six features and four logits under the name of torch-fidelity's."""
    from torch_fidelity.feature_extractor_base import FeatureExtractorBase
    from torch_fidelity.registry import FEATURE_EXTRACTORS_REGISTRY

    class Tiny(FeatureExtractorBase):
        def __init__(self, name: str, features: list[str], **ignored: object) -> None:
            super().__init__(name, features)
            self.logits = torch.nn.Linear(6, 4)
            torch.nn.init.constant_(self.logits.weight, 0.01)
            with torch.no_grad():
                self.logits.weight.mul_(torch.arange(24).view(4, 6) % 5)

        @staticmethod
        def get_provided_features_list() -> tuple[str, ...]:
            return "2048", "logits_unbiased"

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x = x.float()
            assert x.shape[1] == 3
            features = torch.cat([x.mean((2, 3)), x.std((2, 3))], 1)
            return features, features @ self.logits.weight.T

    monkeypatch.setitem(FEATURE_EXTRACTORS_REGISTRY, measures.NETWORK, Tiny)
    yield


def drawn(count: int, seed: int, side: int = 12) -> list[Image.Image]:
    pixels = np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    return [Image.fromarray(one) for one in pixels]


def folder_of(pictures: list[Image.Image], where: Path) -> Path:
    where.mkdir()
    for i, picture in enumerate(pictures):
        picture.save(where / f"{i:03d}.png")
    return where


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    bench.configure(parser, SUITES)
    return bench.run(parser.parse_args([str(word) for word in words]))


def test_a_clip_score_is_the_cosine_of_each_pair(clip: Path) -> None:
    score = measures._clip(str(clip), CPU)
    pictures, texts = drawn(40, 0), [" ".join(WORDS[i % 7] for i in range(n, n + 3)) for n in range(40)]
    found = score(pictures, texts)
    model, processor = T.CLIPModel.from_pretrained(clip).eval(), T.CLIPProcessor.from_pretrained(clip)
    for i in (0, 31, 32, 39):  # the batches' ends
        with torch.inference_mode():
            out = model(**processor(text=[texts[i]], images=[pictures[i]], return_tensors="pt", padding=True))
        cosine = float((out.image_embeds * out.text_embeds).sum())
        assert float(found[i]) == pytest.approx(100 * max(cosine, 0), abs=1e-3)
    assert found.shape == (40,) and len(set(found.tolist())) > 20
    assert score(pictures[:1], ["red " * 100]).isfinite().all()  # a text that is too long is cut


@needs_fidelity
def test_fid_is_the_distance_of_two_gaussians(tiny_inception: None, tmp_path: Path) -> None:
    inception = Inception("", CPU)
    features, _ = inception.read(drawn(30, 1))
    reference = inception.reference(folder_of(drawn(30, 2), tmp_path / "real"))
    other = inception.read(drawn(30, 2))[0]
    from benchmarks.suites.quality import frechet

    assert inception.distance(features, reference) == pytest.approx(frechet(features, other), rel=1e-6)
    assert inception.distance(other, reference) == pytest.approx(0, abs=1e-6)
    np.savez(tmp_path / "real.npz", **reference)
    held = inception.reference(tmp_path / "real.npz")
    assert inception.distance(features, held) == pytest.approx(inception.distance(features, reference))


@needs_fidelity
def test_sizes_may_differ_and_the_inception_score_knows_sameness(tiny_inception: None) -> None:
    inception = Inception("", CPU)
    mixed = [*drawn(3, 0, 8), *drawn(40, 1, 16), *drawn(2, 2, 8)]
    features, logits = inception.read(iter(mixed))
    assert features.shape == (45, 6) and logits.shape == (45, 4)
    assert torch.equal(features[44], inception.read(mixed[43:])[0][1])  # in the order of the pictures
    same, _ = inception.score(logits[:1].expand(20, -1))
    assert same == pytest.approx(1.0) and inception.score(logits)[0] > 1
    sure = torch.eye(4) * 8.0  # of four classes in turn
    assert inception.score(sure.repeat(10, 1))[0] > 1.5


@needs_fidelity
@pytest.mark.full
def test_the_true_network_reads_pictures(tmp_path: Path) -> None:
    """With random weights, in the form of the published file."""
    from torch_fidelity import feature_extractor_inceptionv3 as network

    made = network.FeatureExtractorInceptionV3.__new__(network.FeatureExtractorInceptionV3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "load_state_dict_from_url", lambda *a, **k: kept)
        patch.setattr(network.FeatureExtractorInceptionV3, "load_state_dict", lambda *a, **k: None)
        kept: dict[str, torch.Tensor] = {}
        made.__init__(measures.NETWORK, ["2048"])  # type: ignore[misc]
    torch.save(made.state_dict(), tmp_path / "weights.pth")
    features, logits = Inception(str(tmp_path / "weights.pth"), CPU).read(drawn(2, 0))
    assert features.shape == (2, 2048) and logits.shape == (2, 1008)


@needs_fidelity
def test_bench_pictures_measures_folders(
    clip: Path, tiny_inception: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = folder_of(drawn(12, 0), tmp_path / "real")
    near, far = folder_of(drawn(12, 1), tmp_path / "near"), folder_of([Image.new("RGB", (9, 9))] * 12, tmp_path / "far")
    notes = [{"image_id": i // 2, "id": i, "caption": f"a red circle\n{'on ' * i}"} for i in range(24)]
    (tmp_path / "captions.json").write_text(json.dumps({"annotations": notes}))
    assert measures.read_captions(tmp_path / "captions.json")[1] == "a red circle on on"  # the first of each picture
    words = ["--clip", clip, "--prompts", tmp_path / "captions.json", "--inception", "--reference", real]
    assert run("pictures", near, far, *words, "--device", "cpu", "--json", tmp_path / "out.json") == 0
    one, other = json.loads((tmp_path / "out.json").read_text())["records"]
    assert (one["method"], one["n"], other["method"]) == ("near", 12, "far")
    assert other["fid"] > 10 * one["fid"] > 0 and 0 <= one["clip"][str(clip)] <= 100
    assert other["inception_score"] == pytest.approx(1.0) and "FID" in capsys.readouterr().out


@needs_fidelity
def test_bench_image_measures_what_it_draws(
    clip: Path, tiny_inception: None, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = tiny_llamagen.saved("text", tmp_path_factory, prefix=24)
    (tmp_path / "prompts.txt").write_text("a small red circle on a white background\na blue square\n")
    words = ["--model", model, "--device", "cpu", "--images", 0, "--prompts", tmp_path / "prompts.txt"]
    words += ["--methods", "jacobi-exact-seed-16", "ar-static", "--quality-images", 5, "--quality-batch", 2]
    words += ["--clip", clip, "--inception", "--json", tmp_path / "out.json", "--pictures", tmp_path / "kept"]
    assert run("image", *words) == 0
    found = json.loads((tmp_path / "out.json").read_text())["records"]
    ar, exact = found  # ar-static draws as ar does
    assert exact["clip"] == ar["clip"] and exact["inception_score"] == ar["inception_score"]  # the very same pictures
    assert ar["fid"] is None and ar["compression"] == 1.0 and exact["compression"] >= 1 and ar["n"] == 5
    assert len(list((tmp_path / "kept").rglob("*.png"))) == 10
    assert run("image", *words) == 0  # nothing is drawn again
    assert json.loads((tmp_path / "out.json").read_text())["records"] == found


def test_what_is_missing_is_said(
    clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = folder_of(drawn(2, 0), tmp_path / "some")
    (tmp_path / "one.txt").write_text("a red circle\n")
    (tmp_path / "other.json").write_text("[]")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    for words, told in (
        ([], "nothing to do; give --clip or --inception"),
        (["--clip", clip], "name the file with --prompts"),
        (["--clip", clip, "--prompts", tmp_path / "one.txt"], "has 2 pictures"),
        (["--clip", "nowhere", "--prompts", tmp_path / "one.txt"], "--clip nowhere: there is no folder 'nowhere'"),
        (["--clip", tmp_path, "--prompts", tmp_path / "one.txt"], f"--clip {tmp_path}: "),
        (["--reference", some], "add --inception"),
    ):
        assert run("pictures", some, *words, "--device", "cpu") == 1
        assert told in capsys.readouterr().err
    with pytest.raises(PromptError, match="is not a file of COCO captions"):
        measures.read_captions(tmp_path / "other.json")
    assert run("image", "--clip", clip, "--device", "cpu") == 1
    assert "--quality-images N" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run("pictures", some, "--inception", "--device", "cpu") == 1
    assert 'pip install -e ".[measures]"' in capsys.readouterr().err


@needs_fidelity
def test_what_is_no_inception_is_said(tiny_inception: None, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "weights.pth")
    with pytest.raises(bench.BenchError, match=r"no Inception weights in .*absent"):
        Inception(str(tmp_path / "absent.pth"), CPU)
    inception = Inception(str(tmp_path / "weights.pth"), CPU)
    np.savez(tmp_path / "short.npz", mu=np.zeros(3), sigma=np.zeros((3, 3)))
    np.savez(tmp_path / "strange.npz", arr_0=np.zeros(3))
    with pytest.raises(bench.BenchError, match="are of 3 features; Inception has 6"):
        inception.reference(tmp_path / "short.npz")
    with pytest.raises(bench.BenchError, match="has no statistics, arrays `mu` and `sigma`"):
        inception.reference(tmp_path / "strange.npz")
    with pytest.raises(bench.BenchError, match="at least 2 pictures"):
        inception.read(drawn(1, 0))
