"""Checkpoints that are refused: damaged, incomplete, dangerous, of a network or a method that is not there."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from published_drafters import KV, LLAMA, PUBLISHED, TARGET, V_D, D, H, V, eagle, eagle3, load, ours, put, speculators
from safetensors.torch import load_file, save_file

from mmspec.app.devices import EngineError, find_model
from mmspec.checkpoints import files, save
from mmspec.drafters.eagle import EagleConfig
from mmspec.pipelines.drafters import mtp_files
from mmspec.protocols import TargetInfo


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
    with pytest.raises(ValueError, match=r"missing: block\.out\.weight; extra: stranger"):
        load(tmp_path)


def flat(**change) -> dict:
    """A change of the layer's settings, as speculators nests them."""
    return {"transformer_layer_config": {**LLAMA, **change}}


ROWS = torch.zeros(V_D, dtype=torch.long)


@pytest.mark.parametrize(
    ("published", "said", "tensors", "reason"),
    [
        (eagle, {}, {"layers.0.self_attn.k_proj.bias": torch.zeros(KV * D)},
         r"missing: layers.0.self_attn.q_proj.bias, layers.0.self_attn.v_proj.bias; extra: n"),
        (eagle, {}, {"layers.0.self_attn.v_proj.weight": torch.zeros(5, H)},
         r"v_proj.weight is \[5, 32\], expected \[16, 32\]"),
        (eagle, {}, {"layers.0.mlp.down_proj.weight": torch.zeros(H, 9)},
         r"down_proj.weight is \[32, 9\], expected \[32, 48\]"),
        (eagle, {}, {"layers.0.self_attn.k_proj.weight": torch.zeros(5, H)}, "k_proj.weight 5"),
        (eagle, {}, {"layers.0.self_attn.q_proj.weight": torch.zeros(33, H)}, "q_proj.weight has 33 rows"),
        (eagle, {}, {"fc.weight": torch.zeros(H, 5)}, r"fc.weight is \[32, 5\]"),
        (eagle, {}, {"fc.weight": torch.zeros(H)}, r"fc.weight has the shape \[32\]"),
        (eagle, {}, {"fc.bias": torch.zeros(H, dtype=torch.int8)}, "fc.bias holds torch.int8, expected floats"),
        (eagle3, {}, {"d2t": torch.arange(V_D) + V},
         "token ids from 61 to 99, outside the vocabulary of 61; it must hold offsets"),
        (eagle3, {}, {"d2t": ROWS, "t2d": torch.zeros(V, dtype=torch.bool)}, "d2t and t2d disagree"),
        (eagle3, {}, {"d2t": ROWS[:3]}, r"d2t is \[3\], expected \[20\]"),
        (eagle3, {}, {"d2t": torch.zeros(V_D)}, "d2t holds torch.float32, expected int64"),
        (eagle3, {}, {"embed_tokens.weight": torch.zeros(V, 16)}, "its own embedding"),
        (speculators, {"norm_before_fc": True}, {}, r"missing: input_norm\.weight"),
        (speculators, {"fc_norm": True}, {}, r"missing: fc_norm\.0\.weight, fc_norm\.1\.weight, fc_norm\.2\.weight"),
        (speculators, {"embed_requires_grad": True}, {}, "its own embeddings"),
        (speculators, {"speculators_model_type": "mlp"}, {}, "the method 'mlp' of speculators"),
        (speculators, {"speculators_model_type": "peagle"}, {}, "missing: mask_hidden|mask_token"),
        (speculators, flat(num_hidden_layers=2), {}, r"missing: layers\.1\.input_layernorm"),
        (speculators, flat(hidden_act="gelu"), {}, "another activation than silu"),
        (speculators, flat(rope_scaling={"rope_type": "longrope"}), {}, "scaled by 'longrope'"),
        (speculators, flat(rope_scaling={"mrope_section": [16, 24, 24]}), {}, "must add up to 4"),
        (speculators, flat(layer_types=["sliding_attention"]), {}, "sliding window"),
        (speculators, flat(rope_parameters={"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}}), {},
         r"values for each type of layer \(full_attention, sliding_attention\)"),
        (speculators, {"transformer_layer_config": [1]}, {}, "_layer_config in config.json must be an object"),
        (speculators, flat(num_attention_heads="4"), {}, "must give num_attention_heads"),
        (speculators, {}, {"layers.0.self_attn.q_norm.weight": torch.ones(D)}, "norms of the queries and keys"),
        *((eagle, {name: True}, {}, "mmspec's network does not support that") for name in (
            "norm_before_fc", "fc_norm", "norm_output")),
        *((PUBLISHED["vispec"], {}, {name: torch.zeros(shape)}, reason) for name, shape, reason in (
            ("imadpt.q", (3, 4, 9), r"imadpt.q is \[3, 4, 9\], expected \[3, 4, 8\]"),
            ("imadpt.q", (), "num_q"),
            ("imadpt.k_proj.weight", (16, H), r"imadpt.k_proj.weight is \[16, 32\], expected \[32, 32\]"),
            ("img_fc.weight", (H, H), r"img_fc.weight is \[32, 32\], expected \[32, 64\]"))),
        (eagle, {"caption_dim": 2048, "input_type": "t2i"}, {},
         r"LANTERN's drafters for LlamaGen .*by row and column in interleaved pairs"),
    ],
)  # fmt: skip
def test_what_a_file_may_not_hold(tmp_path, published, said, tensors, reason):
    config, t = published()
    with pytest.raises(ValueError, match=reason):
        load(put(tmp_path, {**config, **said}, {**t, **tensors}))


def test_mrope_is_read_with_a_warning(tmp_path):
    config, t = eagle()
    folder = put(tmp_path, {**config, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, t)
    with pytest.warns(UserWarning, match="M-RoPE"):
        load(folder)


def test_unknown_layouts(tmp_path):
    folder = put(tmp_path, {}, {"weight": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"no known drafter layout fits these tensors \(weight\)"):
        load(folder)
    with pytest.raises(ValueError, match=r"unknown layout 'medusa'; choose from mmspec, .*, eagle"):
        load(folder, layout="medusa")


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_that_runs_code(tmp_path):
    config, t = eagle()
    proof = tmp_path / "ran"
    (tmp_path / "config.json").write_text(json.dumps(config))
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
    with pytest.raises(FileNotFoundError, match="'no/where' is not a local folder, and could not be downloaded"):
        load("no/where", revision="v1")
    for name in ("misspelt", "./owner", "../name", "/owner", "owner/", "a/b/c"):  # of a model
        with pytest.raises(EngineError, match="no folder"):
            find_model(name)


DEEP = "[" * 100_000
TOO_DEEP = r"config.json is nested too deeply"


@pytest.mark.parametrize(
    ("text", "reason"), [("{", "not JSON"), ("[]", "holds a list"), ("\xff", "not JSON"), ("", "not JSON"),
                         (DEEP, TOO_DEEP), ('{"a": ' + DEEP, TOO_DEEP)], ids=range(6)
)  # fmt: skip
def test_broken_config(tmp_path, text, reason):
    put(tmp_path, *eagle())
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=reason):
        load(tmp_path)


def changed(folder: Path, **change) -> Path:
    """A drafter in our own layout, whose config says something else."""
    save.save_drafter(ours(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    return folder


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mmspec": {"method": "medusa"}}, "the method 'medusa', which this version does not have"),
        ({"mmspec": {"method": "ngram"}},
         r"the method 'ngram', .*it has \['eagle', 'heads', 'block', 'vispec', 'msd', 'flash', 'specvlm'\]"),
        ({"hidden": 0}, "hidden = 0"),
        ({"surprise": 1}, "unknown fields surprise"),
        *(({"features": odd}, r"features is .*, expected a list of 1 to 64 whole numbers from -1")
          for odd in ([-7], [-1, -2], [])),
    ],
)  # fmt: skip
def test_broken_config_of_our_own(tmp_path, change, reason):
    with pytest.raises(ValueError, match=reason):
        load(changed(tmp_path, **change))


@pytest.mark.parametrize(
    "junk", [b"junk", b"\x80\x02junk.", b"PK\x03\x04junk", b"\x80\x02}q\x00.", b"cos\nsystem\n.", bytes(999)]
)
def test_junk_in_place_of_weights(tmp_path, junk):
    folder = put(tmp_path, *eagle(), "pytorch_model.bin")
    (folder / "pytorch_model.bin").write_bytes(junk)
    with pytest.raises(ValueError, match=r"pytorch_model.bin (is damaged|holds more than tensors)"):
        load(tmp_path)


def test_a_file_that_declares_more_than_it_holds(tmp_path):
    config, t = eagle()
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({**t, "fc.weight": torch.zeros(1).expand(H, 2**40)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"larger than the file: \['fc.weight'\]"):
        load(tmp_path)


@pytest.mark.parametrize("odd", [3, None, ["a"], {"a": 1}, 0.5, True])
def test_odd_names_of_layouts_methods_and_shards(tmp_path, odd):
    save.save_drafter(ours(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key, told in (("layout", "mmspec.layout in config.json must be"), ("method", "names the method")):
        changed = {**config, "mmspec": {**config["mmspec"], key: odd}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=told):
            load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / files.INDEX).write_text(json.dumps({"weight_map": {"a": odd, "b": "x.safetensors"}}))
    with pytest.raises(ValueError, match="must name files of the same folder, as strings"):
        load(tmp_path)


@pytest.mark.parametrize("layout", ["mmspec", "speculators"])
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_tensors_of_eight_bits(tmp_path, layout, kind):
    if layout == "mmspec":
        save.save_drafter(ours(), tmp_path)
    else:
        put(tmp_path, *speculators())
    t = load_file(tmp_path / "model.safetensors")
    t["fc.weight"] = t["fc.weight"].to(getattr(torch, kind))
    save_file(t, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"fc.weight holds torch.{kind}, expected float32, bfloat16 or float16"):
        load(tmp_path)


NUMBERS = [name for name, one in EagleConfig.usual().items() if one is dataclasses.MISSING or type(one) in (int, float)]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("odd", ["4", "many", 10**30, -1, 1e400, [4], {"a": 4}, True])
def test_numbers_of_our_own_config(tmp_path, name, odd):
    reason = rf"config.json.*{name} (=|is|must be) .*" if name != "norm_eps" else "norm_eps is"
    with pytest.raises(ValueError, match=reason):
        load(changed(tmp_path, **{name: odd}))


@pytest.mark.parametrize("name, most", [("depth", 128), ("width", 256), ("size", 4096)])
def test_recommendations_that_would_run_for_ever(tmp_path, name, most):
    theirs, t = speculators()
    own = {"mmspec": {"layout": "speculators", name: 20_000}}
    for folder in (changed(tmp_path, **{name: 20_000}), put(tmp_path / "theirs", {**theirs, **own}, t)):
        reason = f"config.json: {name} must be a whole number from 1 to {most}, .*; got 20000"
        with pytest.raises(ValueError, match=reason):
            load(folder)


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta", "head_dim", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("odd", ["many", [4], 10**30, -2])
def test_text_in_numeric_fields_of_others(tmp_path, name, odd):
    config, t = eagle()
    t.pop("embed_tokens.weight")  # so that vocab_size counts
    with pytest.raises(ValueError, match=r"config\.json|expected"):
        load(put(tmp_path, {**config, name: odd}, t))


@pytest.mark.parametrize("odd", ["2", 5, {"a": 1}, [[1]], ["2", "4", "7"], list(range(99))])
def test_odd_lists_of_layers(tmp_path, odd):
    (config, t), listed = eagle3(), {"eagle_aux_hidden_state_layer_ids": odd}
    for change in (listed, {"eagle_config": listed}):
        with pytest.raises(ValueError, match=r"eagle_aux_hidden_state_layer_ids in config.json must list"):
            load(put(tmp_path, {**config, **change}, t))


@pytest.mark.parametrize("odd", [5, "LlavaLlama", {"a": 1}, [[1]]])
def test_odd_architectures_and_layer_types(tmp_path, odd):
    config, t = speculators()
    changed = {**config, "architectures": odd, "transformer_layer_config": {**LLAMA, "layer_types": odd}}
    load(put(tmp_path, changed, t))  # neither says anything that matters


def test_a_config_nested_too_deep_of_heads(tmp_path):
    """`enable` asks first whether a folder holds heads of the target's own classes."""
    (tmp_path / "config.json").write_text('{"a": ' + DEEP)
    with pytest.raises(ValueError, match="nested too deeply"):
        mtp_files.saved(tmp_path)


@pytest.mark.parametrize("layout", PUBLISHED)
def test_fit(tmp_path, layout):
    drafter = load(put(tmp_path, *PUBLISHED[layout]()))
    assert drafter.fit(TARGET, {"depth": 2}).options.depth == 2
    other = TargetInfo("another/target", V + 3, H + 8, H + 8, 5, torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match=r"does not fit another/target: hidden size 32 \(target: 40\), .*vocabulary 6"):
        drafter.fit(other, {})
