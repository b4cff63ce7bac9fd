"""The life of a patch: on and off, nested, copied, wrapped, in threads, and gone with its model."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_vlms
import torch
import transformers as T
from hostile_drafters import DRAFTERS, Oracle, Scripted, eagle
from torch import Tensor, nn
from torch.nn.utils import parametrize

import mmspec
from mmspec.compile.version import version
from mmspec.drafters.ngram import NgramDrafter
from mmspec.pipelines.patching.handle import Patch
from mmspec.types import Draft


def fresh(name: str = "llava") -> Any:
    """A tiny model that no other test holds."""
    return tiny_vlms.model.__wrapped__(name)


def prompt(kind: str = "image first", **more: Any) -> dict[str, Tensor]:
    return tiny_vlms.prompt("llava", kind, **more)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def of(drafter: str, model: Any) -> Any:
    return DRAFTERS[drafter](model, Oracle({}))


# -- memory ----------------------------------------------------------------------------------------------------------


LAST = ("disabled", "disabled by its handle", "left its with", "enabled again", "enabled")


@pytest.mark.parametrize("drafter", ["ngram", "eagle tree"])
@pytest.mark.parametrize("state", LAST)
@pytest.mark.every(3)
def test_a_model_goes_with_its_last_reference(no_collector: None, state: str, drafter: str) -> None:
    """By counting references alone, with the handle in hand once it is not in force: a GPU's memory is wanted back."""
    model = fresh()
    made = of(drafter, model) if drafter != "ngram" else NgramDrafter()
    drafted, alive = weakref.ref(made), weakref.ref(model)
    handle = mmspec.enable(model, drafter=made)
    tiny_vlms.generate(model, prompt("ragged"))
    if state == "disabled":
        mmspec.disable(model)
    elif state == "disabled by its handle":
        handle.disable()
    elif state == "left its with":
        with handle:
            tiny_vlms.generate(model, prompt())
    elif state == "enabled again":
        mmspec.enable(model)
    assert handle.model is model
    if state == "enabled":
        del handle, model
    else:
        del model
        with pytest.raises(ReferenceError, match="keep the model"):
            _ = handle.model
        handle.disable()
        assert "gone" in repr(handle)
        del handle
    assert alive() is None
    del made
    assert drafted() is None, "and its drafter with it"


def test_a_handle_keeps_its_model_while_it_is_in_force() -> None:
    with mmspec.enable(fresh()) as handle:
        with mmspec.enable(handle.model):
            pass
        tiny_vlms.generate(handle.model, prompt())
    assert handle.stats.tokens == 24
    handle = mmspec.enable(fresh())
    with mmspec.enable(handle.model, drafter="ngram"):
        pass
    gc.collect()
    tiny_vlms.generate(handle.model, prompt())
    assert handle.stats.tokens == 24


def test_assistants_that_calls_named_go() -> None:
    """All but the last two, and these with `disable`, though the handle is kept."""
    model, call = tiny_vlms.text(), {"input_ids": torch.randint(5, 90, (1, 9)), "max_new_tokens": 4}
    handle, alive = mmspec.enable(model), weakref.WeakSet[Any]()
    for _ in range(4):
        alive.add(assistant := tiny_vlms.text(num_hidden_layers=1))
        model.generate(**call, assistant_model=assistant)
    del assistant
    gc.collect()
    assert len(alive) == 2
    mmspec.disable(model)
    gc.collect()
    assert not alive and handle.stats.rounds > 0


def test_many_rounds_of_on_and_off_leave_nothing(no_collector: None) -> None:
    model = fresh()
    drafters = [of("ngram", model), of("eagle tree", model)]

    def turn(count: int) -> int:
        for index in range(count):
            mmspec.enable(model, drafter=drafters[index % 2])
            if index % 3 == 0:
                mmspec.enable(model)
            if index % 5 == 0:
                with mmspec.enable(model, drafter=drafters[1]):
                    pass
            mmspec.disable(model)
        gc.collect()
        return len(gc.get_objects())

    turn(3)
    before = turn(10)
    assert abs(turn(100) - before) < 50
    assert type(model) is T.LlavaForConditionalGeneration


# -- on and off ------------------------------------------------------------------------------------------------------


def test_leaving_an_inner_with_gives_back_the_outer_one() -> None:
    model = fresh()
    with mmspec.enable(model, drafter="ngram") as outer:
        with mmspec.enable(model, drafter=of("eagle tree", model)) as inner:
            with mmspec.enable(model, drafter=of("eagle-3", model)) as innermost:
                tiny_vlms.generate(model, prompt())
            tiny_vlms.generate(model, prompt())
        tiny_vlms.generate(model, prompt())
        assert [h.stats.tokens for h in (outer, inner, innermost)] == [24, 24, 24]
        assert mmspec.stats(model) is outer.stats
    assert type(model) is T.LlavaForConditionalGeneration


def test_a_with_gives_back_what_stood_there_however() -> None:
    """An `enable` without `with` comes back after one; what was disabled or enabled inside of a `with` stays so."""
    model = fresh()
    plain = mmspec.enable(model, depth=2)
    with mmspec.enable(model, depth=3):
        assert mmspec.stats(model) is not plain.stats
    assert mmspec.stats(model) is plain.stats
    with mmspec.enable(model, depth=4) as handle:
        mmspec.disable(model)
    assert type(model) is T.LlavaForConditionalGeneration
    with mmspec.enable(model, depth=4) as handle:
        plain = mmspec.enable(model, depth=5)
    assert mmspec.stats(model) is plain.stats
    mmspec.disable(model)
    with pytest.raises(ZeroDivisionError), mmspec.enable(model), mmspec.enable(model):
        _ = handle.stats.tokens / 0
    assert type(model) is T.LlavaForConditionalGeneration
    with pytest.raises(mmspec.UnsupportedError, match="not enabled"):
        mmspec.stats(model)


def test_withs_that_end_in_another_order() -> None:
    """As those of two threads may: the last one wins, and leaves what was there when it was enabled."""
    model = fresh()
    first, second = mmspec.enable(model, depth=2), None
    first.__enter__()
    second = mmspec.enable(model, depth=3)
    second.__enter__()
    first.__exit__()
    assert mmspec.stats(model) is second.stats
    second.__exit__()
    assert mmspec.stats(model) is first.stats


def test_a_patch_that_cannot_be_put_on_leaves_the_one_before() -> None:
    model = fresh()

    class Greedy(Scripted):
        features = (99,)

    kept = mmspec.enable(model, drafter=of("eagle tree", model))
    before = {name: type(part) for name, part in model.named_modules()}
    with pytest.raises(IndexError):
        mmspec.enable(model, drafter=Greedy(lambda *_: ([], [])))
    assert {name: type(part) for name, part in model.named_modules()} == before
    tiny_vlms.generate(model, prompt())
    assert kept.stats.tokens == 24


# -- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["ngram", "eagle tree"])
def test_a_shallow_copy_is_a_stock_model_of_its_own(drafter: str) -> None:
    """It shares the parts, as shallow copies do; each can be enabled and disabled without the other."""
    model = fresh()
    want = tiny_vlms.generate(model, prompt())
    handle = mmspec.enable(model, drafter=of(drafter, model))
    twin = copy.copy(model)
    assert type(twin) is T.LlavaForConditionalGeneration
    assert torch.equal(tiny_vlms.generate(twin, prompt()), want) and handle.stats.tokens == 0
    other = mmspec.enable(twin, drafter=of("eagle tree", model))
    assert torch.equal(tiny_vlms.generate(model, prompt()), want) and handle.stats.tokens == 24
    mmspec.disable(model)
    assert torch.equal(tiny_vlms.generate(twin, prompt()), want) and other.stats.tokens == 24
    mmspec.disable(twin)
    assert {type(part).__mro__[0] for part in model.modules()} == {type(part) for part in fresh().modules()}


# -- wrappers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.every(4)
def test_a_compiled_model(whole: bool) -> None:
    """`torch.compile(model)` hands `generate` on; its own forward still gives the model's logits."""
    torch.compiler.reset()
    model, ids = tiny_vlms.text(), torch.randint(5, 90, (1, 9))
    options = {"max_new_tokens": 24, "do_sample": False}
    want = model.generate(ids, **options)
    with torch.no_grad():
        logits = model(ids).logits
    wrapped = torch.compile(model, backend="eager", fullgraph=whole)
    with mmspec.enable(wrapped, drafter=of("eagle tree", model)) as handle:
        assert handle.model is model
        assert torch.equal(wrapped.generate(ids, **options), want)
        assert handle.stats.tokens == 24 and mmspec.stats(wrapped) is handle.stats
        with torch.no_grad():
            torch.testing.assert_close(wrapped(ids, use_cache=False).logits, logits, rtol=1e-4, atol=1e-4)
    mmspec.enable(wrapped)
    mmspec.disable(wrapped)
    assert type(model) is T.LlamaForCausalLM
    assert torch.equal(wrapped.generate(ids, **options), want)
    torch.compiler.reset()


def test_a_compiled_decoder() -> None:
    """`torch.compile(model.model)` calls the decoder past all hooks, before `enable` as after it."""
    model, ids = tiny_vlms.text(), torch.randint(5, 90, (1, 9))
    with mmspec.enable(model):
        model.model = torch.compile(model.model, backend="eager")
        with pytest.raises(mmspec.UnsupportedError, match="hides its decoder"):
            model.generate(ids, max_new_tokens=4)
    with pytest.raises(mmspec.UnsupportedError, match="hides its decoder"):
        mmspec.enable(model)


PROMPTED: dict[str, dict[str, Any]] = {
    "PromptTuning": {},
    "PromptEncoder": {"encoder_hidden_size": 16},
    "PrefixTuning": {},
}


def prompted(model: Any, kind: str) -> Any:
    peft = pytest.importorskip("peft")
    config = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", num_virtual_tokens=4, **PROMPTED[kind])
    torch.manual_seed(4)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize("kind", PROMPTED)
def test_adapters_that_put_tokens_before_the_prompt(kind: str) -> None:
    """Refused with the reason, at `enable` where it is seen, at the call where it came later; else stock."""
    ids, options = torch.randint(5, 90, (2, 9)), {"max_new_tokens": 12, "do_sample": False}
    wrapped = prompted(tiny_vlms.text(), kind)
    stock = wrapped.generate(input_ids=ids, **options)
    with pytest.raises(mmspec.UnsupportedError, match=r"virtual tokens.*LoRA"):
        mmspec.enable(wrapped)
    with pytest.warns(UserWarning, match="virtual tokens"):
        mmspec.enable(wrapped, on_unsupported="fallback")
    assert torch.equal(wrapped.generate(input_ids=ids, **options), stock)
    model = tiny_vlms.text()
    plain = model.generate(input_ids=ids, **options)
    handle = mmspec.enable(model)
    wrapped = prompted(model, kind)
    with pytest.raises(mmspec.UnsupportedError, match="virtual tokens"):
        wrapped.generate(input_ids=ids, **options)
    with wrapped.disable_adapter():
        assert torch.equal(wrapped.generate(input_ids=ids, **options), plain)
    assert handle.stats.tokens == 24
    mmspec.disable(wrapped)
    assert type(model) is T.LlamaForCausalLM
    with mmspec.enable(model, on_unsupported="fallback"), pytest.warns(UserWarning, match="virtual tokens"):
        assert torch.equal(wrapped.generate(input_ids=ids, **options), stock)


def test_an_adapter_for_each_row() -> None:
    """Rows leave as they end, which PEFT's list of names does not see: such calls run as stock does, with a warning."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_vlms.text(), lora, "one")
    torch.manual_seed(6)
    model.add_adapter("two", copy.copy(lora))
    model.eval()
    ids, names = torch.randint(5, 90, (3, 9)), ["one", "two", "__base__"]
    free = model.generate(input_ids=ids, adapter_names=names, max_new_tokens=12, do_sample=False)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": int(free[1, 12])}
    stock = model.generate(input_ids=ids, adapter_names=names, **options)
    assert bool((stock[1] == 0).any()) and not bool((stock[1] == 0).all(0))
    alone = model.generate(input_ids=ids[:1], adapter_names=names[:1], **options)
    with mmspec.enable(model) as handle:
        with pytest.warns(UserWarning, match="adapter_names"):
            assert torch.equal(model.generate(input_ids=ids, adapter_names=names, **options), stock)
        assert handle.stats.tokens == 0
        assert torch.equal(model.generate(input_ids=ids[:1], adapter_names=names[:1], **options), alone)
        assert handle.stats.tokens > 0


def test_an_adapter_that_begins_at_its_invocation() -> None:
    """Such calls run as stock does, with a warning; `verify` calls the wrapper, which looks for the invocation."""
    peft = pytest.importorskip("peft")
    names = ["q_proj", "k_proj", "v_proj"]
    lora = peft.LoraConfig(
        r=4, lora_alpha=16, init_lora_weights=False, target_modules=names, task_type="CAUSAL_LM",
        alora_invocation_tokens=[7],
    )  # fmt: skip
    torch.manual_seed(3)
    model = peft.get_peft_model(tiny_vlms.text(), lora).eval()
    ids, options = torch.randint(8, 90, (2, 12)), {"max_new_tokens": 20, "do_sample": False}
    ids[:, 9] = 7
    stock = model.generate(input_ids=ids, **options)
    with model.disable_adapter():
        assert not torch.equal(model.generate(input_ids=ids, **options), stock)
    with mmspec.enable(model) as handle:
        with pytest.warns(UserWarning, match="activated LoRA"):
            assert torch.equal(model.generate(input_ids=ids, **options), stock)
        assert mmspec.verify(model, {"input_ids": ids}, 20).tokens_per_target_call == 1 and not handle.stats.tokens


@pytest.mark.parametrize("kind", ["Lily", "Shadow"])
def test_adapters_that_read_all_tokens_together(kind: str) -> None:
    peft = pytest.importorskip("peft")
    if not hasattr(peft, f"{kind}Config"):
        pytest.skip(f"this peft has no {kind}")
    wrapped = peft.get_peft_model(tiny_vlms.text(), getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM"))
    with pytest.raises(mmspec.UnsupportedError, match=rf"{kind.upper()}.*LoRA"):
        mmspec.enable(wrapped)
    ids, options = torch.randint(5, 90, (1, 9)), {"max_new_tokens": 12, "do_sample": False}
    stock = wrapped.generate(input_ids=ids, **options)
    with mmspec.enable(wrapped.get_base_model()), pytest.warns(UserWarning, match=kind.upper()):
        assert torch.equal(wrapped.generate(input_ids=ids, **options), stock)


# -- what changes after enable ---------------------------------------------------------------------------------------


def test_another_attention_after_enable() -> None:
    """Seen at every call: a kernel that takes no tree mask would read it as something else."""
    model = fresh()
    want = tiny_vlms.generate(model, prompt())
    with mmspec.enable(model, drafter=of("eagle tree", model)) as handle:
        model.model.language_model.config._attn_implementation = "paged|eager"
        with pytest.raises(mmspec.UnsupportedError, match=r"attention is.*set_attn_implementation\('sdpa'\)"):
            tiny_vlms.generate(model, prompt())
        model.set_attn_implementation("eager")
        assert torch.equal(tiny_vlms.generate(model, prompt()), want)
        model.set_attn_implementation("sdpa")
        assert torch.equal(tiny_vlms.generate(model, prompt()), want) and handle.stats.tokens == 48


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


class Louder:
    """What others put in front of a module's class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) * 1.5  # type: ignore[misc]


def test_a_class_that_others_put_on_meanwhile_stays() -> None:
    """As `fully_shard` puts one on the model, and parametrizations on layers; over one of mmspec's, or under it."""
    model, ids = tiny_vlms.text(intermediate_size=512, vocab_size=512), torch.randint(5, 90, (1, 9))
    options = {"max_new_tokens": 16, "do_sample": False}
    mmspec.enable(model)
    projection, before = model.model.layers[0].mlp.up_proj, version(model)
    projection.__class__ = type("LouderLinear", (Louder, type(projection)), {})
    assert version(model) != before, "captures and prefixes of the other class are no longer used"
    model.__class__ = type("Sharded", (type(model),), {"own": 1})
    parametrize.register_parametrization(model.lm_head, "weight", Halved())
    found = [model.generate(ids, **options)]
    handle = mmspec.enable(model, drafter="ngram")
    found.append(model.generate(ids, **options))
    assert handle.stats.tokens == 16 and model.own == 1
    mmspec.disable(model)
    assert [type(each).__name__ for each in (model, projection, model.lm_head)] == [
        "Sharded", "LouderLinear", "ParametrizedLinear",
    ]  # fmt: skip
    assert not any("_mmspec_stock" in vars(kind) for part in model.modules() for kind in type(part).__mro__)
    assert all(torch.equal(model.generate(ids, **options), each) for each in found)


def test_an_enabled_model_as_another_ones_assistant() -> None:
    model, assistant = tiny_vlms.text(), tiny_vlms.text(num_hidden_layers=1)
    ids = torch.randint(5, 90, (1, 9))
    options = {"max_new_tokens": 20, "do_sample": False}
    stock = model.generate(input_ids=ids, assistant_model=assistant, **options)
    with mmspec.enable(assistant) as handle, pytest.warns(UserWarning, match="stock path: it drafts for another"):
        assert torch.equal(model.generate(input_ids=ids, assistant_model=assistant, **options), stock)
        assert handle.stats.tokens == 0
        assistant.generate(input_ids=ids, **options)
        assert handle.stats.tokens == 20


# -- threads ---------------------------------------------------------------------------------------------------------


class Gate(T.StoppingCriteria):
    """Lets a call go on to its third step, then waits until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened, self.steps = threading.Event(), threading.Event(), 0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.steps += 1
        if self.steps == 3:
            self.reached.set()
            assert self.opened.wait(60)
        return torch.zeros(len(input_ids), dtype=torch.bool)


CHANGES = {
    "disable": lambda model: mmspec.disable(model),
    "another drafter": lambda model: mmspec.enable(model, drafter="ngram"),
    "the same again": lambda model: mmspec.enable(model, drafter=of("eagle tree", model)),
    "on and off": lambda model: [mmspec.enable(model, drafter=of("eagle-3", model)), mmspec.disable(model)],
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("drafter", ["ngram", "eagle tree"])
@pytest.mark.every(2)
def test_a_running_call_ends_as_it_began(drafter: str, how: str) -> None:
    model, gate, got = fresh(), Gate(), []
    want = tiny_vlms.generate(model, prompt())
    before = {name: type(part) for name, part in model.named_modules()}
    handle = mmspec.enable(model, drafter=of(drafter, model))

    def work() -> None:
        got.append(tiny_vlms.generate(model, prompt(), stopping_criteria=T.StoppingCriteriaList([gate])))

    thread = threading.Thread(target=work)
    thread.start()
    assert gate.reached.wait(60)
    CHANGES[how](model)
    assert torch.equal(tiny_vlms.generate(model, prompt()), want), "a call that begins now"
    gate.opened.set()
    thread.join()
    assert torch.equal(got[0], want) and handle.stats.tokens == 24
    mmspec.disable(model)
    assert {name: type(part) for name, part in model.named_modules()} == before


def test_a_call_that_begins_while_the_model_is_disabled() -> None:
    """By another thread, which a look at the call's settings stands for; or long ago, of a model made of its class."""
    model, ids, options = tiny_vlms.text(), torch.randint(5, 90, (1, 9)), {"max_new_tokens": 12, "do_sample": False}

    class Leaving(T.GenerationConfig):
        def __getattribute__(self, name: str) -> Any:
            if name == "num_beams":
                mmspec.disable(model)
            return super().__getattribute__(name)

    want = model.generate(ids, **options)
    mmspec.enable(model)
    twin, forward = type(model)(model.config).eval(), type(model.model).__call__
    twin.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "mmspec")
        handed_on = {"custom_generate": lambda model, *args, **kwargs: model._sample(*args, **kwargs)}
        for more in ({}, handed_on):
            mmspec.enable(model)
            assert torch.equal(model.generate(ids, generation_config=Leaving(**options), **more), want)
        assert Patch.of(model) is None and forward(model.model, ids).last_hidden_state.isfinite().all()
        assert torch.equal(twin.generate(ids, **options, **handed_on), want)


@pytest.mark.full
def test_threads_that_switch_while_others_generate() -> None:
    model = fresh()
    want, before = tiny_vlms.generate(model, prompt()), {name: type(part) for name, part in model.named_modules()}
    drafters, wrong, stop = [of("ngram", model), of("eagle tree", model)], [], threading.Event()

    def generate() -> None:
        try:
            for _ in range(6):
                if not torch.equal(tiny_vlms.generate(model, prompt()), want):
                    wrong.append("other tokens")
        except Exception as error:
            wrong.append(error)

    def switch(index: int) -> None:
        try:
            while not stop.is_set():
                mmspec.enable(model, drafter=drafters[index])
                with mmspec.enable(model, drafter=drafters[1 - index]):
                    pass
                mmspec.disable(model)
        except Exception as error:
            wrong.append(error)

    workers = [threading.Thread(target=generate) for _ in range(3)]
    switches = [threading.Thread(target=switch, args=(index,)) for index in range(2)]
    for thread in (*workers, *switches):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    for thread in switches:
        thread.join()
    mmspec.disable(model)
    assert not wrong
    assert {name: type(part) for name, part in model.named_modules()} == before


def test_switching_while_a_stream_runs() -> None:
    model = fresh()
    inputs = prompt()
    want = tiny_vlms.generate(model, inputs)[0, inputs["input_ids"].shape[1] :].tolist()
    handle, tokens = mmspec.enable(model, drafter=of("eagle tree", model)), []
    for index, step in enumerate(mmspec.stream(model, inputs, max_new_tokens=24, do_sample=False)):
        tokens += step.tokens
        if index == 1:
            mmspec.enable(model, drafter="ngram")
        if index == 2:
            mmspec.disable(model)
    assert tokens == want and handle.stats.tokens == 24
    assert Patch.of(model) is None and type(model) is T.LlavaForConditionalGeneration


# -- the face --------------------------------------------------------------------------------------------------------


def test_what_users_name_lies_in_the_face() -> None:
    for name in mmspec.__all__:
        assert getattr(mmspec, name) is not None, name
    model = fresh()
    with mmspec.enable(model) as handle:
        assert isinstance(handle, mmspec.Handle) and isinstance(handle.config, mmspec.SpecConfig)
        assert isinstance(mmspec.stats(model), mmspec.Stats)
    assert issubclass(mmspec.UnsupportedError, ValueError)


@pytest.mark.full
def test_a_script_that_ends_while_a_model_is_enabled_says_nothing():
    code = "import mmspec, tiny_vlms, torch\nmodel = tiny_vlms.model('llava')\nhandle = mmspec.enable(model, 'ngram')"
    command, support = [sys.executable, "-W", "ignore", "-c", code], Path(tiny_vlms.__file__).parent
    ended = subprocess.run(command, cwd=support, capture_output=True, text=True)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr


@pytest.mark.parametrize("drafter", [eagle, lambda model: "recycle"], ids=["eagle", "recycle"])
def test_a_resized_model_is_drafted_for_with_its_new_tokens(drafter: Any):
    """An eagle reads the head, which has more rows now; the tables of recycle are made anew."""
    model, inputs = fresh(), prompt()
    with mmspec.enable(model, drafter(model)) as handle:
        tiny_vlms.generate(model, inputs, max_new_tokens=4)
        rows = model.get_input_embeddings().weight.shape[0]
        model.resize_token_embeddings(rows + 16, mean_resizing=False)
        with torch.no_grad():
            model.lm_head.weight[rows + 3] = 20 * model.lm_head.weight[tiny_vlms.generate(model, inputs)[0, -1]]
        found = tiny_vlms.generate(model, inputs, max_new_tokens=12)
        assert handle.stats.tokens_per_target_call > 1
    assert (found >= rows).any() and torch.equal(found, tiny_vlms.generate(model, inputs, max_new_tokens=12))


@pytest.mark.parametrize("drafter", ["hostile", "oracle", "hostile, auto"])
def test_drafts_that_are_hardly_accepted_are_reported_once(drafter: str) -> None:
    model, ids = fresh(), torch.randint(5, 100, (8, 6), generator=torch.Generator().manual_seed(3))
    call = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    stock = model.generate(ids, **call)
    known = Oracle.of(ids, stock) if drafter == "oracle" else Oracle({})
    made = Scripted(lambda row, _: (known.after(row, 2), [0, 1]), chained=True)
    with warnings.catch_warnings(record=True) as caught, mmspec.enable(model, made, auto="auto" in drafter) as handle:
        warnings.simplefilter("always")
        for _ in range(2):
            assert torch.equal(model.generate(ids, **call), stock)
        assert handle.stats.row_rounds >= (512 if drafter == "hostile" else 64)
        short = model.generate(ids, max_new_tokens=4, do_sample=False, assistant_model=copy.deepcopy(model))
        assert torch.equal(short, stock[:, :10])
    said = [str(each.message) for each in caught if "hardly accepted" in str(each.message)]
    assert len(said) == (drafter == "hostile") and all("with Scripted" in each for each in said), said


WRONG: dict[str, tuple[Callable[[Draft], Any], type[Exception], str]] = {
    "without the root": (lambda d: replace(d, tokens=d.tokens.roll(-1, 1)), ValueError, "node 0 of each row is its"),
    "nothing": (lambda d: None, TypeError, "returned NoneType; it has to return a Draft"),
    "tokens alone": (lambda d: d.tokens, TypeError, "returned Tensor"),
    "too few": (
        lambda d: replace(d, tokens=d.tokens[:, 1:]),
        ValueError,
        r"tokens \[2, 2\] of torch.int64 on a tree \[2, 3\]",
    ),
    "numbers": (lambda d: replace(d, tokens=d.tokens.float()), ValueError, "of torch.float32 on a tree"),
    "unknown tokens": (lambda d: replace(d, tokens=d.tokens + 10**6 * (d.tree.depth > 0)), ValueError, "or below 128"),
    "one row": (lambda d: d.select(torch.tensor([0])), ValueError, "here 2 rows"),
}


@pytest.mark.parametrize("change", WRONG)
def test_a_wrong_draft_of_a_user_s_drafter_is_refused(change: str) -> None:
    """It would give wrong tokens, or an error far away."""

    class Own(Scripted):
        def propose(self, session: Any, target: Any) -> Any:
            return wrong(super().propose(session, target))

    (wrong, kind, words), model = WRONG[change], fresh()
    ids = torch.randint(5, 90, (2, 6), generator=torch.Generator().manual_seed(4))
    own = Own(lambda row, _: ([7, 8], [0, 1]), chained=True)
    with mmspec.enable(model, own), pytest.raises(kind, match=f"Own.propose returned.*{words}|{words}"):
        model.generate(ids, max_new_tokens=8, do_sample=False)
