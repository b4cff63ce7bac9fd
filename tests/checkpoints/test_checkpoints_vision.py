"""Drafters that know of images, in their authors' layouts and in those of later trainers: read, computed, written."""

import math
from dataclasses import replace

import pytest
import torch
from published_drafters import (
    HEADS,
    NUM_Q,
    PUBLISHED,
    TARGET,
    VISUAL,
    D,
    H,
    V,
    decoder_layer,
    eagle,
    flash,
    load,
    msd,
    nemo,
    norm,
    put,
    run,
    vispec,
)
from safetensors.torch import save_file

import mmspec


def linear(t, name, x):
    return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", torch.zeros(1))


def through_layer(t, x, theta, positions):
    """The published layer with the norms that a file may have: before the attention, and behind the whole."""
    before, behind = (t.get(f"{name}.weight") for name in ("layers.0.input_layernorm", "norm"))
    z = decoder_layer(t, "layers.0", x if before is None else norm(x, before), x, theta, positions)
    return z if behind is None else norm(z, behind)


# -- what they compute -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "theta"),
    [(vispec, 1e6), (lambda: vispec("llava"), 1e4), (nemo, 1e6), (lambda: nemo(normed=True), 1e4)],
    ids=["Qwen2.5-VL", "LLaVA", "NeMo", "NeMo, normed"],
)
def test_vispec_computes_as_published(tmp_path, made, theta):
    config, t = made()
    at, queries = ("imadpt", t["imadpt.q"]) if "imadpt.q" in t else ("img_adaptor", t.get("img_adaptor.query"))
    e, h = torch.randn(len(VISUAL), H), torch.randn(len(VISUAL), H)
    rows, positions, g, j = [], [], torch.zeros(H), 0
    while j < len(VISUAL):
        if not VISUAL[j]:
            rows.append(linear(t, "fc", torch.cat([e[j], linear(t, "img_fc", torch.cat([h[j], g]))])))
            positions.append(j)
            j += 1
            continue
        end = j
        while VISUAL[end]:  # touching images are one run
            end += 1
        k, v = (linear(t, f"{at}.{x}_proj", e[j:end]).view(-1, HEADS, D) for x in "kv")
        heads = [(queries[:, i] @ k[:, i].T / math.sqrt(D)).softmax(-1) @ v[:, i] for i in range(HEADS)]
        made_of_image = linear(t, f"{at}.o_proj", torch.cat(heads, -1))
        rows += made_of_image[:-1]
        positions += range(end - NUM_Q + 1, end)
        g, j = made_of_image[-1], end
    want = through_layer(t, torch.stack(rows), theta, torch.tensor(positions))
    drafter = load(put(tmp_path, config, t))
    assert (drafter.method, drafter.config.num_q, drafter.config.media) == ("vispec", NUM_Q, "merge")
    text = VISUAL == 0
    kept = [i for i, position in enumerate(positions) if text[position]]
    torch.testing.assert_close(run(drafter, e, h, VISUAL)[text], want[kept], atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("error")  # the authors' M-RoPE is fed equal positions, which is none
@pytest.mark.parametrize(
    ("made", "theta"),
    [(msd, 1e4), (lambda: msd("qwen"), 1e6), (lambda: nemo("MultimodalEagleDraftModel", normed=True), 1e4)],
    ids=["LLaVA", "Qwen2-VL", "NeMo"],
)
def test_msd_computes_as_published(tmp_path, made, theta):
    config, t = made()
    e, h = torch.randn(len(VISUAL), H), torch.randn(len(VISUAL), H)
    x = torch.where(VISUAL[:, None] > 0, e, linear(t, "fc", torch.cat([e, h], -1)))
    drafter = load(put(tmp_path, config, t))
    assert drafter.method == "msd"
    want = through_layer(t, x, theta, torch.arange(len(VISUAL)))
    torch.testing.assert_close(run(drafter, e, h, VISUAL), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llava", "qwen"])
def test_what_flash_trained_is_an_eagle_drafter(tmp_path, family):
    config, t = flash(family)
    e, h = torch.randn(len(VISUAL), H), torch.randn(len(VISUAL), H)
    drafter = load(put(tmp_path, config, t))
    want = through_layer(t, linear(t, "fc", torch.cat([e, h], -1)), config.get("rope_theta", 1e4), torch.arange(len(e)))
    assert drafter.method == "eagle"
    torch.testing.assert_close(run(drafter, e, h, VISUAL), want, atol=1e-5, rtol=1e-4)


# -- which they are ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "tensors"),
    [(lambda: vispec("llava"), 17), (vispec, 22), (msd, 11), (lambda: msd("qwen"), 15)],
    ids=["ViSpec LLaVA", "ViSpec Qwen2.5-VL", "MSD LLaVA", "MSD Qwen2-VL"],
)
def test_as_many_tensors_as_published(tmp_path, made, tensors):
    config, t = made()
    assert len(t) == tensors
    drafter = load(put(tmp_path, config, t))
    assert drafter.config.kv_heads == config["num_key_value_heads"]
    wanted = sum(p.numel() for key, p in t.items() if key != "embed_tokens.weight")
    assert sum(p.numel() for p in drafter.parameters()) == wanted


@pytest.mark.parametrize("layout", ["msd", "eagle"])
@pytest.mark.parametrize("made", [eagle, msd, lambda: msd("qwen"), flash], ids=["eagle", "msd", "msd qwen", "flash"])
def test_the_layout_that_is_named_decides(tmp_path, made, layout):
    """MSD's tensors are EAGLE's, so that only config.json, or whoever loads them, can tell the two apart."""
    config, t = made()
    assert load(put(tmp_path, {**config, "rope_scaling": None}, t), layout=layout).method == layout


def test_published_shapes_of_drafts(tmp_path):
    shapes = [load(put(tmp_path / name, *PUBLISHED[name]())).options for name in ("vispec", "msd")]
    assert [(o.depth, o.width, o.size) for o in shapes] == [(4, 8, 30), (6, 10, 59)]


# -- strictly ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "gone", "extra"),
    [
        (vispec, "imadpt.v_proj.weight", "imadpt.norm.weight"),
        (vispec, "imadpt.k_proj.bias", "layers.0.input_layernorm.weight"),
        (vispec, "img_fc.weight", "norm.weight"),
        (nemo, "img_adaptor.query", "img_adaptor.q"),
        (lambda: vispec("llava"), "imadpt.o_proj.weight", "img_adaptor.o_proj.weight"),
        (msd, "fc.weight", "img_fc.weight"),
        (lambda: msd("qwen"), "layers.0.self_attn.q_proj.bias", "lm_head.weight"),
    ],
)
def test_missing_and_extra(tmp_path, made, gone, extra):
    config, t = made()
    t[extra] = t.pop(gone)
    with pytest.raises(ValueError, match=rf"missing: {gone}; extra: {extra}"):
        load(put(tmp_path, config, t), layout="msd" if gone == "fc.weight" else None)


def test_one_switch_of_the_authors_for_two_biases(tmp_path):
    config, t = vispec()
    bias, _ = t.pop("fc.bias"), t.pop("img_fc.bias")
    assert not load(put(tmp_path, {**config, "bias": False}, t)).img_fc.bias.any()
    with pytest.raises(ValueError, match=r"missing: img_fc\.bias; extra: none"):
        load(put(tmp_path, config, {**t, "fc.bias": bias}))


def test_a_table_that_was_padded_fits(tmp_path):
    """MSD's LLaVA has 32000 embeddings, that of transformers 32064; the target's own are read in any case."""
    config, t = msd()
    t["embed_tokens.weight"] = torch.randn(32000, H)
    drafter = load(put(tmp_path, {**config, "vocab_size": 32000}, t))
    assert drafter.config.vocab == 32000
    drafter.fit(replace(TARGET, vocab=32064), {})
    for vocab in (31999, 32768):
        with pytest.raises(ValueError, match=rf"vocabulary 32000 \(target: {vocab}\)"):
            drafter.fit(replace(TARGET, vocab=vocab), {})


# -- the files ---------------------------------------------------------------------------------------------------------


def test_zeros_that_a_file_lacks_have_its_type(tmp_path):
    config, t = nemo(normed=True)
    drafter = load(put(tmp_path, config, {key: tensor.half() for key, tensor in t.items()}))
    assert drafter.img_fc.bias.dtype == torch.float16 and not drafter.img_fc.bias.any()


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_from_the_hub(tmp_path, monkeypatch, file):
    """Only what is needed is fetched, and nothing of a frozen head beside the drafter is read."""
    import huggingface_hub

    there = put(tmp_path / "hub", *vispec(), file)
    save_file({"weight": torch.randn(V, H)}, there / "model_1.safetensors")
    here = tmp_path / "here"
    here.mkdir()

    def fetch(name, revision, allow_patterns):
        assert (name, revision) == ("JLKang/ViSpec-Qwen2.5-VL-7B-Instruct", "v1")
        for path in there.iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                (here / path.name).write_bytes(path.read_bytes())
        return str(here)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    drafter = mmspec.load_drafter("JLKang/ViSpec-Qwen2.5-VL-7B-Instruct", revision="v1", target="Qwen/Qwen2.5-VL")
    assert (drafter.method, drafter.config.target) == ("vispec", "Qwen/Qwen2.5-VL")
    assert sorted(path.name for path in here.iterdir()) == ["config.json", file]
