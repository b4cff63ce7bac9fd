"""MAR's published files, written as their authors wrote them, come back as the same pipeline."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_mar as tiny
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from mmspec.app import cli
from mmspec.pipelines.mar import files
from mmspec.pipelines.mar.pipeline import MARPipeline

HEADS = tiny.SIZES["heads"]
GROUPS = 8


def ldm_names(tensors: dict[str, Tensor], levels: int) -> dict[str, Tensor]:
    """A diffusers AutoencoderKL as LDM names it, written out by hand."""
    out = {}
    for key, tensor in tensors.items():
        parts = key.split(".")
        if parts[0] in ("encoder", "decoder") and len(parts) > 3:
            side, block, rest = parts[0], parts[1], parts[2:]
            if block == "mid_block":
                middle = "attn_1" if rest[0] == "attentions" else f"block_{int(rest[1]) + 1}"
                head, rest = f"{side}.mid.{middle}", rest[2:]
            else:
                level = int(rest[0]) if block == "down_blocks" else levels - 1 - int(rest[0])
                kind = {"resnets": f"block.{rest[2]}", "attentions": f"attn.{rest[2]}", "downsamplers": "downsample",
                        "upsamplers": "upsample"}[rest[1]]  # fmt: skip
                head, rest = f"{side}.{'down' if block == 'down_blocks' else 'up'}.{level}.{kind}", rest[3:]
            name = ".".join(rest).replace("to_out.0", "proj_out").replace("group_norm", "norm")
            name = re.sub(r"^to_([qkv])\.", r"\1.", name).replace("conv_shortcut", "nin_shortcut")
            if "attn" in head and name.endswith("weight") and tensor.ndim == 2:
                tensor = tensor[..., None, None]
            key = f"{head}.{name}"
        out[key.replace("conv_norm_out", "norm_out")] = tensor
    return out


def write(folder: Path, pipe: Any, container: str | None = "model_ema", args: Any = None) -> tuple[Path, Path]:
    """The transformer's file, with weights that are not the averaged ones beside it, and the VAE's."""
    tensors = pipe.transformer.state_dict()
    content: Any = tensors
    if container:
        content = {"model": {k: t + 1 for k, t in tensors.items()}, container: tensors, "optimizer": {}, "epoch": 3}
    torch.save(content if args is None else {**content, "args": args}, folder / "checkpoint-last.pth")
    levels = len(pipe.vae.config.block_out_channels)
    torch.save({"model": ldm_names(pipe.vae.state_dict(), levels)}, folder / "kl16.ckpt")
    return folder / "checkpoint-last.pth", folder / "kl16.ckpt"


def same(a: Any, b: Any) -> bool:
    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.fixture
def pipe(monkeypatch):
    monkeypatch.setattr(files, "GROUPS", GROUPS)  # the published VAE's 32 need channels that 32 divides
    return tiny.pipeline()


@pytest.mark.parametrize("container", ["model_ema", None])
def test_every_container_comes_back(tmp_path, pipe, container):
    back = files.pipeline(*write(tmp_path, pipe, container), heads=HEADS)
    assert same(back.transformer, pipe.transformer) and same(back.vae, pipe.vae)
    for part, unsaid in (("transformer", ()), ("vae", ("sample_size",))):
        configs = (getattr(p, part).config.items() for p in (pipe, back))
        ours, theirs = ({k: v for k, v in c if not k.startswith("_") and k not in unsaid} for c in configs)
        assert {k: tuple(v) if isinstance(v, list) else v for k, v in theirs.items()} == ours
    assert not back.scheduler.config.final_noise and not back.scheduler.config.skip_terminal  # as published


def test_safetensors_of_mirrors(tmp_path, pipe):
    save_file(pipe.transformer.state_dict(), tmp_path / "mar-base.safetensors")
    assert same(files.transformer(files.read(tmp_path / "mar-base.safetensors"), HEADS), pipe.transformer)


def test_the_published_widths_say_their_heads():
    assert files.HEADS == {768: 12, 1024: 16, 1280: 16}
    with pytest.raises(ValueError, match=r"width 24 is none of the published ones \(768, 1024, 1280\).*--heads"):
        files.transformer(tiny.transformer().state_dict())


def test_misfits_are_named(tmp_path, pipe):
    tensors = pipe.transformer.state_dict()
    lacking = {key: t for key, t in tensors.items() if key != "encoder_blocks.1.attn.qkv.bias"}
    with pytest.raises(ValueError, match=r"missing: encoder_blocks\.1\.attn\.qkv\.bias; unexpected: extra"):
        files.transformer({**lacking, "extra": torch.zeros(1)}, HEADS)
    codes = ldm_names(pipe.vae.state_dict(), 3)
    with pytest.raises(ValueError, match=r"not MAR's: missing: mask_token"):
        files.transformer(codes, HEADS)
    with pytest.raises(ValueError, match=r"not MAR's: missing: post_quant_conv\.weight"):
        files.vae(tensors)
    with pytest.raises(ValueError, match=r"unexpected: decoder\.odd"):
        files.vae({**codes, "decoder.odd": torch.zeros(1)})
    assert same(files.vae({**codes, "loss.logvar": torch.zeros(1)}), pipe.vae)
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        files.read(tmp_path / "none.pth")


def ldm_decode(w: dict[str, Tensor], z: Tensor, levels: int, blocks: int) -> Tensor:
    """LDM's decoder as its formulas say, from weights under LDM's names."""

    def conv(x: Tensor, name: str) -> Tensor:
        return F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], padding=w[f"{name}.weight"].shape[-1] // 2)

    def norm(x: Tensor, name: str) -> Tensor:
        grouped = x.unflatten(1, (GROUPS, -1)).flatten(2)
        spread = grouped.var(2, unbiased=False, keepdim=True) + 1e-6
        grouped = (grouped - grouped.mean(2, keepdim=True)) / spread.sqrt()
        return grouped.view_as(x) * w[f"{name}.weight"][:, None, None] + w[f"{name}.bias"][:, None, None]

    def silu(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    def block(x: Tensor, name: str) -> Tensor:
        h = conv(silu(norm(x, f"{name}.norm1")), f"{name}.conv1")
        h = conv(silu(norm(h, f"{name}.norm2")), f"{name}.conv2")
        return (conv(x, f"{name}.nin_shortcut") if f"{name}.nin_shortcut.weight" in w else x) + h

    def attend(x: Tensor, name: str) -> Tensor:
        h = norm(x, f"{name}.norm")
        q, k, v = (conv(h, f"{name}.{part}").flatten(2) for part in "qkv")
        weights = (q.transpose(1, 2) @ k / q.shape[1] ** 0.5).softmax(2)
        return x + conv((v @ weights.transpose(1, 2)).view_as(x), f"{name}.proj_out")

    x = conv(F.conv2d(z, w["post_quant_conv.weight"], w["post_quant_conv.bias"]), "decoder.conv_in")
    x = block(attend(block(x, "decoder.mid.block_1"), "decoder.mid.attn_1"), "decoder.mid.block_2")
    for level in reversed(range(levels)):
        for j in range(blocks + 1):
            x = block(x, f"decoder.up.{level}.block.{j}")
        if level:
            x = conv(x.repeat_interleave(2, 2).repeat_interleave(2, 3), f"decoder.up.{level}.upsample.conv")
    return conv(silu(norm(x, "decoder.norm_out")), "decoder.conv_out")


@torch.no_grad()
def test_the_vae_decodes_as_ldm_does(pipe):
    named = ldm_names(pipe.vae.state_dict(), 3)
    assert "decoder.up.2.block.0.conv1.weight" in named and "encoder.down.2.attn.0.q.weight" in named
    z = torch.randn(2, 4, 4, 4)
    want = ldm_decode({key: t.double() for key, t in named.items()}, z.double(), 3, 2)
    torch.testing.assert_close(files.vae(named).decode(z).sample.double(), want, atol=1e-4, rtol=0)


def test_the_command_line(tmp_path, pipe, capsys):
    mar, vae = write(tmp_path, pipe, args=argparse.Namespace())
    line = ["convert", "mar", str(mar), "--vae", str(vae), "--heads", str(HEADS), "-o", str(tmp_path / "out")]
    assert cli.main(line) == 1 and "--allow-pickle" in capsys.readouterr().err
    assert cli.main([*line, "--allow-pickle"]) == 0
    assert "5 classes to 16x16 pixels in 4x4 tokens" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "model_index.json").read_text())["_class_name"] == "MARPipeline"
    assert same(MARPipeline.from_pretrained(tmp_path / "out").transformer, pipe.transformer)
    assert cli.main([*line, "--allow-pickle"]) == 1 and "--overwrite" in capsys.readouterr().err
    assert cli.main(["convert", "mar", str(mar)]) == 1 and "--vae" in capsys.readouterr().err
