"""EAGLE drafters as they are trained for vision-language models: positions on three axes, more norms, mask rows."""

from dataclasses import replace
from types import SimpleNamespace as Some

import pytest
import tiny_vlms
import torch
import transformers as T
from published_drafters import (
    HEADS,
    TARGET,
    V_D,
    D,
    H,
    V,
    decoder_layer,
    eagle,
    eagle3,
    layer,
    load,
    norm,
    put,
    run,
    speculators,
)
from safetensors.torch import load_file
from transcribed_drafters import round_of, session_of
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3

import mmspec
from mmspec.drafters.blocks import Rope, rotate
from mmspec.drafters.eagle import EagleConfig, EagleDrafter
from mmspec.drafters.shape import Shape
from mmspec.pipelines.untrained import build
from mmspec.types import Prompt


@pytest.mark.parametrize("said", [
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16, "truncate": False,
     "original_max_position_embeddings": 128},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5},
])  # fmt: skip
def test_scaled_positions_are_those_of_transformers(tmp_path, said):
    config, t = eagle3()
    theta = {"rope_theta": 5e5}
    drafter = load(put(tmp_path, {**config, "rope_parameters": {**theta, **said}}, t))
    theirs = T.LlamaConfig(hidden_size=H, num_attention_heads=HEADS, rope_parameters={**theta, **said})
    want, gain = ROPE_INIT_FUNCTIONS[said["rope_type"]](theirs, torch.device("cpu"))
    c = drafter.config
    torch.testing.assert_close(c.frequencies(c.turned(D), torch.device("cpu")), want)
    assert c.rope_gain == pytest.approx(gain)
    mmspec.save_drafter(drafter, tmp_path / "again", layout="eagle3")
    assert load(tmp_path / "again").config == c


def test_a_new_drafter_has_the_base_of_layers_without_a_window():
    assert build("eagle", tiny_vlms.model("gemma3")).config.rope_theta == 1e6  # 1e4 within windows


def test_the_rest_of_a_head_stays():
    x, places = torch.randn(2, 3, 5, 16), torch.arange(5)[None]
    found = rotate(x, places, Rope(rope_share=0.25))
    assert torch.equal(found[..., 4:], x[..., 4:])
    torch.testing.assert_close(found[..., :4], rotate(x[..., :4], places, Rope()))


@pytest.mark.parametrize("interleaved", [False, True])
def test_three_axes_turn_as_in_the_target(interleaved):
    sections, width = [4, 2, 2], 16
    places = torch.randint(0, 50, (3, 2, 7))
    x = torch.randn(2, 3, 7, width)
    said = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": width, "rope_parameters": said}
    made = (qwen3.Qwen3VLTextConfig if interleaved else qwen2.Qwen2_5_VLTextConfig)(**sizes)
    module = qwen3.Qwen3VLTextRotaryEmbedding if interleaved else qwen2.Qwen2_5_VLRotaryEmbedding
    cos, sin = module(made)(x, places)
    want, _ = (qwen3 if interleaved else qwen2).apply_rotary_pos_emb(x, x, cos, sin)
    ours = Rope(mrope=tuple(sections), mrope_interleaved=interleaved)
    torch.testing.assert_close(rotate(x, places.permute(1, 2, 0), ours), want)
    alike = places[:1].expand(3, -1, -1)
    torch.testing.assert_close(rotate(x, alike.permute(1, 2, 0), ours), rotate(x, places[0], ours))


# -- networks ----------------------------------------------------------------------------------------------------------


def normed(kind: str) -> tuple[dict, dict]:
    """As speculators writes EAGLE-3.1, a drafter for gpt-oss, and P-EAGLE of three layers."""
    config, t = speculators()
    if kind == "eagle3.1":
        return {**config, "fc_norm": True, "norm_output": True}, {
            **t, **{f"fc_norm.{i}.weight": 1 + torch.rand(H) for i in range(3)}
        }  # fmt: skip
    if kind == "gpt-oss":
        return {**config, "norm_before_fc": True}, {**t, "input_norm.weight": 1 + torch.rand(3 * H)}
    inner = {**config["transformer_layer_config"], "num_hidden_layers": 3}
    for i in (1, 2):
        t |= layer(f"layers.{i}", H) | {f"layers.{i}.input_layernorm.weight": 1 + torch.rand(H)}
    own = {"speculators_model_type": "peagle", "transformer_layer_config": inner, "mask_token_id": 3}
    return {**config, **own}, {**t, "mask_hidden": torch.randn(1, 1, 3 * H)}


@pytest.mark.parametrize("kind", ["eagle3.1", "gpt-oss"])
def test_norms_compute_as_published(tmp_path, kind):
    config, t = normed(kind)
    drafter = load(put(tmp_path, config, t))
    e, h = torch.randn(7, H), torch.randn(7, 3 * H)
    if kind == "gpt-oss":
        read = norm(h, t["input_norm.weight"])
    else:
        read = torch.cat([norm(part, t[f"fc_norm.{i}.weight"]) for i, part in enumerate(h.chunk(3, -1))], -1)
    x = read @ t["fc.weight"].T
    both = torch.cat([norm(e, t["layers.0.input_layernorm.weight"]), norm(x, t["layers.0.hidden_norm.weight"])], -1)
    z = decoder_layer(t, "layers.0", both, x, 5e5)
    out = norm(z, t["norm.weight"])
    torch.testing.assert_close(run(drafter, e, h), z if kind == "gpt-oss" else out, atol=1e-5, rtol=1e-4)
    logits = drafter.logits(run(drafter, e, h), None)
    torch.testing.assert_close(logits, out @ t["lm_head.weight"].T, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["eagle3.1", "gpt-oss", "peagle"])
def test_written_as_published(tmp_path, kind):
    config, t = normed(kind)
    first = load(put(tmp_path / "a", config, t))
    mmspec.save_drafter(first, tmp_path / "b", layout="speculators")
    written = load_file(tmp_path / "b" / "model.safetensors")
    assert written.keys() == t.keys() - {"embed_tokens.weight"}
    assert all(torch.equal(written[key], t[key]) for key in written)
    assert load(tmp_path / "b").config == first.config


def test_mask_rows_draft_in_one_pass(tmp_path):
    """P-EAGLE's three layers, against the same rows in one forward written out."""
    config, t = normed("peagle")
    drafter = load(put(tmp_path, config, t)).fit(TARGET, {"depth": 4, "width": 1})
    table, n = torch.randn(V, H), 6
    target = Some(embed=lambda ids: table[ids], streams=1)
    ids, h = torch.randint(0, V, (1, n)), torch.randn(1, n, 3 * H)
    prompt = Prompt(ids, table[ids], h, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    session = session_of([11])
    session.memory = drafter.start(session, target, prompt)
    session.last = round_of(ids[:, -1:], h[:, -1:], (1,), session.pending)
    got = drafter.propose(session, target).tokens[0, 1:]

    masks = t["mask_hidden"][0].expand(3, -1)
    e = torch.cat([table[torch.cat([ids[0, 1:], session.pending])], table[torch.full((3,), 3)]])
    x = torch.cat([h[0], masks]) @ t["fc.weight"].T
    both = torch.cat([norm(e, t["layers.0.input_layernorm.weight"]), norm(x, t["layers.0.hidden_norm.weight"])], -1)
    z = decoder_layer(t, "layers.0", both, x, 5e5)
    for i in (1, 2):
        z = decoder_layer(t, f"layers.{i}", norm(z, t[f"layers.{i}.input_layernorm.weight"]), z, 5e5)
    best = (norm(z, t["norm.weight"]) @ t["lm_head.weight"].T)[n - 1 :].argmax(-1)
    assert torch.equal(got, best + t["d2t"][best])


# -- outputs -----------------------------------------------------------------------------------------------------------


def made(**changes) -> EagleDrafter:
    """A random EAGLE-3 drafter for the tiny targets."""
    torch.manual_seed(0)
    c = EagleConfig(
        hidden=tiny_vlms.HIDDEN, intermediate=64, heads=4, kv_heads=2, vocab=tiny_vlms.VOCAB, features=(1, 2),
        parallel_norm=True, fc_bias=False, draft_vocab=V_D, shape=Shape(3, 3, 9),
    )  # fmt: skip
    drafter = EagleDrafter(replace(c, **changes)).eval().requires_grad_(False)
    drafter.head.ids.copy_(torch.randperm(tiny_vlms.VOCAB)[:V_D].sort().values)
    return drafter


NETWORKS = {
    "sectioned": {"mrope": (2, 3, 3)},
    "interleaved": {"mrope": (4, 2, 2), "mrope_interleaved": True},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "gpt-oss": {"norm_before_fc": True, "rope_kind": "yarn", "rope_factor": 4.0, "rope_trained": 64},
    "P-EAGLE": {"layers": 3, "parallel": True, "mask_token": 3},
    "P-EAGLE, chain": {"layers": 2, "parallel": True, "mask_token": 3, "shape": Shape.chain(3)},
    "two layers": {"layers": 2},
}


def test_positions_are_the_targets_own(monkeypatch):
    """The rows of an image turn with its height and width, and the next row goes on where the target does."""
    model, seen = tiny_vlms.model("qwen2_5_vl"), []
    inputs, drafter = tiny_vlms.prompt("qwen2_5_vl", "several images"), made(mrope=(2, 3, 3))
    own, start = EagleDrafter.encode_prompt, EagleDrafter.start
    monkeypatch.setattr(EagleDrafter, "encode_prompt", lambda self, *a: seen.append(a[4]) or own(self, *a))

    def began(self, *a):
        memory = start(self, *a)
        seen.append(memory.positions.clone())
        return memory

    monkeypatch.setattr(EagleDrafter, "start", began)
    told, _ = model.model.get_rope_index(
        inputs["input_ids"], mm_token_type_ids=inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"],
        attention_mask=inputs["attention_mask"],
    )  # fmt: skip
    with mmspec.enable(model, drafter=drafter):
        tiny_vlms.generate(model, inputs, max_new_tokens=4)
    assert torch.equal(seen[0], told[:, :, :-1].permute(1, 2, 0))
    assert torch.equal(seen[1], told[0, :, -1])


def test_trees_that_the_authors_use(tmp_path):
    c = load(put(tmp_path, *eagle())).config
    assert c.shape == Shape(6, 8, 63)


def test_an_eagle_file_for_qwen2_vl_is_no_msd(tmp_path):
    """Only MSD's layer for Qwen2-VL has a norm before its attention."""
    config, t = eagle()
    folder = put(tmp_path / "a", {**config, "model_type": "qwen2_vl"}, t)
    assert load(folder).method == "eagle"
    t["layers.0.input_layernorm.weight"] = 1 + torch.rand(H)
    assert load(put(tmp_path / "b", {**config, "model_type": "qwen2_vl"}, t)).method == "msd"
