"""Drafters in every published layout: read strictly, computed as published, written back the same."""

import json
import math
import os
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from published_drafters import (
    HEADS,
    KV,
    LLAMA,
    MLP,
    PUBLISHED,
    THREE,
    D,
    H,
    V,
    decoder_layer,
    eagle,
    eagle3,
    load,
    norm,
    ours,
    put,
    run,
    same,
    speculators,
)
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import mmspec
from mmspec import zoo
from mmspec.app import cli
from mmspec.checkpoints import files, save
from mmspec.checkpoints.layouts import LAYOUTS
from mmspec.drafters.ngram import NgramDrafter


@pytest.mark.parametrize("variant", ["plain", "input norm", "biases", "no fc bias"])
def test_eagle_computes_as_published(tmp_path, variant):
    config, t = eagle()
    if variant == "input norm":
        t["layers.0.input_layernorm.weight"] = 1 + torch.rand(H)
    if variant == "biases":
        t |= {f"layers.0.self_attn.{x}_proj.bias": torch.randn(n * D) for x, n in (("q", HEADS), ("k", KV), ("v", KV))}
        config = {**config, "qkv_bias": True, "rope_theta": 1e6}
    if variant == "no fc bias":
        del t["fc.bias"], t["embed_tokens.weight"]
        config = {**config, "bias": False}
    drafter = load(put(tmp_path, config, t))
    e, h = torch.randn(7, H), torch.randn(7, H)
    x = torch.cat([e, h], -1) @ t["fc.weight"].T + t.get("fc.bias", torch.zeros(1))
    read = norm(x, t["layers.0.input_layernorm.weight"]) if variant == "input norm" else x
    want = decoder_layer(t, "layers.0", read, x, 1e6 if variant == "biases" else 1e4)
    torch.testing.assert_close(run(drafter, e, h), want, atol=1e-5, rtol=1e-4)
    assert not drafter.training and not any(p.requires_grad for p in drafter.parameters())


@pytest.mark.parametrize("layout", ["eagle3", "speculators", "speculators, residual normed"])
def test_eagle3_computes_as_published(tmp_path, layout):
    config, t = PUBLISHED[layout.split(",")[0]]()
    config["norm_before_residual"] = "normed" in layout
    prefix = "midlayer" if layout == "eagle3" else "layers.0"
    drafter = load(put(tmp_path, config, t))
    e, h = torch.randn(7, H), torch.randn(7, 3 * H)
    x = h @ t["fc.weight"].T
    normed = norm(x, t[f"{prefix}.hidden_norm.weight"])
    read = torch.cat([norm(e, t[f"{prefix}.input_layernorm.weight"]), normed], -1)
    theta = 1e4 if layout == "eagle3" else 5e5
    z = decoder_layer(t, prefix, read, normed if "normed" in layout else x, theta)
    torch.testing.assert_close(run(drafter, e, h), z, atol=1e-5, rtol=1e-4)
    logits = norm(z, t["norm.weight"]) @ t["lm_head.weight"].T
    torch.testing.assert_close(drafter.logits(z, None), logits, atol=1e-5, rtol=1e-4)
    best = logits.argmax(-1)
    assert torch.equal(drafter.head.to_target(best), best + t["d2t"][best])
    assert drafter.config.features == ((2, 4, 6) if layout == "eagle3" else (1, 4, 7))
    assert drafter.config.target == ("" if layout == "eagle3" else "somebody/target")


# -- what the files say ------------------------------------------------------------------------------------------------


def test_shapes_come_from_the_tensors(tmp_path):
    config, t = eagle()
    c = load(put(tmp_path, {**config, "num_key_value_heads": 4, "intermediate_size": 7, "vocab_size": 5}, t)).config
    assert (c.kv_heads, c.intermediate, c.vocab, c.head_dim, c.rope_theta) == (KV, MLP, V, 0, 10000.0)


BASES = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}  # as Gemma-3 has them


@pytest.mark.parametrize(
    ("said", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}, "rope_theta": 5e5}, 1e6),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": None}, 1e6),
        ({"rope_parameters": BASES, "layer_types": ["full_attention"]}, 1e6),
        ({"rope_parameters": {kind: {"rope_theta": 1e6} for kind in BASES}}, 1e6),
    ],
)
def test_the_base_of_positions_in_every_spelling(tmp_path, said, theta):
    config, t = eagle()
    assert load(put(tmp_path, {**config, **said}, t)).config.rope_theta == theta


def test_heads_wider_than_hidden(tmp_path):
    config, t = eagle3()
    c = load(put(tmp_path, {**config, "num_attention_heads": 2, "head_dim": 16}, t)).config
    assert (c.heads, c.kv_heads, c.head_dim) == (2, 1, 0)
    t["midlayer.self_attn.q_proj.weight"] = torch.randn(64, 2 * H)
    t["midlayer.self_attn.o_proj.weight"] = torch.randn(H, 64)
    c = load(put(tmp_path, {**config, "num_attention_heads": 8, "head_dim": 8}, t)).config
    assert (c.heads, c.kv_heads, c.head_dim) == (8, 2, 8)


@pytest.mark.parametrize(
    ("listed", "features"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, (1, 3, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}, (2, 4, 6)),  # layers whose output is read
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}}, (2, 3, 5)),  # whose input is
    ],
)
def test_layers_that_are_listed(tmp_path, listed, features):
    config, t = eagle3()
    assert mmspec.load_drafter(put(tmp_path, {**config, **listed}, t)).config.features == features


def test_layers_that_nobody_lists(tmp_path):
    folder = put(tmp_path / "drafter", *eagle3())
    with pytest.raises(ValueError, match="pass target="):
        mmspec.load_drafter(folder)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 12}))
    c = mmspec.load_drafter(folder, target=tmp_path / "target").config
    assert (c.features, c.target) == ((2, 6, 9), str(tmp_path / "target"))
    with pytest.raises(ValueError, match="config of the target"):
        mmspec.load_drafter(folder, target=tmp_path / "nowhere")


def test_a_head_of_every_token_needs_no_map(tmp_path):
    config, t = eagle3()
    del t["d2t"], t["t2d"]
    t["lm_head.weight"] = torch.randn(V, H)
    assert torch.equal(load(put(tmp_path, config, t)).head.ids, torch.arange(V))
    t["lm_head.weight"] = torch.randn(V - 1, H)
    with pytest.raises(ValueError, match="missing: d2t; extra: none"):
        load(put(tmp_path, config, t))


@pytest.mark.parametrize("kind", ["pytorch_model.bin", "DeepSpeed's", "single file", "shards", "beside a frozen head"])
def test_files_it_can_lie_in(tmp_path, kind):
    config, t = eagle()
    if kind == "pytorch_model.bin":
        path = put(tmp_path, config, t, "pytorch_model.bin")
    elif kind == "DeepSpeed's":
        path = put(tmp_path, config, {}, "pytorch_model.bin")
        torch.save(OrderedDict(t), path / "pytorch_model.bin")
    elif kind == "single file":
        path = put(tmp_path, config, t, "state.safetensors") / "state.safetensors"
    elif kind == "shards":
        names = {key: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, key in enumerate(t)}
        for file in set(names.values()):
            put(tmp_path, config, {key: t[key] for key in t if names[key] == file}, file)
        (tmp_path / files.INDEX).write_text(json.dumps({"weight_map": names}))
        path = tmp_path
    else:
        save_file({"weight": torch.randn(V, H)}, tmp_path / "model_1.safetensors")
        path = put(tmp_path, config, t)
    assert torch.equal(load(path).fc.weight, t["fc.weight"])


def test_a_broken_drafter_and_its_types_are_kept(tmp_path):
    config, t = eagle()
    t = {key: torch.full_like(tensor, math.nan, dtype=torch.bfloat16) for key, tensor in t.items()}
    drafter = load(put(tmp_path, config, t))
    assert drafter.fc.weight.dtype == torch.bfloat16 and drafter.block.qkv.weight.isnan().all()


# -- there and back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("mmspec", {}),
        ("mmspec", {**THREE, "norm_residual": True}),
        ("mmspec", {"embed_norm": True, "out_norm": True, "input_norm": True, "draft_vocab": 7, "head_dim": 6}),
        ("eagle", {"qkv_bias": True, "input_norm": True}),
        ("eagle", {"fc_bias": False, "target_hidden": 40}),
        ("eagle3", {**THREE, "qkv_bias": True, "target_hidden": 40, "features": (1, 2)}),
        ("speculators", {**THREE, "norm_residual": True, "head_dim": 6}),
        ("speculators", {**THREE, "draft_vocab": V}),
    ],
)
def test_round_trip(tmp_path, layout, changes):
    drafter = ours(**changes)
    mmspec.save_drafter(drafter, tmp_path / "a")
    first = mmspec.load_drafter(tmp_path / "a")
    save.save_drafter(first, tmp_path / "b", layout)
    second = mmspec.load_drafter(tmp_path / "b")
    save.save_drafter(second, tmp_path / "c")
    same(drafter, first)
    same(drafter, second)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "c" / file).read_bytes()


@pytest.mark.parametrize("layout", PUBLISHED)
def test_written_as_published(tmp_path, layout):
    """Names, shapes and values of the tensors as they came, but for the copies of the target's."""
    config, t = PUBLISHED[layout]()
    save.save_drafter(load(put(tmp_path / "a", config, t)), tmp_path / "b", layout)
    written = load_file(tmp_path / "b" / "model.safetensors")
    assert written.keys() == t.keys() - {"embed_tokens.weight"}
    assert all(torch.equal(written[key], t[key]) for key in written)
    said = json.loads((tmp_path / "b" / "config.json").read_text())
    unsaid = {"speculators_version", "fc_norm", "norm_output", "mm_vision_tower", "rope_parameters"}
    missing = config.keys() - said.keys() - unsaid
    assert not missing, missing
    inner, came = (each.get("transformer_layer_config", each) for each in (said, config))
    assert {key: inner[key] for key in LLAMA} == {key: came[key] for key in LLAMA} | {"num_hidden_layers": 1}


def test_speculators_can_build_its_layer_from_our_config(tmp_path):
    """The inner config makes a transformers config with the same rotary base, in the versions that moved it too."""
    from transformers import LlamaConfig

    save.save_drafter(ours(**THREE), tmp_path, "speculators")
    inner = LlamaConfig(**json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"])
    assert inner.rope_parameters["rope_theta"] == 1e6 and inner.head_dim == D


def test_card(tmp_path):
    save.save_drafter(ours(), tmp_path)
    text = (tmp_path / "README.md").read_text()
    parts = ['base_model: "somebody/target"', "- speculative-decoding", "- eagle", "library_name: mmspec"]
    assert all(part in text for part in [*parts, "| 4 | 3 | 17 |"])
    save.save_drafter(ours(target="other", depth=5), tmp_path)  # its own card is that of the drafter beside it
    other = (tmp_path / "README.md").read_text()
    assert "eagle drafter for other\n" in other and "| 5 | 3 | 17 |" in other and "base_model" not in other
    for mine in ("mine", other + "Trained by me.\n", other.replace("| 5 |", "| 6 | 3 | 20 |\n| 5 |")):
        (tmp_path / "README.md").write_text(mine)
        save.save_drafter(ours(), tmp_path)
        assert (tmp_path / "README.md").read_text() == mine
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    save.save_drafter(ours(target="/somewhere/target"), tmp_path / "local")
    assert "base_model" not in (tmp_path / "local" / "README.md").read_text()


@pytest.mark.parametrize("error", [OSError, SafetensorError, RuntimeError])
def test_a_failed_write_leaves_what_stood(tmp_path, monkeypatch, error):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(file) or fsync(file))
    save.save_drafter(ours(), tmp_path)
    assert len(synced) == 3  # each file is on the disk before it replaces another
    assert len({p.stat().st_mode for p in tmp_path.iterdir()}) == 1  # that of any new file
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(tensors, path, metadata):
        assert path.parent == tmp_path and path.name.startswith(f".{os.getpid()}-")
        path.write_bytes(b"half")
        raise error("no space left on device")

    monkeypatch.setattr(save, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        save.save_drafter(ours(), tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_nothing_to_save(tmp_path):
    with pytest.raises(TypeError, match="NgramDrafter has none"):
        save.save_drafter(NgramDrafter(), tmp_path)


@pytest.mark.parametrize("has_card", [False, True])
def test_push(monkeypatch, has_card):
    import huggingface_hub

    calls = {}

    class Api:
        def __init__(self, token):
            calls["token"] = token

        def create_repo(self, repo_id, private, exist_ok):
            return f"https://huggingface.co/{repo_id}"

        def file_exists(self, repo_id, name, revision):
            return has_card

        def upload_folder(self, folder_path, ignore_patterns, **_):
            names = {p.name for p in Path(folder_path).iterdir()}
            calls["files"] = sorted(names - {*(ignore_patterns or ())})

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert mmspec.push_drafter(ours(), "me/drafter", token="t") == "https://huggingface.co/me/drafter"
    assert calls == {"token": "t", "files": ["README.md"] * (not has_card) + ["config.json", "model.safetensors"]}


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [name for name, layout in LAYOUTS.items() if layout.method != "block"])
def test_convert(tmp_path, capsys, layout):
    source = put(tmp_path / "a", *(speculators if layout in ("mmspec", "eagle3") else PUBLISHED[layout])())
    words = ["convert", str(source), str(tmp_path / "b"), "--layout", layout, "--target", "me/other"]
    assert cli.main(words) == 0
    assert "target: me/other" in capsys.readouterr().out
    same(mmspec.load_drafter(source, target="me/other"), mmspec.load_drafter(tmp_path / "b"))
    assert cli.main(words) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert cli.main([*words, "--overwrite"]) == 0


def test_convert_reads_an_embedded_drafter_by_its_name(tmp_path, capsys):
    assert cli.main(["convert", "scenes-video-eagle", str(tmp_path / "b")]) == 0
    assert "target: scenes-video" in capsys.readouterr().out
    same(mmspec.load_drafter(zoo.path("scenes-video-eagle")), mmspec.load_drafter(tmp_path / "b"))


def test_convert_says_what_is_wrong(tmp_path, capsys):
    standing = put(tmp_path / "standing", *eagle())
    assert cli.main(["convert", str(tmp_path / "nowhere"), str(standing)]) == 1
    assert "mmspec convert: there is no folder" in capsys.readouterr().err  # the source comes first
    assert cli.main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "b")]) == 1
    assert "mmspec convert: there is no folder" in capsys.readouterr().err
    assert cli.main(["convert", str(put(tmp_path / "a", *eagle())), str(tmp_path / "b"), "--layout", "eagle3"]) == 1
    assert "cannot hold this drafter" in capsys.readouterr().err
