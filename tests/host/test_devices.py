"""Models that are moved, cast, offloaded, quantized or shared by processes after they were loaded, or enabled."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import accelerate
import pytest
import tiny_llamagen
import tiny_vlms
import torch
import transformers as T
import uncompiled
from compared import as_stock, refused_or_stock
from hostile_drafters import eagle, feature_drafter
from torch import nn

import mmspec
from mmspec import rules
from mmspec.kernels import few_rows
from mmspec.pipelines.host import decoder, devices
from mmspec.pipelines.host.names import CACHE
from mmspec.pipelines.patch import UnsupportedError

SHORT = {"max_new_tokens": 8}


def model() -> Any:
    return copy.deepcopy(tiny_vlms.model("llava"))


def inputs(dtype: torch.dtype = torch.float32, kind: str = "ragged") -> dict[str, Any]:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tiny_vlms.prompt("llava", kind).items()}


def facts(drafter: nn.Module) -> list[Any]:
    return [drafter.training, *((t.data_ptr(), t.dtype, t.device, t.sum().item()) for t in drafter.parameters())]


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("cast", ["double", "half", "bfloat16"])
@pytest.mark.parametrize("method", ["eagle", "flash"])
@pytest.mark.every(8)
def test_a_model_that_is_cast_after_it_was_enabled(method: str, cast: str, auto: bool) -> None:
    fast, own = model(), feature_drafter(method, model())
    before = facts(own)
    with mmspec.enable(fast, own, auto=auto) as handle:
        tiny_vlms.generate(fast, inputs(), **SHORT)
        getattr(fast, cast)()
        out = tiny_vlms.generate(fast, inputs(fast.dtype), **SHORT)
        assert {t.dtype for t in handle.drafter.parameters()} == {fast.dtype} and handle.stats.drafted
        fitted = handle.drafter
        tiny_vlms.generate(fast, inputs(fast.dtype), **SHORT)
        assert handle.drafter is fitted and facts(own) == before
    stock = tiny_vlms.generate(getattr(model(), cast)(), inputs(fast.dtype), **SHORT)
    assert torch.equal(out, stock) if cast == "double" else out.shape == stock.shape


@pytest.mark.parametrize(("vision", "text"), [("float", "bfloat16"), ("bfloat16", "float")])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
@pytest.mark.every(2)
def test_a_tower_in_another_precision(name: str, vision: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own dtype is then the tower's, which comes first."""
    uncompiled.pieces(monkeypatch, forwards=False)
    mixed, told = copy.deepcopy(tiny_vlms.model(name)), tiny_vlms.prompt(name, "image first")
    for module in (mixed, mixed.get_decoder(), mixed.lm_head):
        getattr(module, vision if module is mixed else text)()
    told = {key: t.to(mixed.dtype) if t.is_floating_point() else t for key, t in told.items()}
    for compile in (False, True):
        as_stock(mixed, told, eagle(mixed, depth=3, width=2, size=6), call=SHORT, compile=compile)


HYBRIDS = {"qwen3_5": "linear_attn", "lfm2_vl": "conv"}  # the name of a recurrent layer


@pytest.mark.parametrize("compile", [False, True], ids=["", "compile"])
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.every(2)
def test_recurrent_layers_with_hooks_of_accelerate(name: str, compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their forward is one of the instance, which hides that of its class."""
    uncompiled.pieces(monkeypatch, forwards=False)
    hooked = copy.deepcopy(tiny_vlms.model(name))
    accelerate.dispatch_model(hooked, {"model": "cpu", "lm_head": "cpu"}, force_hooks=True)
    for drafter in ("plain", eagle(hooked, depth=3, width=2, size=6)):
        as_stock(hooked, tiny_vlms.prompt(name, "image first"), drafter, call=SHORT, compile=compile)


@pytest.mark.parametrize("name", HYBRIDS)
def test_hooks_that_come_and_go_while_a_model_is_enabled(name: str) -> None:
    moved, told = copy.deepcopy(tiny_vlms.model(name)), tiny_vlms.prompt(name, "image first")
    stock = tiny_vlms.generate(moved, told, **SHORT)
    layers = [part for path, part in moved.named_modules() if path.endswith(HYBRIDS[name])]
    for _ in range(2):
        with mmspec.enable(moved, "ngram"):
            accelerate.dispatch_model(moved, {"model": "cpu", "lm_head": "cpu"}, force_hooks=True)
            assert torch.equal(tiny_vlms.generate(moved, told, **SHORT), stock)
        assert torch.equal(tiny_vlms.generate(moved, told, **SHORT), stock)
        with mmspec.enable(moved, "ngram"):
            accelerate.hooks.remove_hook_from_submodules(moved)
            assert torch.equal(tiny_vlms.generate(moved, told, **SHORT), stock)
        assert torch.equal(tiny_vlms.generate(moved, told, **SHORT), stock)
        assert not any("_old_forward" in vars(layer) for layer in layers)


@pytest.mark.parametrize("name", HYBRIDS)
def test_recurrent_layers_whose_forward_somebody_replaced(name: str) -> None:
    theirs, told = copy.deepcopy(tiny_vlms.model(name)), tiny_vlms.prompt(name, "image first")
    stock = tiny_vlms.generate(theirs, told, **SHORT)
    layer = next(part for path, part in theirs.named_modules() if path.endswith(HYBRIDS[name]))
    with mmspec.enable(theirs, "plain", on_unsupported="fallback"):
        layer.forward = MethodType(type(layer).forward, layer)  # as transformers' kernels do
        with pytest.warns(UserWarning, match="has a forward of its own, which cannot read drafts"):
            assert torch.equal(tiny_vlms.generate(theirs, told, **SHORT), stock)


def test_one_drafter_on_two_targets() -> None:
    first, second = model(), model().to(torch.bfloat16)
    own, stock = eagle(first), tiny_vlms.generate(model(), inputs(), **SHORT)
    before = facts(own)
    with mmspec.enable(first, own) as one, mmspec.enable(second, own) as two:
        assert tiny_vlms.generate(second, inputs(torch.bfloat16), **SHORT).shape == stock.shape
        assert torch.equal(tiny_vlms.generate(first, inputs(), **SHORT), stock)
        assert one.drafter.block is own.block and two.drafter.block is not own.block  # copied where it has to be
        assert facts(own) == before and not two.drafter.training


def test_what_is_trained_on_is_drafted_with_where_nothing_moves() -> None:
    fast, own = model(), eagle(model())
    with mmspec.enable(fast, own) as handle, torch.no_grad():
        own.fc.weight.zero_()
        assert not handle.drafter.fc.weight.any() and own.training and not handle.drafter.training


@pytest.mark.parametrize("drafter", ["ngram", "eagle"])
def test_weights_that_accelerate_offloads(drafter: str) -> None:
    fast, stock = model(), tiny_vlms.generate(model(), inputs(), **SHORT)
    own = eagle(fast) if drafter == "eagle" else drafter
    accelerate.cpu_offload(fast, execution_device=torch.device("cpu"))
    assert fast.get_input_embeddings().weight.device.type == "meta"
    with mmspec.enable(fast, own) as handle:
        assert torch.equal(tiny_vlms.generate(fast, inputs(), **SHORT), stock) and handle.target.device.type == "cpu"
    if drafter == "eagle":
        assert {t.device.type for t in own.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    ("drafter", "call", "options"),
    [
        ("recycle", {}, {}),
        ("recycle", {}, {"prefix_cache": "4MB"}),
        ("flash", {}, {}),
        ("suffix", {"do_sample": True}, {}),
        ("ngram", {"do_sample": True}, {"reproducible": True}),
    ],
)
def test_the_default_device_is_another(drafter: str, call: dict[str, Any], options: dict[str, Any]) -> None:
    own, prompts, found = model(), [inputs(kind="ragged"), *[inputs(kind="image first")] * 2], []
    made = feature_drafter(drafter, own) if drafter == "flash" else drafter
    few_rows._dtypes.cache_clear()
    for device in ("meta", "cpu"):
        torch.manual_seed(3)
        with torch.device(device), mmspec.enable(own, made, **options):
            found += [tiny_vlms.generate(own, prompt, **SHORT, **call) for prompt in prompts]
    assert all(torch.equal(a, b) for a, b in zip(found[:3], found[3:], strict=True))


def test_a_rule_carries_its_table_to_a_device_once() -> None:
    table = rules._DeviceTable(torch.arange(4))
    away = table.on(torch.device("meta"))
    assert away.device.type == "meta" and table.on(away.device) is away
    assert table.on(torch.device("cpu")).tolist() == [0, 1, 2, 3]


def test_columns_chosen_by_all_tokens() -> None:
    """bitsandbytes in 8 bits: which columns it keeps in 16 bits depends on the other tokens of a forward."""

    class Linear8bitLt(nn.Linear):
        state = SimpleNamespace(threshold=6.0)

    quantized = copy.deepcopy(model())
    quantized.lm_head.__class__ = Linear8bitLt
    with pytest.raises(UnsupportedError, match=r"Linear8bitLt layers keep .* load the model with llm_int8_threshold=0"):
        mmspec.enable(quantized, "ngram")
    Linear8bitLt.state.threshold = 0.0
    mmspec.disable(mmspec.enable(quantized, "ngram").model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dynamic_layers_in_float16_have_no_scale() -> None:
    quantized = torch.ao.quantization.quantize_dynamic(model(), {nn.Linear}, dtype=torch.float16)
    as_stock(quantized, inputs(kind="image first"), "ngram", call=SHORT)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("part", [None, "model", "lm_head"])
def test_layers_with_one_scale_for_all_tokens(part: str | None) -> None:
    """`quantize_dynamic`: several nodes in one forward are not what single steps are."""
    whole, quantized = model(), model()
    if part is None:
        quantized = torch.ao.quantization.quantize_dynamic(quantized, {nn.Linear})
    elif part == "model":
        quantized.model = torch.ao.quantization.quantize_dynamic(quantized.model, {nn.Linear})
    else:
        quantized.lm_head = torch.ao.quantization.quantize_dynamic(nn.Sequential(quantized.lm_head), {nn.Linear})[0]
    stock = tiny_vlms.generate(quantized, inputs(kind="image first"), **SHORT)
    with pytest.raises(UnsupportedError, match="one scale for all tokens of a forward"):
        mmspec.enable(quantized, "ngram")
    with pytest.warns(UserWarning, match="mmspec leaves .* as it is: its Linear layers quantize their input") as said:
        mmspec.enable(quantized, "ngram", on_unsupported="fallback")
    assert said[0].filename == __file__
    assert torch.equal(tiny_vlms.generate(quantized, inputs(kind="image first"), **SHORT), stock)
    with mmspec.enable(whole, "ngram", on_unsupported="fallback"):
        whole.lm_head, whole.model = quantized.lm_head, quantized.model
        with pytest.warns(UserWarning, match="runs the stock path: its Linear layers"):
            assert torch.equal(tiny_vlms.generate(whole, inputs(kind="image first"), **SHORT), stock)


class PerTensor:
    pass


def test_weights_of_torchao_that_scale_all_tokens_together() -> None:
    """By their settings: the package is not here."""
    one = model()
    weight = one.lm_head.weight.detach().as_subclass(type("Int8Tensor", (torch.Tensor,), {}))
    one.lm_head.weight = nn.Parameter(weight, requires_grad=False)
    assert decoder.shared_scale(one) is None
    one.lm_head.weight.act_quant_kwargs = SimpleNamespace(granularity=PerTensor())
    assert "Linear layers quantize" in str(decoder.shared_scale(one))


@pytest.mark.parametrize("options", [{}, {"compile": True, "prefix_cache": "10MB"}])
def test_a_sparse_head(options: dict[str, Any]) -> None:
    """Products with it refuse inference mode."""
    sparse = copy.deepcopy(model())
    sparse.lm_head.weight = nn.Parameter(sparse.lm_head.weight.detach().to_sparse_csr(), requires_grad=False)
    try:
        stock = tiny_vlms.generate(sparse, inputs(kind="text only"), **SHORT)
    except RuntimeError as error:
        pytest.skip(f"torch {torch.__version__} has no such head: {error}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is not compiled
        with mmspec.enable(sparse, "ngram", **options):
            assert torch.equal(tiny_vlms.generate(sparse, inputs(kind="text only"), **SHORT), stock)


# -- caches that offload ---------------------------------------------------------------------------------------------


class _Stream(nullcontext):
    """Of work on a GPU, where there is none."""

    def wait_stream(self, _: Any) -> None: ...


@pytest.mark.parametrize("filled", [False, True])
def test_an_offloading_cache_is_not_replaced_by_one_that_stays(filled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch, "Stream", _Stream)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: _Stream())

    def answer(fast: Any, asked: dict[str, Any], **call: Any) -> Any:
        if not filled:
            return tiny_vlms.generate(fast, asked, **call, cache_implementation="offloaded")
        cache = T.DynamicCache(offloading=True)
        text = {name: t for name, t in asked.items() if t.dim() == 2}
        with torch.no_grad():
            fast(**{**asked, **{name: t[:, :-1] for name, t in text.items()}}, **{CACHE: cache})
        return tiny_vlms.generate(fast, text, **call, **{CACHE: cache})

    refused_or_stock(model(), inputs(kind="image first"), "an offloading cache", draw=answer, **SHORT)


# -- processes that share a model ------------------------------------------------------------------------------------


def test_auto_is_refused_where_processes_share_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = model()
    monkeypatch.setattr(type(fast), "_tp_size", 2, raising=False)
    with pytest.raises(ValueError, match="auto measures its rounds in each process separately"):
        mmspec.enable(fast, "ngram", auto=True)
    mmspec.enable(fast, "ngram").disable()


def test_weights_spread_over_a_mesh_are_shared() -> None:
    from torch import distributed
    from torch.distributed.tensor import distribute_module, init_device_mesh

    layer = nn.Linear(4, 4)
    assert not devices.shared(layer)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        assert devices.shared(distribute_module(layer, init_device_mesh("cpu", (1,))))
    finally:
        distributed.destroy_process_group()


RANK = """
import sys, types
import torch
from torch import distributed
from mmspec.pipelines.host import devices

rank, path = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", store=distributed.FileStore(path, 2), rank=rank, world_size=2)
for shape, names in (((2,), None), ((1, 2), ("fsdp", "tp"))):
    mesh = distributed.init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = types.SimpleNamespace(_tp_size=2, _device_mesh=mesh)
    print(devices.agreed(model, [2**61 + rank, rank]), end=" ")
print(devices.agreed(types.SimpleNamespace(), [rank]))
distributed.destroy_process_group()
"""


@pytest.mark.full
def test_processes_that_share_a_model_draw_alike(tmp_path: Path) -> None:
    """On a mesh of their own, and on one with other axes."""
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=300)[0].strip() for rank in ranks]
    assert told == [f"[{2**61}, 0] [{2**61}, 0] [{rank}]" for rank in range(2)]


# -- pipelines that draw ---------------------------------------------------------------------------------------------


def test_a_pipeline_that_is_cast_after_it_was_enabled() -> None:
    pipe = tiny_llamagen.pipeline("class")
    with mmspec.enable(pipe, "jacobi", window=4) as handle:
        pipe.to(torch.float64)
        pipe(class_labels=[3], output_type="latent")
        assert handle.target.dtype == torch.float64
