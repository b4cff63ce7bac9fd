"""Drafters in every published layout: read strictly, computed as published, written back, refused with the reason."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu, softmax

import mmspec
from mmspec.app import cli
from mmspec.checkpoints import files, save
from mmspec.checkpoints.layouts import LAYOUTS
from mmspec.config import SpecConfig
from mmspec.drafters.eagle import EagleConfig, EagleDrafter
from mmspec.drafters.ngram import NgramDrafter
from mmspec.registry import TargetInfo

H, HEADS, KV, D, MLP, V, V_D, L = 32, 4, 2, 8, 48, 61, 20, 9  # L: decoder layers of the target
TARGET = TargetInfo("somebody/target", V, H, H, L, torch.device("cpu"), torch.float32)
LLAMA = {
    "hidden_size": H, "intermediate_size": MLP, "num_attention_heads": HEADS, "num_key_value_heads": KV,
    "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "hidden_act": "silu", "vocab_size": V, "model_type": "llama",
}  # fmt: skip


def layer(prefix: str, reads: int) -> dict[str, torch.Tensor]:
    """A Llama layer's tensors as published, the attention reading `reads` columns."""
    shapes = {
        "self_attn.q_proj": (HEADS * D, reads), "self_attn.k_proj": (KV * D, reads), "self_attn.v_proj": (KV * D, reads),
        "self_attn.o_proj": (H, HEADS * D), "mlp.gate_proj": (MLP, H), "mlp.up_proj": (MLP, H), "mlp.down_proj": (H, MLP),
    }  # fmt: skip
    weights = {f"{prefix}.{name}.weight": torch.randn(shape) / 4 for name, shape in shapes.items()}
    return weights | {f"{prefix}.post_attention_layernorm.weight": 1 + torch.rand(H)}


def eagle() -> tuple[dict, dict]:
    tensors = {"fc.weight": torch.randn(H, 2 * H) / 4, "fc.bias": torch.randn(H), "embed_tokens.weight": torch.randn(V, H)}
    return LLAMA, tensors | layer("layers.0", H)


def eagle3(prefix: str = "midlayer") -> tuple[dict, dict]:
    tensors = {"fc.weight": torch.randn(H, 3 * H) / 4, "norm.weight": 1 + torch.rand(H)} | layer(prefix, 2 * H)
    tensors |= {f"{prefix}.{name}.weight": 1 + torch.rand(H) for name in ("input_layernorm", "hidden_norm")}
    ids = torch.randperm(V)[:V_D].sort().values
    mapping = {"d2t": ids - torch.arange(V_D), "t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)}
    return {**LLAMA, "draft_vocab_size": V_D}, {**tensors, "lm_head.weight": torch.randn(V_D, H), **mapping}


def speculators() -> tuple[dict, dict]:
    greedy = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {"name_or_path": "somebody/target", "architectures": ["LlavaForConditionalGeneration"]}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [greedy], "verifier": verifier,
        },
        "transformer_layer_config": {**LLAMA, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        "draft_vocab_size": V_D, "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": [1, 4, 7],
        "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
        "embed_requires_grad": False,
    }  # fmt: skip
    return config, {**eagle3("layers.0")[1], "embed_tokens.weight": torch.randn(V, H)}


PUBLISHED = {"eagle": eagle, "eagle3": eagle3, "speculators": speculators}


def put(folder: Path, config: dict, tensors: dict, file: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    save_file(tensors, folder / file) if file.endswith("safetensors") else torch.save(tensors, folder / file)
    return folder


def load(folder: Path, **options) -> EagleDrafter:
    return mmspec.load_drafter(folder, target=TARGET, **options)


def ours(**changes) -> EagleDrafter:
    c = {"hidden": H, "intermediate": MLP, "heads": HEADS, "kv_heads": KV, "vocab": V, "depth": 4, "width": 3, "size": 17}
    c |= {"target": "somebody/target", "target_revision": "abc", "norm_eps": 1e-5, "rope_theta": 1e6}
    drafter = EagleDrafter(EagleConfig(**{**c, **changes}))
    if drafter.lm_head is not None:
        drafter.draft_ids.copy_(torch.randperm(V)[: drafter.config.draft_vocab].sort().values)
    return drafter.eval()


THREE = {"features": (1, 4, 7), "parallel_norm": True, "fc_bias": False, "draft_vocab": V_D}


def same(a: EagleDrafter, b: EagleDrafter) -> None:
    assert a.config == b.config
    assert a.state_dict().keys() == b.state_dict().keys()
    for key, tensor in a.state_dict().items():
        assert tensor.dtype == b.state_dict()[key].dtype
        assert torch.equal(tensor, b.state_dict()[key]), key


# -- the published forwards, in plain PyTorch ----------------------------------------------------------------------------


def norm(x, weight):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def turn(x, theta):
    """Rotary positions 0 … n−1 for [n, heads, D], halves convention."""
    angle = torch.outer(torch.arange(len(x)).float(), 1 / theta ** (torch.arange(0, D, 2).float() / D))
    cos, sin = (torch.cat([f(angle), f(angle)], -1)[:, None] for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin


def decoder_layer(t, prefix, x, residual, theta):
    """Causal attention over rows x [n, ·] with grouped heads, then a gated MLP; `residual` [n, H] is added to."""

    def project(name, x):
        return x @ t[f"{prefix}.{name}_proj.weight"].T + t.get(f"{prefix}.{name}_proj.bias", torch.zeros(1))

    n = len(x)
    q, k, v = (project(f"self_attn.{name}", x).view(n, -1, D) for name in "qkv")
    q, k = turn(q, theta), turn(k, theta)
    heads = []
    for head in range(HEADS):
        group = head // (HEADS // KV)
        scores = (q[:, head] @ k[:, group].T / math.sqrt(D)).masked_fill(~torch.ones(n, n).tril().bool(), -math.inf)
        heads.append(softmax(scores, -1) @ v[:, group])
    x = residual + project("self_attn.o", torch.cat(heads, -1))
    y = norm(x, t[f"{prefix}.post_attention_layernorm.weight"])
    return x + project("mlp.down", silu(project("mlp.gate", y)) * project("mlp.up", y))


def run(drafter: EagleDrafter, embeds, features):
    return drafter(embeds[None], features[None], torch.ones(1, len(embeds), dtype=torch.bool), 1)[0][0]


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
    assert torch.equal(drafter.to_target(best), best + t["d2t"][best])
    assert drafter.config.features == ((2, 4, 6) if layout == "eagle3" else (1, 4, 7))
    assert drafter.config.target == ("" if layout == "eagle3" else "somebody/target")


# -- what the files say --------------------------------------------------------------------------------------------------


def test_shapes_come_from_the_tensors(tmp_path):
    config, t = eagle()
    c = load(put(tmp_path, {**config, "num_key_value_heads": 4, "intermediate_size": 7, "vocab_size": 5}, t)).config
    assert (c.kv_heads, c.intermediate, c.vocab, c.head_dim, c.rope_theta) == (KV, MLP, V, 0, 10000.0)


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
    assert torch.equal(load(put(tmp_path, config, t)).draft_ids, torch.arange(V))
    t["lm_head.weight"] = torch.randn(V - 1, H)
    with pytest.raises(ValueError, match="missing: d2t; extra: none"):
        load(put(tmp_path, config, t))


@pytest.mark.parametrize("kind", ["pytorch_model.bin", "single file", "shards", "beside a frozen head"])
def test_files_it_can_lie_in(tmp_path, kind):
    config, t = eagle()
    if kind == "pytorch_model.bin":
        path = put(tmp_path, config, t, "pytorch_model.bin")
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


# -- there and back ------------------------------------------------------------------------------------------------------


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
    drafter.save_pretrained(tmp_path / "a")
    first = EagleDrafter.from_pretrained(tmp_path / "a")
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
    missing = config.keys() - said.keys() - {"speculators_version", "fc_norm", "norm_output"}
    assert not missing, missing
    inner = said.get("transformer_layer_config", said)
    assert {key: inner[key] for key in LLAMA} == LLAMA


def test_speculators_can_build_its_layer_from_our_config(tmp_path):
    """The inner config makes a transformers config with the same rotary base, in the versions that moved it too."""
    from transformers import LlamaConfig

    save.save_drafter(ours(**THREE), tmp_path, "speculators")
    inner = LlamaConfig(**json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"])
    assert inner.rope_parameters["rope_theta"] == 1e6 and inner.head_dim == D


def test_card(tmp_path):
    save.save_drafter(ours(), tmp_path)
    text = (tmp_path / "README.md").read_text()
    for part in ('base_model: "somebody/target"', "- speculative-decoding", "- eagle", "library_name: mmspec", "| 4 | 3 | 17 |"):
        assert part in text
    (tmp_path / "README.md").write_text("mine")
    save.save_drafter(ours(), tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    save.save_drafter(ours(target="/home/me/target"), tmp_path / "local")
    assert "base_model" not in (tmp_path / "local" / "README.md").read_text()


def test_a_failed_write_leaves_what_stood(tmp_path, monkeypatch):
    save.save_drafter(ours(), tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(save, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        save.save_drafter(ours(), tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("layout", "changes", "reason"),
    [
        ("eagle", THREE, "parallel_norm is True"),
        ("eagle3", {}, "it has no output head of its own"),
        ("eagle3", {**THREE, "norm_residual": True}, "norm_residual is True"),
        ("speculators", {**THREE, "qkv_bias": True}, "qkv_bias is True"),
        ("vispec", {}, "unknown layout 'vispec'; choose from mmspec, eagle, eagle3, speculators"),
    ],
)
def test_layouts_that_cannot_hold_it(tmp_path, layout, changes, reason):
    with pytest.raises(ValueError, match=reason):
        save.save_drafter(ours(**changes), tmp_path / "new", layout)
    assert not (tmp_path / "new").exists()


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
            calls["files"] = sorted(p.name for p in Path(folder_path).iterdir() if p.name not in (ignore_patterns or ()))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert ours().push_to_hub("me/drafter", token="t") == "https://huggingface.co/me/drafter"
    assert calls == {"token": "t", "files": ["README.md"] * (not has_card) + ["config.json", "model.safetensors"]}


# -- refused with the reason ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", PUBLISHED)
def test_missing_and_extra(tmp_path, layout):
    config, t = PUBLISHED[layout]()
    prefix = "midlayer" if layout == "eagle3" else "layers.0"
    t["stranger.weight"] = t.pop(f"{prefix}.mlp.up_proj.weight")
    with pytest.raises(ValueError, match=rf"missing: {prefix}.mlp.up_proj.weight; extra: stranger.weight"):
        load(put(tmp_path, config, t))


def test_missing_and_extra_of_our_own(tmp_path):
    save.save_drafter(ours(), tmp_path)
    t = load_file(tmp_path / "model.safetensors")
    t["stranger"] = t.pop("block.out.weight").clone()
    save_file(t, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="missing: block.out.weight; extra: stranger"):
        load(tmp_path)


def test_one_bias_of_three(tmp_path):
    config, t = eagle()
    t["layers.0.self_attn.k_proj.bias"] = torch.zeros(KV * D)
    with pytest.raises(ValueError, match=r"missing: layers.0.self_attn.q_proj.bias, layers.0.self_attn.v_proj.bias; extra: n"):
        load(put(tmp_path, config, t))


@pytest.mark.parametrize(
    ("key", "tensor", "reason"),
    [
        ("layers.0.self_attn.v_proj.weight", torch.zeros(5, H), r"v_proj.weight is \[5, 32\], expected \[16, 32\]"),
        ("layers.0.mlp.down_proj.weight", torch.zeros(H, 9), r"down_proj.weight is \[32, 9\], expected \[32, 48\]"),
        ("layers.0.self_attn.k_proj.weight", torch.zeros(5, H), "k_proj.weight 5"),
        ("layers.0.self_attn.q_proj.weight", torch.zeros(33, H), "q_proj.weight has 33 rows"),
        ("fc.weight", torch.zeros(H, 5), r"fc.weight is \[32, 5\]"),
        ("fc.weight", torch.zeros(H), r"fc.weight has the shape \[32\]"),
        ("fc.bias", torch.zeros(H, dtype=torch.int8), "fc.bias holds torch.int8, expected floats"),
    ],
)
def test_wrong_shapes(tmp_path, key, tensor, reason):
    config, t = eagle()
    with pytest.raises(ValueError, match=reason):
        load(put(tmp_path, config, {**t, key: tensor}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"d2t": torch.arange(V_D) + V}, "token ids from 61 to 99, outside the vocabulary of 61; it must hold offsets"),
        ({"d2t": torch.zeros(V_D, dtype=torch.long), "t2d": torch.zeros(V, dtype=torch.bool)}, "d2t and t2d disagree"),
        ({"d2t": torch.zeros(3, dtype=torch.long)}, r"d2t is \[3\], expected \[20\]"),
        ({"d2t": torch.zeros(V_D)}, "d2t holds torch.float32, expected int64"),
        ({"embed_tokens.weight": torch.zeros(V, 16)}, "an embedding of its own"),
    ],
)
def test_wrong_maps(tmp_path, change, reason):
    config, t = eagle3()
    with pytest.raises(ValueError, match=reason):
        load(put(tmp_path, config, {**t, **change}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"norm_before_fc": True}, "a norm of the target's features before fc"),
        ({"fc_norm": True}, "a norm of each of the target's features"),
        ({"norm_output": True}, "output features that are normed"),
        ({"embed_requires_grad": True}, "embeddings of its own"),
        ({"speculators_model_type": "dflash"}, "the method 'dflash' of speculators"),
        ({"transformer_layer_config": {**LLAMA, "num_hidden_layers": 2}}, "more than one decoder layer"),
        ({"transformer_layer_config": {**LLAMA, "hidden_act": "gelu"}}, "another activation than silu"),
        ({"transformer_layer_config": {**LLAMA, "rope_scaling": {"rope_type": "llama3"}}}, "scaled by 'llama3'"),
        ({"transformer_layer_config": {**LLAMA, "layer_types": ["sliding_attention"]}}, "sliding window"),
        ({"transformer_layer_config": [1]}, "transformer_layer_config in config.json must be an object"),
        ({"transformer_layer_config": {**LLAMA, "num_attention_heads": "4"}}, "must give num_attention_heads"),
    ],
)
def test_networks_that_we_do_not_have(tmp_path, change, reason):
    config, t = speculators()
    with pytest.raises(ValueError, match=reason):
        load(put(tmp_path, {**config, **change}, t))


def test_norms_of_queries_are_named(tmp_path):
    config, t = speculators()
    with pytest.raises(ValueError, match="norms of the queries and keys"):
        load(put(tmp_path, config, {**t, "layers.0.self_attn.q_norm.weight": torch.ones(D)}))


def test_mrope_is_read_with_a_warning(tmp_path):
    config, t = eagle()
    folder = put(tmp_path, {**config, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, t)
    with pytest.warns(UserWarning, match="M-RoPE"):
        load(folder)


@pytest.mark.parametrize(
    ("config", "key", "reason"),
    [
        ({}, "imadpt.q", "a vispec drafter .*not available yet"),
        ({}, "img_adaptor.query", "a vispec drafter .*not available yet"),
        ({"model_type": "qwen2_vl"}, "layers.0.input_layernorm.weight", "a msd drafter .*not available yet"),
    ],
)
def test_methods_that_come_later(tmp_path, config, key, reason):
    base, t = eagle()
    folder = put(tmp_path, {**base, **config}, {**t, key: torch.ones(H)})
    with pytest.raises(ValueError, match=reason):
        load(folder)
    if config:
        assert load(folder, layout="eagle").config.input_norm


def test_unknown_layouts(tmp_path):
    folder = put(tmp_path, {}, {"weight": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"no known drafter layout fits these tensors \(weight\)"):
        load(folder)
    with pytest.raises(ValueError, match="unknown layout 'medusa'; choose from mmspec"):
        load(folder, layout="medusa")


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_that_runs_code(tmp_path):
    config, t = eagle()
    proof = tmp_path / "ran"
    put(tmp_path, config, {})
    (tmp_path / "model.safetensors").unlink()
    torch.save({**t, "evil": Evil(proof)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="allow_pickle=True"):
        load(tmp_path)
    assert not proof.exists()
    with pytest.raises(ValueError, match="a dict of nothing but tensors"):
        load(tmp_path, allow_pickle=True)
    assert proof.exists()


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kept", [0, 5, 900])
def test_cut_short(tmp_path, file, kept):
    path = put(tmp_path, *eagle(), file) / file
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=f"{file} is damaged"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("index", "error", "reason"),
    [
        ({"weight_map": {"a": "../other.safetensors"}}, ValueError, "must name files of the same folder"),
        ({"weight_map": 3}, ValueError, "must name files of the same folder"),
        ({"weight_map": {"a": "model-00001-of-00001.safetensors"}}, FileNotFoundError, "does not hold"),
    ],
)
def test_broken_shards(tmp_path, index, error, reason):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / files.INDEX).write_text(json.dumps(index))
    with pytest.raises(error, match=reason):
        load(tmp_path)


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config.json, which a drafter needs; it holds nothing"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        load(tmp_path)
    for name in (tmp_path / "nowhere", "nowhere", "./no/where"):
        with pytest.raises(FileNotFoundError, match="there is no folder or file"):
            load(name)
    with pytest.raises(FileNotFoundError, match="'no/where' is neither a folder here nor could it be fetched"):
        load("no/where", revision="v1")


@pytest.mark.parametrize(("text", "reason"), [("{", "not JSON"), ("[]", "holds a list"), ("\xff", "not JSON"), ("", "not JSON")])
def test_broken_config(tmp_path, text, reason):
    put(tmp_path, *eagle())
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=reason):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mmspec": {"method": "flash"}}, "the method 'flash'"),
        ({"hidden": 0}, "hidden = 0"),
        ({"surprise": 1}, "unknown fields surprise"),
    ],
)
def test_broken_config_of_our_own(tmp_path, change, reason):
    save.save_drafter(ours(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=reason):
        load(tmp_path)


@pytest.mark.parametrize("layout", PUBLISHED)
def test_fit(tmp_path, layout):
    drafter = load(put(tmp_path, *PUBLISHED[layout]()))
    assert drafter.fit(TARGET, SpecConfig(depth=2)).options.depth == 2
    other = TargetInfo("another/target", V + 3, H + 8, H + 8, 5, torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match=r"does not fit another/target: hidden size 32 \(target: 40\), vocabulary 61"):
        drafter.fit(other, SpecConfig())


# -- the command ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_convert(tmp_path, capsys, layout):
    source = put(tmp_path / "a", *(eagle() if layout == "eagle" else speculators()))
    words = ["convert", str(source), str(tmp_path / "b"), "--layout", layout, "--target", "me/other"]
    assert cli.main(words) == 0
    assert "target: me/other" in capsys.readouterr().out
    same(mmspec.load_drafter(source, target="me/other"), mmspec.load_drafter(tmp_path / "b"))
    assert cli.main(words) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert cli.main([*words, "--overwrite"]) == 0


def test_convert_says_what_is_wrong(tmp_path, capsys):
    assert cli.main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "b")]) == 1
    assert "mmspec convert: there is no folder" in capsys.readouterr().err
    assert cli.main(["convert", str(put(tmp_path / "a", *eagle())), str(tmp_path / "b"), "--layout", "eagle3"]) == 1
    assert "cannot hold this drafter" in capsys.readouterr().err
