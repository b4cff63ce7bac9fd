"""LlamaGen's published files, written as their authors wrote them, come back as the same pipeline."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_llamagen as tiny
import torch
from safetensors.torch import save_file
from torch import Tensor

import mmspec
from mmspec.app import cli
from mmspec.pipelines.llamagen import files

HEADS = 4


def llama_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the LANTERN authors' repositories name them, q, k and v apart."""
    names = {
        "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "tok_embeddings": "embed_tokens",
    }  # fmt: skip
    out: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        for ours, theirs in names.items():
            key = key.replace(ours, theirs)
        if key == "output.weight":
            out["lm_head.weight"] = tensor
        elif "wqkv" in key:
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                out["model." + key.replace("attention.wqkv", f"self_attn.{part}_proj")] = rows.contiguous()
        else:
            out["model." + key] = tensor
    return out


# layout → what lies in the file
LAYOUTS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "DDP": lambda t: {"model": t},
    "DeepSpeed": lambda t: {"module": t},
    "state_dict": lambda t: {"state_dict": t},
    "FSDP": lambda t: t,
    "compiled": lambda t: {"model": {f"_orig_mod.{key}": value for key, value in t.items()}},
    "stray table": lambda t: {"model": {**t, "freqs_cis": torch.zeros(20, 4, 2)}},
    "Llama names": llama_names,
}


def same(a: Any, b: Any) -> bool:
    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def write(folder: Path, pipe: Any, layout: str = "DDP", args: Any = None) -> tuple[Path, Path]:
    """The transformer's file and the tokenizer's."""
    content = LAYOUTS[layout](pipe.transformer.state_dict())
    torch.save(content if args is None else {**content, "args": args, "steps": 7}, folder / "gpt.pt")
    codes = {**pipe.vqvae.state_dict(), "quantize.codebook_used": torch.zeros(65536)}
    torch.save({"model": codes}, folder / "vq.pt")
    return folder / "gpt.pt", folder / "vq.pt"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["text", "class"])
def test_every_layout_comes_back(tmp_path, kind, layout):
    pipe = tiny.pipeline(kind)
    back = files.pipeline(*write(tmp_path, pipe, layout), image_size=8, heads=HEADS)
    assert same(back.transformer, pipe.transformer) and same(back.vqvae, pipe.vqvae)
    ours, theirs = ({k: v for k, v in p.transformer.config.items() if not k.startswith("_")} for p in (pipe, back))
    unsaid = {"multiple_of": 0} | ({"caption_width": 0} if kind == "class" else {})  # others give the same shapes
    assert {**theirs, **unsaid} == {**ours, **unsaid}


def test_a_folder_of_safetensors(tmp_path):
    pipe = tiny.pipeline()
    save_file(llama_names(pipe.transformer.state_dict()), tmp_path / "model.safetensors")
    assert same(files.transformer(files.read(tmp_path), 4, HEADS), pipe.transformer)


def test_grid_and_heads_from_the_file_and_the_table():
    tensors = tiny.transformer("class").state_dict()
    assert files.transformer({**tensors, "freqs_cis": torch.zeros(1 + 25, 4, 2)}, None, HEADS).config.grid == 5
    with pytest.raises(ValueError, match=r"does not say how large its pictures are.*--image-size"):
        files.transformer(tensors, None, HEADS)
    with pytest.raises(ValueError, match=r"width 32 and 2 layers is none of the published.*--heads"):
        files.transformer(tensors, 4)
    with pytest.raises(ValueError, match="7 heads do not fit"):
        files.transformer(tensors, 4, 7)
    assert files.HEADS[1280, 36] == 20 and files.HEADS[3200, 24] == 32


def test_training_files_need_the_flag_and_others_stay_shut(tmp_path):
    pipe = tiny.pipeline("class")
    gpt, vq = write(tmp_path, pipe, args=argparse.Namespace(lr=1e-4, vq_model="VQ-16"))
    with pytest.raises(ValueError, match=r"argparse\.Namespace.*--allow-pickle"):
        files.pipeline(gpt, vq, image_size=8, heads=HEADS)
    assert same(files.pipeline(gpt, vq, image_size=8, heads=HEADS, allow_pickle=True).transformer, pipe.transformer)
    gpt, vq = write(tmp_path, pipe, args=datetime.timedelta(1))  # stands for anything that would run code
    with pytest.raises(ValueError, match=r"more than tensors and argparse\.Namespace"):
        files.pipeline(gpt, vq, image_size=8, heads=HEADS, allow_pickle=True)


def test_misfits_are_named(tmp_path):
    pipe = tiny.pipeline("class")
    tensors = pipe.transformer.state_dict()
    lacking = {key: t for key, t in tensors.items() if key != "layers.1.ffn_norm.weight"}
    with pytest.raises(
        ValueError, match=r"missing: layers\.1\.ffn_norm\.weight; unexpected: extra; wrong shapes: none"
    ):
        files.transformer({**lacking, "extra": torch.zeros(1)}, 4, HEADS)
    with pytest.raises(ValueError, match=r"norm\.weight is \[31\], expected \[32\]"):
        files.transformer({**tensors, "norm.weight": torch.zeros(31)}, 4, HEADS)
    with pytest.raises(ValueError, match=r"not LlamaGen's: missing: tok_embeddings\.weight"):
        files.transformer(pipe.vqvae.state_dict(), 4, HEADS)
    with pytest.raises(ValueError, match=r"not LlamaGen's: missing: quantize\.embedding\.weight"):
        files.vq(tensors)
    with pytest.raises(ValueError, match=r"post_quant_conv\.weight is \[32, 4, 1, 1\], expected \[32, 3, 1, 1\]"):
        codes = pipe.vqvae.state_dict()
        files.vq({**codes, "quantize.embedding.weight": codes["quantize.embedding.weight"][:, :3]})
    pipe.vqvae = tiny.vq(codes=32)
    with pytest.raises(ValueError, match="draws from 64 tokens, but this VQ tokenizer has 32 codes"):
        files.pipeline(*write(tmp_path, pipe), image_size=8, heads=HEADS)
    for content in ([1, 2], {"model": {}}):
        torch.save(content, tmp_path / "list.pt")
        with pytest.raises(ValueError, match="contains no table of tensors"):
            files.read(tmp_path / "list.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "gpt.pt").read_bytes()[:500])
    with pytest.raises(ValueError, match="damaged"):
        files.read(tmp_path / "cut.pt")
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / "nowhere.pt")


@pytest.mark.parametrize("kind", ["text", "class"])
def test_the_command_writes_a_pipeline(tmp_path, capsys, kind):
    pipe = tiny.pipeline(kind)
    gpt, vq = write(tmp_path, pipe)
    words = ["convert", "llamagen", str(gpt), "--vq", str(vq), "-o", str(tmp_path / "out"), "--heads", str(HEADS)]
    if kind == "text":
        pipe.text_encoder.save_pretrained(tmp_path / "t5")
        pipe.tokenizer.save_pretrained(tmp_path / "t5")
        words += ["--text-encoder", str(tmp_path / "t5")]
    assert cli.main([*words, "--image-size", "8"]) == 0
    said = "text" if kind == "text" else "10 classes"
    assert f"{said} to 8x8 pixels in 4x4 tokens" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/model_index.json").read_text())["_class_name"] == "LlamaGenPipeline"
    back = mmspec.LlamaGenPipeline.from_pretrained(tmp_path / "out")
    what: dict[str, Any] = {"prompt": "a red circle"} if kind == "text" else {"class_labels": 3}
    how = {**what, "output_type": "latent", "clean_caption": False}
    assert torch.equal(*(p(**how, generator=torch.Generator().manual_seed(1)).tokens for p in (pipe, back)))
    assert cli.main([*words, "--image-size", "8"]) == 1
    assert "holds model_index.json already" in capsys.readouterr().err


def test_the_command_says_what_is_missing(tmp_path, capsys):
    gpt, vq = write(tmp_path, tiny.pipeline("class"))
    absent, out = tmp_path / "no.pt", ["-o", tmp_path / "out"]
    for words, message in (
        ([], "needs --vq FILE, the VQ tokenizer, and -o FOLDER"),
        (["--vq", vq, *out, "--image-size", 9], "multiple of the tokenizer's 2 pixels"),
        (["--vq", absent, *out], f"there is no file '{absent}'"),
    ):
        assert cli.main(["convert", "llamagen", *map(str, [gpt, *words])]) == 1
        assert message in capsys.readouterr().err
