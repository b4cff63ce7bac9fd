"""Devices and dtypes without a GPU: every drafter on pretended devices. Stock answers are those of the CPU."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import hostile_drafters
import pytest
import tiny_image_models
import tiny_llamagen
import tiny_mar
import tiny_vlms
import torch
from accelerate import dispatch_model
from pretend_cuda import Mismatch, Pretend, home, place
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mmspec
from benchmarks.suites import kernel_cases as cases
from mmspec.kernels import dispatch
from mmspec.pipelines.host import model as facts
from mmspec.pipelines.host import tree_attention
from mmspec.pipelines.patching.handle import Patch
from mmspec.pipelines.target import vlm
from mmspec.registry import OF_TEXT
from mmspec.types import Draft, Tree
from tests.drafters import test_eagle_image

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a GPU where there is none")

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
SHORT = {"max_new_tokens": 5}
ROWS = {"one": ("image first", None), "ragged": ("ragged", [0, 3])}  # kinds of prompts, and which rows of them
SEEING = ("vispec", "msd", "flash", "specvlm")  # the dearest
DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: "plain",
    **{name: lambda model, name=name: name for name in OF_TEXT},
    "jacobi": lambda model: "jacobi",
    "eagle": lambda model: hostile_drafters.eagle(model, depth=4, width=3, size=14),
    **{name: partial(hostile_drafters.DRAFTERS[name], oracle=None) for name in SEEING},
}


@pytest.fixture(autouse=True)
def as_shipped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without a wish for kernels, and with what is known of Triton forgotten."""
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    yield
    dispatch.chosen.cache_clear()
    dispatch._installed.cache_clear()


def asked(kind: str) -> dict[str, Tensor]:
    name, rows = ROWS[kind]
    inputs = tiny_vlms.prompt("llava", name, rows=rows)
    return {**inputs, "pixel_values": inputs["pixel_values"][:1]}


@cache
def stock(kind: str) -> Tensor:
    return tiny_vlms.generate(tiny_vlms.model("llava"), asked(kind), **SHORT)


TEXT = "model.language_model"
LATER = [f"{TEXT}.layers.1", f"{TEXT}.layers.2", f"{TEXT}.norm", "lm_head"]
TOWER = ["model.vision_tower", "model.multi_modal_projector"]


def split(model: Any, there: list[str] = LATER) -> Any:
    """These parts on the second device, by default all layers but the first, and the head; all others on the first."""
    parts = [*TOWER, f"{TEXT}.embed_tokens", f"{TEXT}.rotary_emb", f"{TEXT}.layers.0", *LATER]
    spread = {name: str(SECOND if name in there else FIRST) for name in parts}
    return dispatch_model(model.to(FIRST), spread, force_hooks=True)


def answered(model: Any, kind: str, device: torch.device | str, **options: Any) -> Tensor:
    inputs = {name: t.to(device) for name, t in asked(kind).items()}
    return tiny_vlms.generate(model, inputs, **{**SHORT, **options})


# -- what is pretended -----------------------------------------------------------------------------------------------


def test_two_devices_do_not_meet() -> None:
    with Pretend():
        a, b = torch.ones(2, 3, device="cuda:0"), torch.ones(2, 3, device="cuda:1")
        assert (a.device, (a @ b.to("cuda:0").T).device) == (FIRST, FIRST)
        for meet in (lambda: a + b, lambda: torch.cat([a, b.cpu()]), lambda: a[b[:, 0].long()]):
            with pytest.raises(Mismatch):
                meet()
        assert (a + torch.tensor(1.0)).device == FIRST


def test_waits_are_counted_where_they_are_asked_for() -> None:
    with Pretend() as pretended:
        t = torch.arange(4, device="cuda")
        assert pretended.waits == (0, 0) and t.sum().item() == 6 and bool(t.any()) and t.tolist() == [0, 1, 2, 3]
        assert t[t > 1].cpu().sum() == 5 and torch.tensor([1], device="cuda") == 1
    assert pretended.waits == (6, 1) and all("test_pretend_cuda.py" in line for line in pretended.reads)


# -- every drafter, wherever a model lies ----------------------------------------------------------------------------


def by(drafters: Iterable[str], *cases: str) -> list[Any]:
    """Each drafter in each case; those that see in the first of them only with `--full`."""
    return [
        pytest.param(name, case, marks=pytest.mark.full if name in SEEING and case == cases[0] else ())
        for name in drafters
        for case in cases
    ]


@pytest.mark.parametrize(("drafter", "where"), by(DRAFTERS, "one", "two"))
@pytest.mark.every(6)
def test_a_model_on_one_device_or_two(drafter: str, where: str) -> None:
    made = DRAFTERS[drafter](tiny_vlms.model("llava"))
    with Pretend():
        model = copy.deepcopy(tiny_vlms.model("llava"))
        model = split(model) if where == "two" else place(model, SECOND)
        device = FIRST if where == "two" else SECOND
        with mmspec.enable(model, made) as handle:
            for kind in ROWS:
                out = answered(model, kind, device)
                assert home(out) == device and torch.equal(out.cpu(), stock(kind))
        assert handle.stats.rounds


@pytest.mark.parametrize("drafter", ["ngram", "eagle"])
@pytest.mark.parametrize("there", [TOWER, [f"{TEXT}.embed_tokens"]], ids=["vision", "embedding"])
@pytest.mark.parametrize("device", [FIRST, SECOND], ids=str)
@pytest.mark.every(3)
def test_vision_and_embedding_on_two_devices(device: torch.device, there: list[str], drafter: str) -> None:
    made = DRAFTERS[drafter](tiny_vlms.model("llava"))
    with Pretend():
        model = split(copy.deepcopy(tiny_vlms.model("llava")), there)
        with mmspec.enable(model, made) as handle:
            for kind in ROWS:
                out = answered(model, kind, device)
                assert home(out) == device and torch.equal(out.cpu(), stock(kind))
        assert handle.stats.rounds


class There(hostile_drafters.Scripted):
    """A scripted drafter, whose drafts go to the session's device."""

    def propose(self, session: Any, target: Any) -> Draft:
        device = session.pending.device
        here = SimpleNamespace(rows=session.rows, pending=session.pending.cpu())
        draft = super().propose(here, target)
        tree = draft.tree
        moved = Tree(tree.parents.to(device), tree.depth.to(device), tree.ancestors.to(device), tree.is_chain)
        return Draft(draft.tokens.to(device), moved)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.every(4)
def test_rows_that_advance_unevenly_over_two_devices(sample: bool) -> None:
    """Trees move their entries down on both devices, rows append at lengths of their own, and do not leave together."""
    inputs = tiny_vlms.prompt("llava", "ragged")
    full = tiny_vlms.generate(tiny_vlms.model("llava"), inputs, max_new_tokens=12)
    oracle = hostile_drafters.Oracle.of(inputs["input_ids"], full)
    made = There(hostile_drafters._right_within(oracle))
    with Pretend():
        model = split(copy.deepcopy(tiny_vlms.model("llava")))
        there = {name: t.to(FIRST) for name, t in inputs.items()}
        with mmspec.enable(model, made) as handle:
            out = tiny_vlms.generate(model, there, max_new_tokens=12, do_sample=sample, top_k=1 if sample else None)
        assert torch.equal(out.cpu(), full) and handle.stats.accepted > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("attention", ["sdpa", "mmspec_tree"])
@pytest.mark.every(6)
def test_weights_in_float32_under_autocast(drafter: str, attention: str) -> None:
    """Keys are then float32, turned by positions, and values are not; what a round gives is that of autocast itself."""
    made = DRAFTERS[drafter](tiny_vlms.model("llava"))
    with Pretend(), torch.autocast("cpu", torch.bfloat16):
        model = place(copy.deepcopy(tiny_vlms.model("llava")), FIRST)
        model.set_attn_implementation(attention)
        with mmspec.enable(model, made):
            for kind in ROWS:
                assert answered(model, kind, FIRST).shape == stock(kind).shape


@pytest.mark.parametrize("drafter", ["ngram", "eagle"])
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3, "min_new_tokens": 4, "suppress_tokens": [5, 6]}])
@pytest.mark.every(4)
def test_ids_on_the_cpu(options: dict[str, Any], kind: str, drafter: str) -> None:
    """Stock moves what the forward reads; ids and scores stay where they came from."""
    made = DRAFTERS[drafter](tiny_vlms.model("llava"))
    call = {**SHORT, **options, "eos_token_id": 7, "return_dict_in_generate": True, "output_scores": True}
    wanted = tiny_vlms.generate(tiny_vlms.model("llava"), asked(kind), **call)
    with Pretend(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = place(copy.deepcopy(tiny_vlms.model("llava")), FIRST)
        inputs = {name: t.to(FIRST) if name == "pixel_values" else t for name, t in asked(kind).items()}
        with mmspec.enable(model, made) as handle:
            out = tiny_vlms.generate(model, inputs, **call)
        assert home(out.sequences) == home(out.scores[0]) == torch.device("cpu") and handle.stats.rounds
    assert torch.equal(out.sequences, wanted.sequences)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.every(4)
def test_without_triton_the_definitions_run_and_it_is_said_once(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = DRAFTERS[drafter](tiny_vlms.model("llava"))
    with Pretend(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        monkeypatch.setitem(sys.modules, "triton", None)
        for operation in dispatch.KERNELS.values():
            monkeypatch.delitem(sys.modules, f"mmspec.kernels.{operation}", raising=False)
        model = place(copy.deepcopy(tiny_vlms.model("llava")), FIRST)
        with mmspec.enable(model, made):
            for kind in ROWS:
                assert torch.equal(answered(model, kind, FIRST).cpu(), stock(kind))
            answered(model, "ragged", FIRST, do_sample=True)
    assert len([w for w in told if "install triton" in str(w.message)]) == 1
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    with pytest.raises(ImportError):
        dispatch.chosen("uniform", "cuda", "triton")


# -- how a draft attends ---------------------------------------------------------------------------------------------


class Repeated(TorchDispatchMode):
    """The largest copy, in groups of heads, of what is longer than any draft here; and calls of sdpa."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.sdpa = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        self.sdpa += "scaled_dot_product" in name
        if name in ("clone", "repeat", "index_select", "cat") and out.dim() == 5 and out.shape[-2] > 16:
            self.largest = max(self.largest, out.numel())
        return out


def drafted(model: Any, drafter: Any, kind: str) -> tuple[Tensor, Repeated]:
    """An answer, and what its rounds copied."""
    rounds, read = Repeated(), vlm.VlmTarget.read

    def counted(self: Any, *given: Any) -> Any:
        with rounds:
            return read(self, *given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(facts, "mode_of", lambda model: torch.no_grad)  # in inference mode a copy may hide in a reshape
        patched.setattr(vlm.VlmTarget, "read", counted)
        with mmspec.enable(model, drafter):
            return answered(model, kind, FIRST), rounds


@pytest.mark.parametrize("by", ["kernel", "sdpa", "stock"])
@pytest.mark.every(2)
def test_a_draft_repeats_no_keys(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four heads share two of keys: by tree attention once it is proved here, else by sdpa in groups; stock repeats."""
    made = DRAFTERS["eagle"](tiny_vlms.model("llava"))
    tree_attention.trusted.cache_clear()
    told = nullcontext()
    if by == "sdpa":
        monkeypatch.setitem(cases.TOLERANCES["tree_attention"], torch.float32, (0.0, -1.0))
        told = pytest.warns(UserWarning, match="use sdpa on cuda:0 instead of tree attention: ")  # type: ignore[assignment]
    if by == "stock":
        monkeypatch.setattr(tree_attention, "for_drafts", lambda decoder: None)
    with Pretend(), told:
        model = place(copy.deepcopy(tiny_vlms.model("llava")), FIRST)
        before = [type(layer.self_attn) for layer in model.get_decoder().layers]
        drafted(model, made, "one")  # the kernel is checked meanwhile, by its definition
        for kind in ROWS:
            out, rounds = drafted(model, made, kind)
            assert torch.equal(out.cpu(), stock(kind))
            assert (rounds.largest > 0) == (by == "stock") and (rounds.sdpa == 0) == (by == "kernel")
        assert model.get_decoder().config._attn_implementation == "sdpa"
        assert [type(layer.self_attn) for layer in model.get_decoder().layers] == before
    tree_attention.trusted.cache_clear()


def test_a_chain_of_one_row_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """So flash attention, which takes none, can serve it; a tree needs one."""
    asked: list[Any] = []
    bias = tree_attention.causal_lower_right
    monkeypatch.setattr(tree_attention, "flash_serves", lambda *qkv: True)

    def noted(*size: int) -> Any:
        asked.append(size)
        found = bias(*size)
        found.__dict__["_pretended"] = FIRST  # it holds no numbers, and is anywhere
        return found

    monkeypatch.setattr(tree_attention, "causal_lower_right", noted)
    how = {"one": {"width": 1, "size": 5}, "tree": {"width": 3, "size": 14}}
    for tree, wanted in (("one", True), ("tree", False)):
        asked.clear()
        made = hostile_drafters.eagle(tiny_vlms.model("llava"), depth=4, **how[tree])
        with Pretend():
            model = place(copy.deepcopy(tiny_vlms.model("llava")), FIRST)
            with mmspec.enable(model, made):
                assert torch.equal(answered(model, "one", FIRST).cpu(), stock("one"))
        assert bool(asked) == wanted
        assert all(slots > nodes > 1 for nodes, slots in asked)


# -- pictures --------------------------------------------------------------------------------------------------------


def janus_split() -> Any:
    """Its last layer and the head for codes are on the second device."""
    model = copy.deepcopy(tiny_image_models.model("janus")).to(FIRST)
    text, spread = "model.language_model.layers.", {}
    for name, module in model.named_modules():
        if name.startswith(text):
            name = ".".join(name.split(".")[:4])
        if not [*module.children()] or name.startswith(text):
            there = name in (f"{text}2", "model.language_model.norm") or name.startswith("model.generation_head")
            spread[name] = str(SECOND if there else FIRST)
    return dispatch_model(model, spread, force_hooks=True)


@pytest.mark.parametrize("drafter", ["jacobi", "eagle"])
@pytest.mark.every(2)
def test_janus_draws_over_two_devices(drafter: str) -> None:
    call = tiny_image_models.PAINTERS["janus"].call(2)
    stock = tiny_image_models.draw(tiny_image_models.model("janus"), call)
    eagle = hostile_drafters.eagle(tiny_image_models.model("janus"), depth=3, width=2, size=6)
    made = eagle if drafter == "eagle" else drafter
    with Pretend():
        model = janus_split()
        there = {name: t.to(FIRST) if isinstance(t, Tensor) else t for name, t in call.items()}
        with mmspec.enable(model, made) as handle:
            assert torch.equal(tiny_image_models.draw(model, there).cpu(), stock)
        assert handle.stats.rounds


@pytest.mark.parametrize("how", ["moved", "offloaded"])
def test_a_mar_and_its_draft_draw_where_the_pipeline_is(how: str) -> None:
    """Speculation was enabled before the pipeline was moved."""
    pipe = tiny_mar.pipeline()
    pipe.enable_speculation(draft=tiny_mar.transformer(2), ahead=3)
    with Pretend():
        if how == "moved":
            place(pipe.transformer, FIRST)
            place(pipe.vae, FIRST)
        else:
            with pytest.raises(ValueError, match="not offloaded layer by layer"):
                pipe.enable_sequential_cpu_offload(device=FIRST)
            pipe.enable_model_cpu_offload(device=FIRST)
        drawn = pipe([1], generator=tiny_mar.seeded(1))
        assert home(drawn.tokens) == FIRST and drawn.images
        homes = {home(next(model.parameters())) for model in (pipe.transformer, pipe._speculation.draft)}
        assert homes == {FIRST if how == "moved" else torch.device("cpu")}


@pytest.mark.parametrize("drafter", ["jacobi", "eagle"])
@pytest.mark.every(2)
def test_an_offloaded_pipeline_drafts_where_it_draws(drafter: str) -> None:
    """Its parts lie on the CPU until they are asked for; the codes of a rule travel once."""
    how = {"class_labels": [3], "output_type": "latent"}
    with Pretend() as pretended:
        pipe = tiny_llamagen.pipeline("class", grid=3)
        pipe.enable_model_cpu_offload(device=FIRST)
        made = "jacobi" if drafter == "jacobi" else test_eagle_image.drafter(grid=3)
        options = {"window": 4} if drafter == "jacobi" else {}
        with mmspec.enable(pipe, made, rule="lantern(k=10, lam=2.0)", **options) as handle:
            patch = Patch.of(pipe)
            assert patch is not None and patch.target is not None and patch.target.device == FIRST
            for _ in range(2):
                pretended.copies.clear()
                assert home(pipe(**how, generator=torch.Generator().manual_seed(1)).tokens) == FIRST
        assert handle.stats.rounds and not [line for line in pretended.copies if "rules.py" in line]
