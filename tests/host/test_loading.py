"""Models of folders: an adapter with the model that it adapts; damaged and incomplete files are refused in words."""

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
    "a tensor missing": (lambda tensors: tensors.pop(NORM), r"lack .*norm\.weight"),
    "another shape": (lambda tensors: tensors.update({NORM: torch.ones(3)}), r"norm\.weight \(3,\) instead of"),
    "cut": (dict.clear, "a file of its weights is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_weights_are_refused(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers would fill what is missing at random; `train` says it as the other commands do."""
    break_, words = DAMAGE[damage]
    folder = tiny_llava.save(tmp_path / "model")
    tensors = load_file(folder / WEIGHTS)
    break_(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    if not tensors:
        (folder / WEIGHTS).write_bytes(b"cut off")
    with pytest.raises(ValueError, match=words):
        model_and_processor(folder, torch.float32)
    (tmp_path / "data.jsonl").write_text("")
    args = ["--data", str(tmp_path / "data.jsonl"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert cli.main(["train", "--method", "eagle", "--target", str(folder), *args]) == 1
    assert f"cannot load the target '{folder}'. ValueError: " in capsys.readouterr().err


def test_an_adapter_is_loaded_with_the_model_that_it_adapts(tmp_path: Path) -> None:
    base, folder = tiny_llava.save(tmp_path / "base"), tmp_path / "adapter"
    model, processor = model_and_processor(base, torch.float32)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    adapted.save_pretrained(folder)
    ids = torch.arange(5, 12)[None]
    found, words = model_and_processor(folder, torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(found(input_ids=ids).logits, adapted(input_ids=ids).logits)
    assert type(words) is type(processor)
