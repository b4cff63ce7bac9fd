"""Models of folders: damaged files and adapters are refused in words, and weights that are missing are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import tiny_llava
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmspec.app import cli
from mmspec.pipelines.host.loading import model_and_processor

WEIGHTS = "model.safetensors"
NORM = "language_model.model.norm.weight"
DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "another shape": (lambda tensors: tensors.update({NORM: torch.ones(3)}), r"norm\.weight \(3,\) instead of"),
    "cut": (dict.clear, "a file of its weights is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_weights_are_refused(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    break_, words = DAMAGE[damage]
    folder = tiny_llava.save(tmp_path / "model")
    tensors = load_file(folder / WEIGHTS)
    break_(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    if not tensors:
        (folder / WEIGHTS).write_bytes(b"cut off")
    refused(folder, words, capsys)


def refused(folder: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also by `train`, as by the other commands."""
    with pytest.raises(ValueError, match=words):
        model_and_processor(folder, torch.float32)
    (folder / "data.jsonl").write_text("")
    args = ["--data", str(folder / "data.jsonl"), "--out", str(folder / "out"), "--device", "cpu"]
    assert cli.main(["train", "--method", "eagle", "--target", str(folder), *args]) == 1
    assert f"cannot load the target '{folder}'. ValueError: " in capsys.readouterr().err


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    """transformers initializes them, most of them at random."""
    folder = tiny_llava.save(tmp_path / "model")
    tensors = load_file(folder / WEIGHTS)
    del tensors[NORM]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"lack .*norm\.weight, which have initial values now"):
        model_and_processor(folder, torch.float32)


def test_an_adapter_is_refused_with_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_llava.model()
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)  # type: ignore[arg-type]
    refused(tmp_path, "it is a PEFT adapter: merge it into the model that it adapts", capsys)
