"""Every method in every layout: written and read back the same, or refused; by function, command and `enable`."""

import json

import pytest
import tiny_vlms
import torch
from hostile_drafters import feature_drafter
from published_drafters import HEADS, THREE, VISUAL, H, V, load, msd, put, run, same, vispec
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import mmspec
from mmspec import zoo
from mmspec.app import cli
from mmspec.checkpoints import save
from mmspec.checkpoints.layouts import LAYOUTS
from mmspec.drafters.feature import FeatureDrafter
from mmspec.registry import DRAFTERS, drafter_class

METHODS = [name for name, entry in DRAFTERS.items() if entry.trained and name != "heads"]  # see test_heads.py


def drafter_of(method, **changes):
    """A drafter of any method with random weights, small."""
    shapes = {"hidden": H, "intermediate": 48, "heads": HEADS, "kv_heads": 2, "vocab": V, "target": "somebody/target"}
    torch.manual_seed(3)
    drafter = drafter_class(method)(drafter_class(method).Config.of({**shapes, **changes})).eval()
    for p in drafter.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return drafter


@pytest.mark.parametrize("method", METHODS)
def test_our_own_layout_holds_every_method(tmp_path, method):
    norms = {} if method == "block" else {"input_norm": True, "out_norm": True, "embed_norm": True}
    drafter = drafter_of(method, **norms)
    save.save_drafter(drafter, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["mmspec"]["method"] == method
    assert f"- {method}" in (tmp_path / "README.md").read_text()
    read = mmspec.load_drafter(tmp_path)
    same(drafter, read)
    if method == "block":
        return
    e, h = torch.randn(len(VISUAL), H), torch.randn(len(VISUAL), H)
    torch.testing.assert_close(run(read, e, h, VISUAL), run(drafter, e, h, VISUAL), atol=0, rtol=0)


def test_a_file_lists_as_many_proposed_tokens_as_there_are(tmp_path):
    drafter = drafter_of("eagle", vocab=300, proposes=tuple(range(0, 300, 2)))
    save.save_drafter(drafter, tmp_path)
    assert mmspec.load_drafter(tmp_path).config.proposes == drafter.config.proposes


OTHER = {bool: lambda value: not value, int: lambda value: value * 2 + 2, float: lambda value: value * 2 + 1}
NAMES = "head_dim num_q taps markov_rank selector_rank mask_token causal windows media draft_vocab tree depth gate"
SWITCHED = [
    (method, name)
    for method in METHODS
    for name, usual in drafter_class(method).Config.usual().items()
    if type(usual) in (bool, float) or name in NAMES.split()
]
ODD = {"causal": (1,), "windows": (5,), "media": "merge", "tree": "chain", "gate": "pool"}


@pytest.mark.parametrize(("method", "name"), SWITCHED)
@pytest.mark.every(4)
def test_a_setting_is_kept_or_the_layout_refuses(tmp_path, method, name):
    """No layout loses a setting in silence: what it writes reads back the same, or nothing is written."""
    plain = drafter_of(method).config.to_dict()
    value = ODD.get(name) or OTHER[type(plain[name])](plain[name])
    try:
        drafter = drafter_of(method, **{name: value})
    except ValueError:  # the method itself has no use for it
        return
    kept = []
    for layout in LAYOUTS:
        try:
            save.save_drafter(drafter, tmp_path / layout, layout)
        except ValueError as error:
            assert "Use layout 'mmspec'" in str(error)
            continue
        same(drafter, load(tmp_path / layout))
        kept.append(layout)
    assert "mmspec" in kept


@pytest.mark.parametrize(
    ("method", "layout", "changes", "reason"),
    [
        ("vispec", "speculators", {}, "its method is 'vispec', not 'eagle'"),
        ("msd", "eagle", {}, "its method is 'msd', not 'eagle'"),
        ("flash", "eagle", {}, "its method is 'flash', not 'eagle'"),
        ("eagle", "msd", {}, "its method is 'eagle', not 'msd'"),
        ("vispec", "vispec", {"input_norm": True}, "input_norm is True"),
        ("vispec", "nemo-vispec", {"global_vector": False}, "global_vector is False"),
        ("msd", "msd", {"head_dim": 12}, "head_dim is 12"),
        ("vispec", "vispec", {"fc_bias": False}, "a bias in img_fc only where fc has one"),
        ("msd", "msd", {"qkv_bias": True}, "input_norm and qkv_bias both or neither"),
        ("msd", "nemo-msd", {"embed_norm": True}, "embed_norm is True"),
        ("eagle", "eagle", THREE, "parallel_norm is True"),
        ("eagle", "eagle3", {}, "it has no output head of its own"),
        ("eagle", "eagle3", {**THREE, "norm_residual": True}, "norm_residual is True"),
        ("eagle", "speculators", {**THREE, "qkv_bias": True}, "qkv_bias is True"),
    ],
)
def test_layouts_that_cannot_hold_it(tmp_path, method, layout, changes, reason):
    with pytest.raises(ValueError, match=f"{reason}.*Use layout 'mmspec'"):
        save.save_drafter(drafter_of(method, **changes), tmp_path / "new", layout)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("layout", ["vispec", "nemo-vispec"])
def test_vispec_of_one_layout_in_another(tmp_path, capsys, layout):
    """The authors' names to NeMo's and back, by the command."""
    source = put(tmp_path / "a", *vispec())
    assert cli.main(["convert", str(source), str(tmp_path / "b"), "--layout", layout]) == 0
    assert f"in the layout {layout}" in capsys.readouterr().out
    same(load(source), load(tmp_path / "b"))
    assert ("img_adaptor.query" in load_file(tmp_path / "b" / "model.safetensors")) is (layout == "nemo-vispec")


@pytest.mark.parametrize("family", ["llava", "qwen"])
def test_msd_is_written_for_its_authors_layer(tmp_path, family):
    config, t = msd(family)
    save.save_drafter(load(put(tmp_path / "a", config, t)), tmp_path / "b", "msd")
    said = json.loads((tmp_path / "b" / "config.json").read_text())
    assert {key: said[key] for key in ("model_type", "architectures", "rope_scaling")} == {
        key: config[key] for key in ("model_type", "architectures", "rope_scaling")
    }


@pytest.mark.parametrize(
    ("family", "method", "layout", "changes"),
    [
        ("llava", "vispec", "vispec", {"media": "merge"}),
        ("qwen2_5_vl", "vispec", "nemo-vispec", {"qkv_bias": True}),
        ("llava", "msd", "msd", {}),
        ("qwen2_vl", "msd", "msd", {"qkv_bias": True, "input_norm": True}),
        ("qwen2_vl", "msd", "nemo-msd", {"out_norm": True, "input_norm": True}),
        ("llava", "flash", "mmspec", {}),
        ("llava", "specvlm", "mmspec", {}),
    ],
)
def test_from_a_file_into_generate(tmp_path, monkeypatch, family, method, layout, changes):
    """Named by its folder, a drafter proposes what it did before it was written, and the target's text stands."""
    model, inputs = tiny_vlms.model(family), tiny_vlms.prompt(family, "ragged")
    want = tiny_vlms.generate(model, inputs, max_new_tokens=6)
    drafter = feature_drafter(method, model, depth=3, width=3, size=10, **changes)
    save.save_drafter(drafter, tmp_path, layout)
    proposed, propose = [], FeatureDrafter.propose

    def record(*arguments):
        draft = propose(*arguments)
        proposed.append(draft.tokens)
        return draft

    monkeypatch.setattr(FeatureDrafter, "propose", record)
    for each in (drafter, str(tmp_path)):
        with mmspec.enable(model, drafter=each, tree=drafter.config.shape.tree):
            assert torch.equal(tiny_vlms.generate(model, inputs, max_new_tokens=6), want)
    first, second = proposed[: len(proposed) // 2], proposed[len(proposed) // 2 :]
    assert len(first) == len(second) > 1
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


GIVEN = [({}, (3, 1, 4)), ({"depth": 2}, (2, 1, 3)), ({"width": 2}, (3, 2, 10)), ({"tree": "dynamic"}, (3, 3, 10))]


@pytest.mark.parametrize("method", ["eagle", "vispec", "msd", "flash", "specvlm"])
@pytest.mark.parametrize(("given", "shape"), GIVEN, ids=[str(given) for given, _ in GIVEN])
def test_a_file_that_recommends_a_tree_drafts_chains_on_a_cpu(tmp_path, method, given, shape):
    """Unless the user says otherwise: there every node takes time."""
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "image first")
    want = tiny_vlms.generate(model, inputs, max_new_tokens=6)
    save.save_drafter(feature_drafter(method, model, tree="dynamic", depth=3, width=3, size=10), tmp_path)
    with mmspec.enable(model, drafter=tmp_path, **given) as handle:
        o = handle.drafter.options
        assert (o.depth, o.width, o.size) == shape and handle.drafter.config.shape.width == 3
        assert torch.equal(tiny_vlms.generate(model, inputs, max_new_tokens=6), want)
    with mmspec.enable(model, drafter=handle.drafter) as handle:  # an object is taken as it is
        assert handle.drafter.options.width == 3


def test_a_file_that_recommends_chains_is_taken_at_its_word():
    model = AutoModelForImageTextToText.from_pretrained(zoo.path("scenes-video"))
    with mmspec.enable(model, zoo.path("scenes-video-eagle")) as handle:
        assert handle.given == {} and handle.drafter.options.adaptive and handle.drafter.options.depth == 16
