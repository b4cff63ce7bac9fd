"""Models that read text alone are trained for and measured like those that see pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_llava
import torch
import transformers as T

import mmspec
from mmspec.app import cli, engine
from mmspec.pipelines.host.loading import model_and_processor
from mmspec.pipelines.prompts import chat_inputs, text_alone

TEMPLATE = (
    "{% for m in messages %}{{ '<s> ' + m['content'] + ' ' }}{% endfor %}{% if add_generation_prompt %}w4{% endif %}"
)


@pytest.fixture(scope="module", params=[TEMPLATE, None], ids=["template", "bare"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with its tokenizer, and prompts for it."""
    where = tmp_path_factory.mktemp("text")
    sees = tiny_llava.model()
    model = T.LlamaForCausalLM(sees.config.text_config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(3.0)
    model.save_pretrained(where)
    tokenizer = tiny_llava.processor().tokenizer
    tokenizer.chat_template = request.param
    tokenizer.save_pretrained(where)
    lines = [json.dumps({"prompt": f"w{5 + i} w9 w{30 + i}"}) for i in range(12)]
    (where / "prompts.jsonl").write_text("\n".join(lines))
    (where / "picture.jsonl").write_text("\n".join([*lines[1:], json.dumps({"image": "0.png", "prompt": "w5"})]))
    return where


def test_prompts_become_inputs(folder: Path) -> None:
    _, tokenizer = model_and_processor(str(folder), torch.float32)
    assert text_alone(tokenizer) and not text_alone(tiny_llava.processor())
    made = chat_inputs(tokenizer, ["w5 w6", "w7"], [[], []])
    assert made["input_ids"].shape == made["attention_mask"].shape
    alone = chat_inputs(tokenizer, ["w7"], [[]])["input_ids"]
    assert made["input_ids"][1][made["attention_mask"][1] > 0].tolist() == alone[0].tolist()
    with pytest.raises(ValueError, match="reads only text"):
        chat_inputs(tokenizer, ["w7"], [[object()]])  # type: ignore[list-item]


def test_a_drafter_is_trained_on_text_alone(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train(data: str, out: Path) -> int:
        return cli.main(["train", "--method", "eagle", "--target", str(folder), "--data", str(folder / data), "--out",
                         str(out), "--device", "cpu", "--set", "steps=2", "batch=2", "held_out=2", "unroll=2",
                         "max_new_tokens=6", "writing=4"])  # fmt: skip

    assert train("prompts.jsonl", tmp_path / "run") == 0
    model, tokenizer = model_and_processor(str(folder), torch.float32)
    inputs: Any = chat_inputs(tokenizer, ["w5 w9 w30"], [[]])
    stock = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    with mmspec.enable(model, tmp_path / "run" / "drafter"):
        assert torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False), stock)
    capsys.readouterr()
    assert train("picture.jsonl", tmp_path / "other") == 1
    assert "reads text alone" in capsys.readouterr().err


def test_it_is_measured_on_text_alone(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def bench(*data: str) -> int:
        return cli.main(["bench", "vlm", "--model", str(folder), "--drafters", "suffix", "--batch", "1",
                         "--temperature", "0", "--images", "2", "--max-new-tokens", "6", "--device", "cpu", "--without",
                         "stock-static", "--json", str(tmp_path / "found.json"), *data])  # fmt: skip

    assert bench("--data", str(folder / "prompts.jsonl")) == 0
    found = json.loads((tmp_path / "found.json").read_text())["records"]
    assert {one["method"] for one in found} >= {"stock", "ngram", "suffix"}
    assert all(one["identical_rate"] == 1 for one in found if one["n"])
    assert bench() == 1 and "reads text alone" in capsys.readouterr().err


def test_its_batches_are_measured_on_text_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(folder), "--images", "2", "--rows", "2", "--turns", "1", "--max-new-tokens", "4"]
    bench = ["bench", "caption", *words, "--device", "cpu", "--without", "*ngram"]
    assert cli.main([*bench, "--data", str(folder / "prompts.jsonl")]) == 0
    assert cli.main(bench) == 1 and "name a list of prompts without pictures" in capsys.readouterr().err


def test_commands_that_ask_about_pictures_refuse_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_llava.noise(tmp_path, 1)
    words, picture = ["--model", str(folder), "--device", "cpu"], str(tmp_path / "0.png")
    for command in (
        ["demo", "--image-model", "none"],
        ["verify", picture],
        ["caption", picture, "--out", str(tmp_path)],
    ):
        assert cli.main([*command, *words]) == 1
        assert "reads text alone, and this command asks" in capsys.readouterr().err


def test_a_server_takes_it(folder: Path) -> None:
    served = engine.load(str(folder), "ngram", "cpu", "auto", 8, 0.0, sees=False)
    assert served.suggest_rows() >= 1
