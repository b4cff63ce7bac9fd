"""compile=True follows what changes in a model between two calls; what a capture would leave out is not captured."""

from __future__ import annotations

import copy
import gc
import struct
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import tiny_vlms
import torch
import transformers as T
import uncompiled
from hostile_drafters import eagle
from torch import Tensor, nn
from torch.nn.utils import parametrize

import mmspec
from mmspec.compile import capture_cache
from mmspec.compile import version as versions
from mmspec.compile.capture import PiecewiseFunction
from mmspec.compile.version import version
from mmspec.drafters.plain import Plain
from mmspec.pipelines.host.model import HostModel
from mmspec.pipelines.target import captures

Model = Any
Undo = Callable[[], None]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are run, not compiled; what falls back fails where it is not expected."""
    uncompiled.pieces(monkeypatch)
    warnings.filterwarnings("error", "mmspec", UserWarning)


@pytest.fixture
def model() -> Model:
    return copy.deepcopy(tiny_vlms.model("llava"))


def answer(model: Model, **options: Any) -> list[int]:
    inputs = tiny_vlms.prompt("llava", "text only")
    return tiny_vlms.generate(model, inputs, max_new_tokens=8, **options)[0].tolist()


def stock(model: Model) -> list[int]:
    """What the same model gives without mmspec, whatever it is in now."""
    drafter = type(model)._mmspec_patch.drafter
    mmspec.disable(model)
    found = answer(model)
    mmspec.enable(model, drafter, compile=True)
    return found


def layer(model: Model) -> Any:
    return model.get_decoder().layers[1]


# -- what changes, and how it is undone -------------------------------------------------------------------------------


def steered(model: Model) -> Undo:
    """A vector added to what a layer gives."""
    vector = 3 * torch.randn(tiny_vlms.HIDDEN, generator=torch.Generator().manual_seed(3))
    return layer(model).register_forward_hook(lambda module, given, out: out + vector).remove


def autoencoded(model: Model) -> Undo:
    """A sparse code in place of what an MLP is given, as an SAE intervention does."""
    code = torch.randn(tiny_vlms.HIDDEN, 16, generator=torch.Generator().manual_seed(4)) / 4
    hook = layer(model).mlp.register_forward_pre_hook(lambda module, given: ((given[0] @ code).relu() @ code.T,))
    return hook.remove


def everywhere(model: Model) -> Undo:
    def doubled(module: Any, given: Any, out: Any) -> Any:
        return 2 * out if module is layer(model).mlp else None

    return nn.modules.module.register_module_forward_hook(doubled).remove


def patched(model: Model) -> Undo:
    mlp = layer(model).mlp
    before, mlp.forward = mlp.forward, lambda x: 3 * before(x)
    return lambda: delattr(mlp, "forward")


def bound(model: Model) -> Undo:
    """As packages of kernels put their own forwards in."""
    mlp = layer(model).mlp
    mlp.forward = types.MethodType(lambda self, x: self.down_proj(self.act_fn(self.up_proj(x))), mlp)
    return lambda: delattr(mlp, "forward")


def of_its_class(model: Model) -> Undo:
    kind = type(layer(model).mlp)
    before = kind.forward
    kind.forward = lambda self, x: 3 * before(self, x)
    return lambda: setattr(kind, "forward", before)


def put(owner: Any, name: str, value: Any) -> Undo:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def scaled(model: Model) -> Undo:
    return put(layer(model).self_attn, "scaling", 2.0)


def turned(model: Model) -> Undo:
    return put(model.get_decoder().rotary_emb, "attention_scaling", 3.0)


def activated(model: Model) -> Undo:
    return put(layer(model).mlp, "act_fn", nn.Tanh())


def parametrized(model: Model) -> Undo:
    class Halved(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    projection = layer(model).mlp.down_proj
    parametrize.register_parametrization(projection, "weight", Halved())
    return lambda: parametrize.remove_parametrizations(projection, "weight", leave_parametrized=False)


def softened(model: Model) -> Undo:
    """What a forward reads from a configuration."""
    mlp = layer(model).mlp
    kind, before = type(mlp), type(mlp).forward
    model.get_decoder().config.temper = 1.0
    kind.forward = lambda self, x: before(self, x) * self.config.temper
    model.get_decoder().config.temper = 2.5
    return lambda: setattr(kind, "forward", before)


LEFT_ALONE = {
    steered: "model.language_model.layers.1 has forward hooks",
    autoencoded: "mlp has forward hooks",
    everywhere: "for all modules",
    patched: "mlp has a forward of its own",
}
FOLLOWED = [bound, of_its_class, scaled, turned, activated, parametrized, softened]


@pytest.mark.parametrize("drafter", [pytest.param(lambda model: Plain(), id="plain"),
                                     pytest.param(eagle, id="eagle", marks=pytest.mark.full)])  # fmt: skip
@pytest.mark.parametrize("change", LEFT_ALONE, ids=lambda change: change.__name__)
@pytest.mark.every(4)
def test_what_runs_with_a_module_is_run(change: Callable[[Model], Undo], drafter: Any, model: Model) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with mmspec.enable(model, drafter(model), compile=True):
            undo = change(model)  # before the first call
            assert answer(model) == stock(model)
            undo()
            plain = answer(model)
            assert plain == stock(model)
            undo = change(model)  # between calls
            assert answer(model) == stock(model) != plain
            undo()
            assert answer(model) == plain


@pytest.mark.parametrize("change", LEFT_ALONE, ids=lambda change: change.__name__)
def test_why_nothing_is_captured_is_said_once(change: Callable[[Model], Undo], model: Model) -> None:
    undo = change(model)
    expected = pytest.warns(UserWarning, match=f"uncompiled: .*{LEFT_ALONE[change]}")
    with mmspec.enable(model, Plain(), compile=True), expected as told:
        answer(model)
        answer(model)
    undo()
    assert len(told) == 1 and not any(captures.of(model)._captures.values())


def test_adapters_are_said_once_for_all_shapes(model: Model) -> None:
    peft = pytest.importorskip("peft")
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with mmspec.enable(model, Plain(), compile=True), pytest.warns(UserWarning, match="it has adapters") as told:
        for kind in ("text only", "ragged"):
            tiny_vlms.generate(model, tiny_vlms.prompt("llava", kind), max_new_tokens=4)
    assert len(told) == 1


@pytest.mark.parametrize("change", FOLLOWED, ids=lambda change: change.__name__)
@pytest.mark.every(24)
def test_what_a_forward_reads_is_captured_anew(change: Callable[[Model], Undo], model: Model) -> None:
    with mmspec.enable(model, Plain(), compile=True):
        plain = answer(model)
        undo = change(model)
        changed = answer(model)
        assert changed == stock(model) != plain
        assert all(captures.of(model)._captures.values())
        undo()
        assert answer(model) == plain == stock(model)


@pytest.mark.parametrize("drafter", [lambda model: Plain(), eagle], ids=["plain", "eagle"])
def test_what_changes_with_every_call_is_captured_no_more(
    drafter: Any, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What drafts reads only the embedding and the head, and stays captured."""
    monkeypatch.setattr(capture_cache, "_DROPS", 2)
    made = PiecewiseFunction.made
    with (
        mmspec.enable(model, drafter(model), compile=True),
        pytest.warns(UserWarning, match="change from call to call"),
    ):
        for call in range(4):
            layer(model).self_attn.scaling = 0.25 + call
            fast = answer(model)
    assert PiecewiseFunction.made - made == 2 + (drafter is eagle) and fast == answer(model)


def test_a_captured_draft_follows_the_embedding_and_the_head(model: Model) -> None:
    with mmspec.enable(model, eagle(model), compile=True):
        answer(model)
        (held,) = captures.of(model).drafts.values()
        for change in (
            lambda: setattr(model.lm_head, "weight", nn.Parameter(model.lm_head.weight.flip(0))),
            lambda: setattr(table := model.get_input_embeddings(), "weight", nn.Parameter(table.weight.flip(0))),
        ):
            before = held._captures
            change()
            assert answer(model) == stock(model) and held._captures is not before and any(held._captures.values())


class Keeps(nn.Module):
    """Remembers what it gave, as modules of remote code do; what kind of thing is said by its name."""

    def __init__(self, mlp: Any, what: str) -> None:
        super().__init__()
        self.mlp, self.what, self.last, self.calls = mlp, what, None, 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out = self.mlp(x)
        if self.what == "tensor":
            self.last = out
        elif self.what == "count":
            self.calls += 1
        else:
            self.seen += 1
        return out


@pytest.mark.parametrize("what", ["tensor", "count", "buffer"])
def test_modules_that_keep_something_keep_it_compiled_too(what: str, model: Model) -> None:
    layer(model).mlp = kept = Keeps(layer(model).mlp, what)
    wanted = answer(model)
    last = kept.last
    expected = pytest.warns(UserWarning, match="uncompiled: its forward changes attributes of its modules")
    with mmspec.enable(model, Plain(), compile=True), expected:
        assert answer(model) == wanted
    if what == "tensor":
        torch.testing.assert_close(kept.last, last, rtol=1e-4, atol=1e-4)
        probe = nn.Linear(tiny_vlms.HIDDEN, 1)
        probe(kept.last).sum().backward()


def test_hooked_activations_may_train_a_probe(model: Model) -> None:
    seen: list[Tensor] = []
    hook = layer(model).register_forward_hook(lambda module, given, out: seen.append(out))
    with mmspec.enable(model, Plain()):
        answer(model)
    hook.remove()
    assert len(seen) == 8 and not any(t.is_inference() for t in seen)
    nn.Linear(tiny_vlms.HIDDEN, 1)(torch.cat(seen, 1)).sum().backward()


# -- autocast, training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["inside", "outside"])
@pytest.mark.parametrize("drafter", [lambda model: Plain(), eagle], ids=["plain", "eagle"])
@pytest.mark.parametrize("attention", ["mmspec_tree", "sdpa"])
@pytest.mark.every(8)
def test_inside_and_outside_of_autocast(attention: str, first: str, drafter: Any, model: Model) -> None:
    model.set_attn_implementation(attention)
    warnings.filterwarnings("ignore", "Mismatch dtype")  # torch says so once of a norm with weights in float32

    def around(where: str) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if where == "inside" else nullcontext()

    order = [first, "outside" if first == "inside" else "inside"] * 2
    wanted = {}
    for where in order[:2]:
        with around(where):
            wanted[where] = answer(model)
    with mmspec.enable(model, drafter(model), compile=True):
        for where in order:
            with around(where):
                assert answer(model) == wanted[where]
        held = captures.of(model)
    assert held._captures and all(held._captures.values())
    assert all(drafts._captures and all(drafts._captures.values()) for drafts in held.drafts.values())


@pytest.mark.full
def test_training_mode_and_back(model: Model) -> None:
    for one in model.get_decoder().layers:
        one.self_attn.attention_dropout = 0.9
    with mmspec.enable(model, Plain(), compile=True):
        plain = answer(model)
        model.train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            torch.manual_seed(1)
            dropped = answer(model)
        assert dropped != plain and not any(captures.of(model)._captures.values())
        model.eval()
        assert answer(model) == plain


@pytest.mark.parametrize("compile", [False, True])
def test_gradient_checkpointing_in_training_mode_is_stock(compile: bool, model: Model) -> None:
    model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable()
    wanted = answer(model)
    with mmspec.enable(model, Plain(), compile=compile) as handle:
        with pytest.warns(UserWarning, match="stock path: gradient checkpointing in training mode"):
            assert answer(model) == wanted
        assert handle.stats.rounds == 0
        model.eval()
        warnings.simplefilter("ignore", UserWarning)  # that input embeddings have a hook now
        assert answer(model) == answer(tiny_vlms.model("llava")) and handle.stats.rounds > 0


# -- compiled by others, quantised ------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("drafter", [pytest.param(lambda model: Plain(), id="plain"),
                                     pytest.param(eagle, id="eagle", marks=pytest.mark.full)])  # fmt: skip
@pytest.mark.parametrize("whole", [False, True], ids=["wrapped", "in place"])
@pytest.mark.every(16)
def test_layers_that_are_compiled_by_themselves(compile: bool, drafter: Any, whole: bool, model: Model) -> None:
    wanted, layers = answer(model), model.get_decoder().layers
    for at, one in enumerate(layers):
        if whole:
            one.compile(backend="eager")
        else:
            layers[at] = torch.compile(one, backend="eager")
    told = pytest.warns(UserWarning, match="uncompiled") if compile else nullcontext()
    with mmspec.enable(model, drafter(model), compile=compile), told:
        assert answer(model) == wanted == answer(model)


# -- the version itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny_vlms.FAMILIES)
def test_a_call_leaves_the_version_as_it_was(name: str) -> None:
    model = copy.deepcopy(tiny_vlms.model(name))
    if not HostModel.of(model).only_keys:
        pytest.skip("layers with a state read drafts by a forward of ours, and are not captured")
    before = version(model)
    assert before.why is None
    with mmspec.enable(model, Plain()):
        tiny_vlms.generate(model, tiny_vlms.prompt(name, "image first"), max_new_tokens=3)
        assert version(model) == before
    model(**tiny_vlms.prompt(name, "image first"), output_hidden_states=True)  # leaves hooks of transformers behind
    model.generation_config.max_new_tokens = 7
    assert version(model) == before


def test_it_keeps_nothing_alive() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.note = model.forward
    gone, kept = weakref.ref(model), version(model)
    del model
    gc.collect()
    assert gone() is None and kept.state


def test_a_call_reads_it_once_of_each_module(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask for it: facts, captures of the target and of the drafter."""
    drafter = eagle(model)
    with mmspec.enable(model, drafter, compile=True) as handle:
        answer(model)
        asked, make = [], versions._latest
        monkeypatch.setattr(versions, "_latest", lambda root: asked.append(root) or make(root))
        answer(model)
        assert len(asked) == len(set(asked)) and model in asked
        asked.clear()
        answer(model)  # and each call anew
        assert model in asked and handle.stats.rounds


class Settings:
    """A configuration with another one inside."""

    def __init__(self) -> None:
        self.width, self.text_config = 3, types.SimpleNamespace(scale=0.5)


class Toy(nn.Module):
    """Modules with everything that a version looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        self.scale, self.names, self.table, self.act = 0.123, ["a"], {"x": 1, "more": {"y": 1}}, torch.tanh
        self.control = types.SimpleNamespace(strength=1.0, vector=None, layers=[1])
        self.config, self.vector = Settings(), torch.zeros(2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def hook(*_: Any) -> None: ...


def stepped(weight: nn.Parameter) -> None:
    """One step of a fused optimizer, as `Trainer` has it: torch's version counter stays as it was."""
    counted, weight.grad = weight._version, torch.ones_like(weight)
    torch.optim.AdamW([weight], fused=True).step()
    assert weight._version == counted


class Looking:
    """A hook that changes and keeps nothing."""

    mmspec_looks_on = True

    def __call__(self, *_: Any) -> None: ...


MUTATIONS: dict[str, Callable[[Toy], Any]] = {  # by what changes; each is done twice, for a value that gets an old id
    "a number": lambda m: setattr(m, "scale", m.scale * 1.5),
    "a number below": lambda m: setattr(m.second[1], "p", m.second[1].p / 2),
    "a list": lambda m: m.names.append("b"),
    "a dict": lambda m: m.table.update(x=m.table["x"] + 1),
    "a dict inside it": lambda m: m.table["more"].update(y=m.table["more"]["y"] + 1),
    "a number in an object": lambda m: setattr(m.control, "strength", m.control.strength / 7),
    "a list in an object": lambda m: m.control.layers.append(2),
    "a tensor in an object": lambda m: setattr(m.control, "vector", torch.rand(2)),
    "a tensor aside": lambda m: setattr(m, "vector", torch.rand(2)),
    "values of a tensor aside": lambda m: m.vector.add_(1),
    "a new attribute": lambda m: setattr(m, f"more{len(vars(m))}", 1),
    "a function": lambda m: setattr(m, "act", lambda x: x),
    "a configuration": lambda m: setattr(m.config, "width", m.config.width + 1000),
    "one inside it": lambda m: setattr(m.config.text_config, "scale", m.config.text_config.scale / 3),
    "a parameter": lambda m: setattr(m.first, "weight", nn.Parameter(torch.rand(2, 2))),
    "its values": lambda m: m.first.weight.add_(1),
    "some of its values": lambda m: m.first.weight[..., -1:].fill_(3),
    "an optimizer's step": lambda m: stepped(m.first.weight),
    "its data": lambda m: setattr(m.first.weight, "data", torch.rand(2, 2)),
    "its shape": lambda m: setattr(m.mean, "data", m.mean.data.view(1, *m.mean.shape)),
    "its strides": lambda m: setattr(m.first.weight, "data", m.first.weight.data.T),
    "its dtype": lambda m: m.first.double() if m.first.weight.dtype == torch.float32 else m.first.float(),
    "a buffer": lambda m: setattr(m, "mean", torch.rand(2)),
    "a child": lambda m: setattr(m, "first", nn.Linear(2, 2)),
    "the order of children": lambda m: m.second.insert(0, m.second.pop(len(m.second) - 1)),
    "a child in two places": lambda m: setattr(m, "first", m.second[int(m.first is m.second[0])]),
    "a child more": lambda m: m.second.append(nn.ReLU()),
    "the mode": lambda m: m.second.train(not m.second.training),
    "a hook": lambda m: m.second.register_forward_hook(hook),
    "a forward": lambda m: setattr(m.second[0], "forward", lambda x: x),
    "a refresh": lambda m: versions.refresh(m.first),
    "the class": lambda m: setattr(m.second[0], "__class__", type("Other", (nn.Linear,), {})),
}
# of which torch knows, and after which captures are valid
WRITES = {
    "its values", "some of its values", "an optimizer's step", "its data", "a tensor aside", "values of a tensor aside"
}  # fmt: skip
CONTENTS = {
    "its values", "some of its values", "an optimizer's step", "its shape", "its strides", "values of a tensor aside"
}  # fmt: skip


@pytest.mark.parametrize("what", MUTATIONS)
def test_what_stands_is_what_would_be_read(what: str) -> None:
    model = Toy()
    before = version(model)
    assert version(model) is before, "it is found again"
    for _ in range(2):
        with torch.no_grad():
            MUTATIONS[what](model)
        now = version(model)
        assert now == versions._version(model)
        assert now != before or (what == "a hook" and now.why), "a second hook says no more than the first"
        assert what not in WRITES or (now.weights, now.state) == (before.weights, before.state)
        before = now


@pytest.mark.parametrize("what", MUTATIONS)
def test_the_structure_is_all_but_the_contents_of_tensors(what: str) -> None:
    model = Toy()
    before = version(model)
    assert versions.structure(model) is before
    with torch.no_grad():
        MUTATIONS[what](model)
    with versions.unchanging():
        now = versions.structure(model)
        assert (now is before) == (what in CONTENTS)
        assert version(model) == versions._version(model) != before, "its tensors are compared when they are asked for"
    assert versions.structure(model) is version(model)


def test_a_hook_is_seen_by_every_check_until_it_has_been_read() -> None:
    """Of other threads, too, which check while the new version is made."""
    model = Toy()
    version(model)
    seen, handle = versions._SEEN[model], model.first.register_forward_hook(hook)
    assert seen.same_structure() is None and seen.same_structure() is None
    handle.remove()
    assert seen.same_structure() is not None


@pytest.mark.parametrize("value", [torch.zeros(2), np.zeros(2), [torch.zeros(2)], 1.0])
def test_numbers_in_a_container_may_become_anything(value: Any) -> None:
    model = Toy()
    before = version(model)
    model.table["x"] = value
    assert (version(model) == before) == (type(value) is float), "1 == 1.0"
    assert version(model) == versions._version(model)


def test_what_does_not_matter_is_not_read_anew() -> None:
    model = Toy()
    before = version(model)
    model(torch.zeros(1, 2))
    model.warnings_issued = {"once": True}
    assert version(model) == before
    found = version(model)
    model.warnings_issued["twice"] = True
    assert version(model) is found and found == before
    model.rope_deltas = None
    before = version(model)
    for left in (torch.rand(2), torch.rand(3), None, torch.rand(2)):  # by a call, for the next one
        model.rope_deltas = left
        assert version(model) == before == versions._version(model)
    found = version(model)
    model.rope_deltas = torch.rand(7)
    assert version(model) is found
    model.first.in_features, model.first.training = 7, False  # a Linear's forward reads its weight and bias
    assert version(model) is found and found == versions._version(model)
    model.first.forward = types.MethodType(lambda self, x: nn.Linear.forward(self, x) * self.scale, model.first)
    model.first.register_buffer("scale", torch.ones(()))  # one of its own may read more
    for change in (lambda: model.first.scale.fill_(2), lambda: setattr(model.first, "training", True)):
        before = version(model)
        change()
        assert version(model) == versions._version(model) != before
    del model.first.forward
    found = version(model)
    for _ in range(2):  # such as each stream sets one
        looking = model.first.register_forward_hook(Looking())
        assert version(model) is found
        looking.remove()
    model.rope_deltas = 3
    assert version(model) != before


def test_it_is_made_in_a_moment() -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = T.Qwen2Config(**small, num_hidden_layers=28, vocab_size=128, bos_token_id=1, eos_token_id=2)
    model, times = T.Qwen2ForCausalLM(config), []
    for _ in range(20):
        start = time.perf_counter()
        version(model)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.02, "about a millisecond, on a machine at rest"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def test_another_weight_at_the_same_address_is_another_weight() -> None:
    """What is freed may lie, and be numbered, as what comes next."""
    layer = nn.Linear(4, 4, bias=False)
    for _ in range(20):
        before = version(layer)
        layer.weight = None
        layer.weight = nn.Parameter(torch.ones(4, 4))
        assert version(layer) != before


def test_contents_of_weights_may_be_swapped(model: Model) -> None:
    """As `model.to()` does with quantized weights; torch refuses to swap tensors that have weak references."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        layer(other).mlp.down_proj.weight.neg_()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with mmspec.enable(model, Plain(), compile=True):
            plain = answer(model)
            model.load_state_dict(other.state_dict())
            assert answer(model) == stock(model) != plain
            model.double()
            model.float()
            assert answer(model) == stock(model)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


class Gated(nn.Module):
    """Reads the value of a buffer in Python."""

    def __init__(self, mlp: nn.Module, how: str) -> None:
        super().__init__()
        self.mlp, self.how = mlp, how
        self.register_buffer("gate", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "branch":
            return self.mlp(x) if self.gate else -self.mlp(x)
        return self.mlp(x) * self.gate.item()


@pytest.mark.parametrize("how", ["branch", "number"])
def test_what_reads_the_value_of_a_buffer_runs_uncompiled(how: str, model: Model) -> None:
    layer(model).mlp = gated = Gated(layer(model).mlp, how)
    expected = pytest.warns(UserWarning, match="uncompiled: it reads the value of a tensor")
    with mmspec.enable(model, Plain(), compile=True), expected:
        plain = answer(model)
        gated.gate.zero_()
        assert answer(model) == stock(model) != plain


def test_refresh_reaches_what_is_around_and_below() -> None:
    whole, other = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 2)
    parts = [whole, whole[1], whole[1][0], other]
    before = [version(part) for part in parts]
    mmspec.refresh(whole[1])
    assert [version(part) == was for part, was in zip(parts, before, strict=True)] == [False, False, False, True]


@pytest.mark.full
def test_what_is_written_behind_torchs_back_is_read_after_refresh(model: Model) -> None:
    with mmspec.enable(model, eagle(model), compile=True, prefix_cache="64MB") as handle:
        plain = answer(model)
        layer(model).mlp.down_proj.weight.detach().numpy()[:] *= -1
        model.lm_head.weight.data.mul_(-1)
        mmspec.refresh(model)
        assert answer(model) == stock(model) != plain
        read = handle.stats.prefix["reused tokens"]
    assert not read


@pytest.mark.parametrize("value", ["all", "auto", "sometimes", 2, None])
def test_compile_is_true_or_false(value: Any, model: Model) -> None:
    with pytest.raises(ValueError, match=f"compile must be True or False; got {value!r}. Write True"):
        mmspec.enable(model, "ngram", compile=value)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("family", ["llava", "qwen3_5"])
def test_weights_are_freed_with_the_model(family: str, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the garbage collector; a forward, drafts, a prompt and a tower are captured, or cannot be compiled."""
    uncompiled.pieces(monkeypatch, (lambda *_: 1 / 0) if fails else uncompiled.as_it_is, prompts=True)
    own, inputs = copy.deepcopy(tiny_vlms.model(family)), tiny_vlms.prompt(family, "image first")
    weights = [weakref.ref(weight) for weight in own.parameters()]
    gc.collect()
    gc.disable()
    try:
        with mmspec.enable(own, eagle(own), compile=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(4):
                tiny_vlms.generate(own, inputs, max_new_tokens=8)
            held = captures.of(own)
            assert any(held._captures.values()) != fails
            assert any(any(drafts._captures.values()) for drafts in held.drafts.values()) != fails
            del held
        del own
        assert not any(weight() is not None for weight in weights)
    finally:
        gc.enable()


def test_identities_are_ids() -> None:
    values = (None, 1.5, object(), [])
    assert versions.identities(values) == struct.pack("4P", *map(id, values))
