"""CUDA graphs of captured functions: on a tape that behaves as they do, and on a GPU where there is one."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pretend_graphs
import pretend_streams
import pytest
import tiny_vlms
import torch
import uncompiled
from compared import alone, as_stock, drain
from hostile_drafters import DRAFTERS, Oracle
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils._python_dispatch import TorchDispatchMode
from uncompiled import as_it_is

import mmspec
from mmspec.compile import capture, graphs, recording
from mmspec.compile.capture import PiecewiseFunction
from mmspec.drafters import feature
from mmspec.drafters.plain import Plain
from mmspec.pipelines.host import tree_attention
from mmspec.pipelines.host.cache import RaggedCache
from mmspec.pipelines.serving.continuous import ContinuousBatcher
from mmspec.pipelines.target import captures, vlm
from tests.compile.test_captured import block

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEPTH = 4


@pytest.fixture(params=["tape", pytest.param("cuda", marks=GPU)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where graphs are recorded; pieces are not compiled, and nothing may fall back."""
    uncompiled.pieces(monkeypatch)
    monkeypatch.delenv(graphs.VARIABLE, raising=False)
    if request.param == "cuda":
        return "cuda"
    monkeypatch.setattr(graphs, "wanted", lambda tensors: graphs.setting() != "off")
    monkeypatch.setattr(graphs, "Recorder", pretend_graphs.Tape)
    monkeypatch.setattr(pretend_graphs.Tape, "made", 0)
    return "cpu"


@pytest.fixture
def model(device: str) -> Any:
    return copy.deepcopy(tiny_vlms.model("llava")).to(device)


@pytest.fixture
def steady(device: str, model: Any) -> Any:
    """The model with attentions that a whole graph may hold."""
    needs_kernels(device)
    model.set_attn_implementation(tree_attention.NAME)
    return model


def needs_kernels(device: str) -> None:
    checks = pytest.importorskip("mmspec.kernels.checks")
    if device == "cpu" and not checks.INTERPRETED:
        pytest.skip("Triton is not interpreted")


def prompt(device: str, kind: str, seed: int = 1, rows: list[int] | None = None) -> dict[str, Tensor]:
    return {name: t.to(device) for name, t in tiny_vlms.prompt("llava", kind, seed, rows=rows).items()}


class Layers(nn.Module):
    """Attention layers, all alike but for their weights, and something that only the last piece needs."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(16, 48, bias=False) for _ in range(DEPTH))
        self.out = nn.ModuleList(nn.Linear(16, 16) for _ in range(DEPTH))

    def forward(self, x: Tensor, attend: Any = capture.attend) -> list[Tensor]:
        B, n, _ = x.shape
        early = x.sin()
        for layer, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = qkv(x).view(B, n, 6, 8).transpose(1, 2).chunk(3, 1)
            x = x + out(attend(layer, 0.5, q, k, v).transpose(1, 2).reshape(B, n, 16)).relu()
        return [x + early, x.argmax(-1)]


def attention(layer: int, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k * (1 + layer), v, scale=scale).transpose(1, 2).contiguous().transpose(1, 2)


def made(device: str, compile: Any = as_it_is) -> tuple[Layers, PiecewiseFunction, Callable[[], Tensor]]:
    """Layers, the same captured, and what makes new inputs."""
    layers, new = Layers().to(device), partial(torch.randn, 2, 3, 16, device=device)
    return layers, PiecewiseFunction(layers, [new()], layers.parameters(), compile), new


def near(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


class Copies(TorchDispatchMode):
    """Counts the copies into a place that stays, or from one."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        many = func is torch.ops.aten._foreach_copy_.default
        self.count += len(args[0]) if many else func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


# -- addresses --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_every_place_but_the_last_has_a_graph_and_runs_no_python(device: str) -> None:
    runs: list[Any] = []

    def counting(piece: Any, examples: list[Tensor]) -> Any:
        return lambda *given: runs.append(piece) or piece(*given)

    layers, captured, new = made(device, counting)
    assert captured.pieces == 3 and len(set(runs)) == 3
    assert device == "cuda" or pretend_graphs.Tape.made == DEPTH, "pieces are shared, weights are not"
    before, last = len(runs), runs[-1]
    for _ in range(3):
        x = new()
        near(captured(attention, x), layers(x, attention))
    assert runs[before:] == [last] * 3


@torch.no_grad()
def test_only_what_moves_is_copied(device: str) -> None:
    layers, captured, new = made(device)
    x = new()
    with Copies() as seen:
        captured(lambda layer, scale, q, k, v: q, x)
    assert seen.count == DEPTH, "the input, and of each attention but the last what it gave"
    layers.out[1].bias += 1  # written where it is
    near(captured(attention, x), layers(x, attention))


@torch.no_grad()
def test_weights_that_move_are_recorded_anew(device: str) -> None:
    layers, captured, new = made(device)
    x, recorded = new(), pretend_graphs.Tape.made
    captured(attention, x)
    for weight in (layers.out[2].weight, layers.qkv[0].weight):
        weight.data = torch.randn_like(weight)
        near(captured(attention, x), layers(x, attention))
    assert device == "cuda" or pretend_graphs.Tape.made == 3 * recorded


@torch.no_grad()
@pytest.mark.parametrize("back", [False, True])
def test_a_recording_that_breaks_off_is_begun_anew(back: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, captured, new = made(device)
    weight, x = layers.out[2].weight, new()
    old, weight.data = weight.data, torch.randn(16, 16, device=device)
    with monkeypatch.context() as broken:
        broken.setattr(captured._graphs, "_still", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            captured(attention, x)
    weight.data = old if back else weight.data
    for mode in (torch.inference_mode, nullcontext):
        with mode():
            near(captured(attention, x), layers(x, attention))


@torch.no_grad()
def test_what_leaves_stays_and_may_come_in_again(device: str) -> None:
    """Among it an input as it came in and a weight as it is."""
    weight = torch.randn(8, 8, device=device)

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        return [y @ weight / 3, (x + y).tanh(), x, weight.t()]

    x, y = (torch.randn(4, 8, device=device) for _ in range(2))
    captured = PiecewiseFunction(step, [x, y], [weight], as_it_is)
    mine, theirs = [[x, y]], [[x, y]]
    for _ in range(5):
        mine.append(captured(None, *mine[-1][:2]))  # type: ignore[arg-type]  # there is no attention
        theirs.append(step(*theirs[-1][:2]))
    near(mine, theirs)
    mine[-1][3].zero_()
    assert weight.abs().min() > 0
    assert device == "cuda" or pretend_graphs.Tape.made == 1, "the only piece is a graph"


@torch.no_grad()
def test_what_the_last_piece_makes_is_not_copied(device: str) -> None:
    """All else that leaves is: what an earlier piece made or a view of it, inputs, weights, what an attention gave."""
    weight = torch.randn(8, 8, device=device)

    def function(attend: Any, x: Tensor) -> list[Tensor]:
        early = x @ weight
        given = attend(0, 1.0, early, early * 2, early * 3)
        return [(given + early).sin(), (given @ weight)[:, 1], early, early[:, 1], x, x[:, 1], weight[1], given[:, 1]]

    inputs = [torch.randn(1, 2, 3, 8, device=device) for _ in range(4)]
    captured = PiecewiseFunction(partial(function, capture.attend), inputs[:1], [weight], as_it_is)

    def given(same: bool, layer: int, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q if same else q + k + v

    for same in (True, False):
        wanted = [function(partial(given, same), x) for x in inputs]
        with Copies() as seen:
            found = [captured(partial(given, same), x) for x in inputs]
        near(found, wanted)
        copied = 7 if same else 6  # the input, too; a new result of an attention is nobody's
        assert seen.count == len(inputs) * copied
        for t in (t for call in found for t in call):
            t.zero_()
        near(captured(partial(given, same), inputs[0]), wanted[0])


@torch.no_grad()
def test_what_comes_in_is_not_written(device: str) -> None:
    """Neither the example nor a weight, which is no place of a graph's own, though it never moves."""
    weight, example = torch.randn(8, device=device), torch.ones(8, device=device)
    captured = PiecewiseFunction(lambda x: [x * weight], [example], [weight], as_it_is)
    weight.data = before = weight.clone()
    near(captured(None, weight), [before * before])  # type: ignore[arg-type]
    near(captured(None, example + 1), [before * 2])  # type: ignore[arg-type]
    near([weight, example], [before, torch.ones_like(example)])


@pytest.mark.parametrize("modes", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode),
                                   (torch.inference_mode, nullcontext)])  # fmt: skip
def test_any_mode_will_do(modes: tuple[Any, Any], device: str) -> None:
    layers = Layers().to(device)
    with modes[0](), torch.no_grad():
        captured = PiecewiseFunction(layers, [torch.randn(2, 3, 16, device=device)], layers.parameters(), as_it_is)
    for mode in modes * 2:
        layers.out[0].bias.data = layers.out[0].bias.data + 1  # is recorded anew
        for again in (mode, *modes):
            with again():
                x = torch.randn(2, 3, 16, device=device)
                near([t.detach() for t in captured(attention, x)], [t.detach() for t in layers(x, attention)])


# -- threads ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_threads_take_turns(device: str) -> None:
    layers, captured, new = made(device)
    inside = threading.Barrier(2)

    def slowly(*given: Any) -> Tensor:
        time.sleep(0.002)  # in which the other would copy its own input to the same place
        return attention(*given)

    def calls(x: Tensor) -> list[list[Tensor]]:
        inside.wait(60)
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext():
            found = [captured(slowly, x + n) for n in range(4)]
            if device == "cuda":
                torch.cuda.current_stream().synchronize()
            return found

    inputs = [new(), new()]
    torch.cuda.synchronize() if device == "cuda" else None
    with ThreadPoolExecutor(2) as pool:
        for x, found in zip(inputs, pool.map(calls, inputs), strict=True):
            near(found, [layers(x + n, attention) for n in range(4)])


@torch.no_grad()
def test_one_records_at_a_time(device: str) -> None:
    """And whoever wants to record next does not even begin."""
    layers, other, new = made(device)
    layers.out[0].bias.data, x = torch.randn(16, device=device), new()
    asked: list[Future[Any]] = []

    def asks(piece: Any, examples: list[Tensor]) -> Any:
        def run(*given: Tensor) -> Any:
            if not asked:
                asked.append(pool.submit(other, attention, x))
                wait(asked, 0.3)
                assert not asked[0].done()
            return piece(*given)

        return run

    with ThreadPoolExecutor(1) as pool:
        made(device, asks)
        near(asked[0].result(60), layers(x, attention))


# -- what is not recorded ---------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_piece_that_waits_for_the_host_runs_as_it_is(device: str) -> None:
    compiled: list[Any] = []

    def second_asks(piece: Any, examples: list[Tensor]) -> Any:
        compiled.append(piece)
        return piece if len(compiled) != 2 else lambda *given: piece(*given) if given[0].sum().item() < 1e9 else None

    with pytest.warns(UserWarning, match="without a CUDA graph: ") as told:
        layers, captured, new = made(device, second_asks)
    assert len(told) == 1, f"one of {DEPTH - 1} places tells it for all"
    assert device == "cuda" or pretend_graphs.Tape.made == 1
    for _ in range(2):
        x = new()  # of random numbers, which torch refuses to draw after a recording that failed
        near(captured(attention, x), layers(x, attention))


@torch.no_grad()
def test_random_numbers_are_not_recorded(device: str) -> None:
    x = torch.ones(50, device=device)
    captured = PiecewiseFunction(lambda x: [x + torch.rand_like(x)], [x], [], as_it_is)
    first, second = (captured(None, x)[0] for _ in range(2))  # type: ignore[arg-type]
    assert pretend_graphs.Tape.made == 0 and not torch.equal(first, second)


def test_graphs_are_wanted_on_one_cuda_device_that_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(graphs, "proved", lambda device: asked.append(device) or device.index < 2)

    def wanted(*places: str) -> bool:
        return graphs.wanted([SimpleNamespace(device=torch.device(place)) for place in places])  # type: ignore[misc]

    for wish in (None, "", "auto"):
        monkeypatch.delenv(graphs.VARIABLE, raising=False) if wish is None else monkeypatch.setenv(
            graphs.VARIABLE, wish
        )
        assert wanted("cuda:0", "cuda:0") and asked == [torch.device("cuda:0")] and not wanted("cuda:2")
        asked.clear()
        assert not wanted("cuda:0", "cuda:1") and not wanted("cuda:0", "cpu") and not wanted("cpu") and not wanted()
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert not wanted("cuda:0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setenv(graphs.VARIABLE, "off")
    assert not wanted("cuda:0", "cuda:0") and not asked


def test_the_variable_is_heeded_and_checked(device: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = partial(tiny_vlms.generate, model, prompt(device, "text only"), max_new_tokens=3)
    wanted = generate()
    monkeypatch.setenv(graphs.VARIABLE, "off")
    with mmspec.enable(model, Plain(), compile=True):
        for wish, recorded in (("off", False), ("auto", True)):
            monkeypatch.setenv(graphs.VARIABLE, wish)
            assert torch.equal(generate(), wanted)
            (held,) = captures.of(model)._captures.values()
            assert bool(held._graphs) == recorded
        monkeypatch.setenv(graphs.VARIABLE, "on")
        with pytest.raises(ValueError, match="MMSPEC_GRAPHS='on' is not known; choose auto, pieces or off"):
            generate()


# -- end to end -------------------------------------------------------------------------------------------------------

TOKENS = 3  # of an answer
CASES = {  # drafter, kind, rows of each call
    "right": ("always right", "image first", [None, None]),
    "chain": ("eagle chain", "ragged", [[0, 2], [0]]),
    "tree": ("eagle tree", "ragged", [[0, 1]]),
    "block": ("block", "ragged", [[0, 2], [0]]),
}


def asked(case: str, model: Any) -> tuple[list[dict[str, Tensor]], list[Tensor], Any]:
    """The calls of a case, what stock answers, and the drafter."""
    name, kind, rows = CASES[case]
    calls = [prompt(model.device, kind, seed, some) for seed, some in enumerate(rows)]
    wanted = [tiny_vlms.generate(model, inputs, max_new_tokens=TOKENS) for inputs in calls]
    drafter = block(model) if name == "block" else DRAFTERS[name](model, Oracle.of(calls[0]["input_ids"], wanted[0]))
    return calls, wanted, drafter.to(model.device) if isinstance(drafter, nn.Module) else drafter


@pytest.mark.parametrize("case", CASES)
@pytest.mark.every(6)
def test_enabled_models_give_what_stock_gives(case: str, device: str, model: Any) -> None:
    calls, wanted, drafter = asked(case, model)
    weights = [*model.parameters(), *(drafter.parameters() if isinstance(drafter, nn.Module) else ())]
    with mmspec.enable(model, drafter, compile=True) as handle:
        for inputs, answer in zip(calls * 2, wanted * 2, strict=True):
            assert torch.equal(tiny_vlms.generate(model, inputs, max_new_tokens=TOKENS), answer)
        first = pretend_graphs.Tape.made
        assert handle.stats.drafted > 0 and (handle.stats.accepted > 0 or case != "right")
        for weight in weights:  # as `model.to` does
            weight.data = weight.data.clone()
        assert torch.equal(tiny_vlms.generate(model, calls[0], max_new_tokens=TOKENS), wanted[0])
        assert device == "cuda" or pretend_graphs.Tape.made > first > 0
    held = captures.of(model)
    assert held._captures and all(one._graphs for one in held._captures.values())
    assert [len(drafts._captures) > 0 for drafts in held.drafts.values()] == [True] * isinstance(drafter, nn.Module)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.every(4)
def test_steady_attentions_are_part_of_one_graph(case: str, steady: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the target and of the drafter; every call has another cache, and the second prompt another length."""
    calls, wanted, drafter = asked(case, steady)
    compared = checked_wholes(monkeypatch)
    monkeypatch.setattr(vlm, "_RESERVE", 0)  # buffers grow between two replays
    with mmspec.enable(steady, drafter, compile=True):
        for inputs, answer in zip(calls * 2, wanted * 2, strict=True):
            assert torch.equal(tiny_vlms.generate(steady, inputs, max_new_tokens=TOKENS), answer)
        assert len(compared) > 2 * len(calls)
        held = captures.of(steady)
        functions = [*held._captures.values(), *(one for own in held.drafts.values() for one in own._captures.values())]
        wholes = [list(one._graphs._wholes.values()) for one in functions]
        sizes = {len(inputs["input_ids"]) for inputs in calls}  # each batch size has graphs of its own
        assert len(wholes) >= len(sizes) * (2 if isinstance(drafter, nn.Module) else 1)
        assert all(len(each) == 1 and each[0] is not None for each in wholes)
        monkeypatch.setattr(graphs.Whole, "__call__", lambda *given: pytest.fail("a whole graph was run"))
        monkeypatch.setenv(graphs.VARIABLE, "pieces")
        assert torch.equal(tiny_vlms.generate(steady, calls[0], max_new_tokens=TOKENS), wanted[0])


def test_a_whole_graph_that_computes_something_else_is_not_used(steady: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = partial(tiny_vlms.generate, steady, prompt(steady.device, "text only"), max_new_tokens=8)
    wanted, right = generate(), captures.addressed
    monkeypatch.setattr(captures, "addressed", lambda *given: right(*given) * 1.5)
    with mmspec.enable(steady, Plain(), compile=True):
        with pytest.warns(UserWarning, match="in pieces, not as one CUDA graph: its outputs would be"):
            assert torch.equal(generate(), wanted)
        (one,) = captures.of(steady)._captures.values()
        assert list(one._graphs._wholes.values()) == [None]


@pytest.mark.every(2)
def test_rows_join_and_leave_between_replays(steady: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, lengths = ("image first", "text only", "image last", "text only"), (9, 4, 6, 7)
    prompts = [prompt(steady.device, kind, 3) for kind in kinds]
    wanted = [alone(steady, inputs, max_new_tokens=n) for inputs, n in zip(prompts, lengths, strict=True)]
    compared = checked_wholes(monkeypatch)
    with mmspec.enable(steady, "ngram", compile=True):
        ends = drain(ContinuousBatcher(steady, None, 2), prompts, own=[{"max_new_tokens": n} for n in lengths])
    assert [list(end.tokens) for end in ends] == wanted and len(compared) > 4


def checked_wholes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compare what each call of a whole graph gives with what the pieces give; the calls so far."""
    real, compared = graphs.Graphs._at_once, list[int]()

    def both(self: Any, whole: Any, weights: Any, attend: Any) -> Any:
        found = real(self, whole, weights, attend)
        if found is not None:
            mine = [t.clone() for t in found]
            torch.testing.assert_close(mine, list(whole(*self._places, *weights, attend)), rtol=1e-4, atol=1e-4)
            compared.append(1)
        return found

    monkeypatch.setattr(graphs.Graphs, "_at_once", both)
    return compared


def test_the_check_of_a_whole_graph_compares_numbers_masks_and_choices(device: str) -> None:
    held = graphs.Graphs([torch.ones(1, device=device)], attention, capture.compare)
    numbers = torch.tensor([[1.0, -torch.inf, 3.0, torch.finfo(torch.float32).min]], device=device)
    tokens, nothing = torch.tensor([[5, 6, 7, 8]], device=device), torch.zeros(1, 4, device=device)
    held._checked([numbers + 1e-6, tokens, nothing], [numbers, tokens, nothing], torch.float32)
    held._checked([tokens + torch.tensor([0, 0, 1, 1], device=device)], [tokens], torch.float32)
    for mine, wanted in (
        (numbers + 0.1, numbers), (numbers.clamp(min=-5), numbers), (tokens + 1, tokens), (nothing + 0.1, nothing),
        (torch.full_like(numbers, torch.nan), numbers),
    ):  # fmt: skip
        with pytest.raises((capture.Uncapturable, RuntimeError), match=r"it would|its outputs"):
            held._checked([mine], [wanted], torch.float32)


def test_a_draft_that_needs_more_room_is_not_recorded(device: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_kernels(device)
    real = feature.MemoryAttention
    monkeypatch.setattr(feature, "MemoryAttention", lambda *given: real(*given[:-1], 1))
    generate = partial(tiny_vlms.generate, model, prompt(device, "text only"), max_new_tokens=8)
    wanted = generate()
    with mmspec.enable(model, DRAFTERS["eagle chain"](model, None).to(device), compile=True):
        with pytest.warns(UserWarning, match="does not fit into the memory"):
            assert torch.equal(generate(), wanted)
        (drafts,) = captures.of(model).drafts.values()
        assert [list(one._graphs._wholes.values()) for one in drafts._captures.values()] == [[None]]


def test_the_table_of_a_cache_follows_its_buffers() -> None:
    """And keeps none of them alive."""
    cache = RaggedCache(2, torch.device("cpu"), 4)
    cache.update(*torch.zeros(2, 2, 1, 3, 4), 0)
    cache.advance(3)

    def addresses() -> list[int]:
        found = cache.addresses(1, None)
        assert found is not None
        return found[0][0, :2].tolist()

    def now() -> list[int]:
        return [t.data_ptr() for t in (cache.slots[0].keys, cache.slots[0].values) if t is not None]

    first, old = addresses(), weakref.ref(cache.slots[0].keys)
    assert first == now()
    cache.advance(9)
    assert addresses() == now() != first and old() is None and cache.slots[0].keys.shape[2] >= 13
    copied = copy.deepcopy(cache)
    assert copied.addresses(1, None)[0][0, 0] == copied.slots[0].keys.data_ptr() != now()[0]
    cache.slots[0].values = cache.slots[0].values.bfloat16()
    assert cache.addresses(1, None) is None


@pytest.mark.parametrize("attention", ["sdpa", "steady"])
def test_pictures_are_those_of_the_seed(attention: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    if attention == "steady":
        needs_kernels(device)
    monkeypatch.setattr(tree_attention, "used", lambda device: attention == "steady")
    import tiny_llamagen

    pipe = tiny_llamagen.pipeline("class").to(device)
    labels = [3] if (device, attention) == ("cpu", "steady") else [3, 8]  # interpreted kernels are slow

    def draw() -> Tensor:
        seeds = [torch.Generator(device).manual_seed(7 + b) for b in range(len(labels))]
        return pipe(class_labels=labels, generator=seeds, output_type="latent", guidance_scale=2.0).tokens

    plain = draw()
    with mmspec.enable(pipe, "jacobi", window=5, reproducible=True, compile=True) as handle:
        assert all(torch.equal(draw(), plain) for _ in range(2)) and handle.stats.accepted > 0
    assert device == "cuda" or pretend_graphs.Tape.made > 0
    wholes = [one for each in captures.of(pipe.transformer)._captures.values() for one in each._graphs._wholes.values()]
    assert (len(wholes) > 0 and None not in wholes) == (attention == "steady")


def test_denoising_steps_feed_the_next(device: str) -> None:
    pytest.importorskip("diffusers")
    import tiny_mar

    from mmspec.compile import mar as mar_compiled

    pipe = tiny_mar.pipeline().to(device)
    settings = {"output_type": "latent", "guidance_scale": 1.5}
    for labels in ([1], [0, 2]):
        want, got = (pipe(labels, generator=tiny_mar.seeded(*labels), compile=c, **settings) for c in (False, True))
        near(got.tokens, want.tokens)
    held = mar_compiled.of(pipe.transformer.diffloss)._captures
    assert held and all(step._graphs for step in held.values())


# -- trust ------------------------------------------------------------------------------------------------------------


class Silent(pretend_graphs.Tape):
    """Computes nothing when it is played."""

    def __call__(self, function: Any, inputs: Any) -> Any:
        return super().__call__(function, inputs)[0], lambda: None


class Frozen(pretend_graphs.Tape):
    """Gives what it gave at the recording."""

    def __call__(self, function: Any, inputs: Any) -> Any:
        return list(function(*inputs)), lambda: None


@pytest.mark.parametrize("wrong", [Silent, Frozen])
def test_a_wrong_graph_is_found_before_it_is_used(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    uncompiled.pieces(monkeypatch)
    monkeypatch.setattr(graphs, "wanted", lambda tensors: True)
    monkeypatch.setattr(graphs, "Recorder", wrong)
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "image first")
    generate = partial(tiny_vlms.generate, model, inputs, max_new_tokens=3)
    wanted = generate()
    with mmspec.enable(model, Plain(), compile=True), pytest.warns(UserWarning, match="uncompiled: its outputs"):
        assert torch.equal(generate(), wanted)


# -- what touches CUDA ------------------------------------------------------------------------------------------------


@pytest.fixture(params=pretend_streams.RULES)
def books(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> pretend_streams.Cuda:
    """How a release of torch keeps the work spaces of cuBLAS; `unshared` gives streams of its own."""
    cuda = pretend_streams.Cuda(request.param)
    monkeypatch.setattr(recording.torch, "cuda", cuda)
    monkeypatch.setattr(recording, "unshared", cuda.unshared)
    monkeypatch.setattr(Tensor, "__matmul__", lambda a, b: cuda.multiplied(a, b))
    return cuda


def test_graphs_outlive_those_that_were_let_go_and_threads_that_ended(books: pretend_streams.Cuda) -> None:
    """In every release; the same is what `proved` tries on a device, in the middle of a call that may draw."""
    before = torch.get_rng_state()
    assert recording._wrong(torch.device("cpu"), recording.Recorder) == ""
    assert torch.equal(torch.get_rng_state(), before)


class OnAnyStream(recording.Recorder):
    """Records on a stream of torch's, on which it has warmed up: what a work space of the stream does not survive."""

    def __call__(self, function: Any, inputs: Any) -> Any:
        self.stream = self.stream or torch.cuda.Stream(self.device)
        with torch.cuda.stream(self.stream):
            function(*inputs)
        return super().__call__(function, inputs)


def test_streams_that_are_shared_would_be_noticed(books: pretend_streams.Cuda) -> None:
    with pytest.raises(pretend_graphs.Gone):
        recording._wrong(torch.device("cpu"), OnAnyStream)


def test_a_device_that_is_not_proved_is_told_of_once(
    books: pretend_streams.Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "Recorder", OnAnyStream)
    recording.proved.cache_clear()
    with pytest.warns(UserWarning, match="records no CUDA graphs on cpu: Gone: ") as told:
        assert [recording.proved(torch.device("cpu")) for _ in range(2)] == [False, False]
    recording.proved.cache_clear()
    assert len(told) == 1


def test_a_piece_is_recorded_without_holding_others_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm, on a stream of its own, into the one pool; nobody waits for the device, and nothing is freed."""
    told: list[Any] = []

    class On:
        def __init__(self, *what: Any) -> None:
            self.what = what

        def __enter__(self) -> None:
            told.append(self.what)

        def __exit__(self, *_: Any) -> None:
            told.append("end")

    class Graph:
        replay = "replay"

        def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
            told.append((pool, capture_error_mode, gc.isenabled()))

        def capture_end(self) -> None:
            told.append("recorded")

    def stream(name: str) -> Any:
        return SimpleNamespace(
            name=name, wait_stream=lambda other: told.append((name, "after", other.name)),
            synchronize=lambda: told.append((name, "is done")),
        )  # fmt: skip

    here, there, own = stream("here"), stream("there"), stream("own")
    now = [here]
    fake = SimpleNamespace(
        graph_pool_handle=lambda: "pool", Stream=lambda: stream("warm"), current_stream=lambda device=None: now[-1],
        CUDAGraph=Graph, device=lambda device: On("device", device), stream=lambda stream: On("stream", stream.name),
    )  # fmt: skip
    monkeypatch.setattr(recording.torch, "cuda", fake)
    monkeypatch.setattr(recording, "unshared", lambda device: told.append("unshared") or own)
    monkeypatch.setattr(gc, "collect", lambda: told.append("collected"))
    recorder = recording.Recorder("cuda:0")  # type: ignore[arg-type]
    run = [("stream", "own"), ("pool", "thread_local", False), "run", "recorded", "end", "end"]
    for made in (["unshared"], []):
        assert recorder(lambda x: told.append("run") or (x,), [1]) == ([1], "replay")  # type: ignore[list-item]
        assert told == [
            ("device", "cuda:0"), ("warm", "after", "here"), ("stream", "warm"), *["run"] * recording.WARM_UPS, "end",
            ("here", "after", "warm"), *made, *run,
        ] and gc.isenabled()  # fmt: skip
        told.clear()
    for current in (here, there, there, here):
        now.append(current)
        recorder.follow()
    assert told == [("there", "after", "here"), ("here", "after", "there")]
    recorder.rest()
    assert told[-1] == ("here", "is done")


@torch.no_grad()
def test_two_hundred_calls_leave_nothing_behind(device: str) -> None:
    layers, captured, new = made(device)
    x, recorded = new(), pretend_graphs.Tape.made

    def held() -> int:
        gc.collect()
        if device == "cuda":
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated()
        return sum(t.untyped_storage().nbytes() for t in gc.get_objects() if isinstance(t, Tensor))

    captured(attention, x)
    before = held()
    for _ in range(200):
        found = captured(attention, x)
    near(found, layers(x, attention))
    del found
    assert held() == before and pretend_graphs.Tape.made == recorded


@GPU
def test_a_stream_of_the_drivers_is_its_own() -> None:
    torch.zeros(1, device="cuda")
    found = [recording.unshared(torch.device("cuda:0")) for _ in range(40)]
    assert len({stream.cuda_stream for stream in found}) == 40
    with torch.cuda.stream(found[0]):
        x = torch.ones(8, device="cuda") + 1
    found[0].synchronize()
    assert x.sum().item() == 16


@GPU
def test_graphs_are_proved_here() -> None:
    assert recording.proved(torch.device("cuda", torch.cuda.current_device()))


@GPU
def test_compiled_by_the_compiler_is_stock_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    uncompiled.pieces(monkeypatch, None)
    model, inputs = copy.deepcopy(tiny_vlms.model("llava")).to("cuda"), prompt("cuda", "image first")
    drafter = DRAFTERS["eagle chain"](model, None).to("cuda")
    as_stock(model, inputs, drafter, times=3, compile=True)
    assert all(one._graphs for one in captures.of(model)._captures.values())


def test_two_threads_capture_one_after_the_other() -> None:
    """torch patches what all threads share while it traces and compiles."""
    inside: list[int] = []
    seen: list[int] = []

    def slowly(x: Tensor) -> list[Tensor]:
        inside.append(1)
        time.sleep(0.05)
        seen.append(len(inside))
        inside.pop()
        return [x + 1]

    def captured() -> None:
        PiecewiseFunction(slowly, [torch.zeros(2, 3)], [], as_it_is)

    threads = [threading.Thread(target=captured) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) >= 3 and set(seen) == {1}
