"""What makes the host wait for the device in a round: for every drafter, rule and kind of call, on a pretended device.

`ONCE` and `WAITS` hold what a round costs at most, so that no change can worsen it unseen; where a round has become
better, the test warns with the new number, to be written here.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import published_mtp
import pytest
import remote_image_models
import tiny_image_models
import tiny_llamagen
import tiny_mar
import tiny_vlms
import torch
import transformers as T
from pretend_cuda import Pretend, place
from published_drafters import put
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

import mmspec
from mmspec.kernels import dispatch
from mmspec.pipelines.host.call import calling
from mmspec.pipelines.serving import stream as streaming
from mmspec.pipelines.serving.continuous import ContinuousBatcher
from tests.checkpoints import test_shipped
from tests.drafters import test_assistant, test_block, test_eagle_image, test_heads
from tests.host import test_pretend_cuda
from tests.host.test_generate import letters
from tests.host.test_pretend_cuda import DRAFTERS, FIRST, answered, by

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a GPU where there is none")


as_shipped, built = test_pretend_cuda.as_shipped, test_assistant.built  # fixtures


@pytest.fixture(scope="module", autouse=True)
def filled() -> None:
    """What a process holds once, such as the check of a kernel, is there before anything is counted."""
    with Pretend():
        model = place(copy.deepcopy(tiny_vlms.model("llava")), FIRST)
        with mmspec.enable(model, DRAFTERS["eagle"](model)):
            answered(model, "one", FIRST)


Waits = tuple[int, int]  # reads of the device by the host, copies to it; the former cost most
ONCE: Waits = (1, 0)  # what a round costs at most: how many tokens of each row were accepted is read
WAITS: dict[tuple[str, str, str], Waits] = {  # drafter, rule, kind of call → the same, where it costs something else
    ("ngram", "exact", "criterion"): (2, 2),
    ("ngram", "exact", "one"): (1, 1),
    ("ngram", "exact", "ragged"): (1, 1),
    ("ngram", "exact", "sampled"): (1, 1),
    ("suffix", "exact", "ragged"): (1, 2),
    ("eagle", "exact", "criterion"): (2, 1),
    ("eagle auto", "exact", "one"): (2, 1),
    ("suffix", "exact", "flow"): (1, 1),
    ("jacobi", "emu3", "rows: 1"): (11, 4),  # a grammar of the user's own, which looks at each path
    ("jacobi", "emu3", "rows: 2"): (20, 7),
    ("jacobi", "emu3_5", "rows: 1"): (31, 5),  # the authors' processors, which look at each token
    ("jacobi", "lumina_mgpt", "rows: 1"): (34, 7),
    ("jacobi", "chameleon", "rows: 1"): (1, 1),
    ("jacobi", "chameleon", "rows: 2"): (1, 1),
    ("none", "plain MAR", "pictures"): (0, 1),
    ("self", "MAR", "pictures"): (2, 11),
}


class Never(T.StoppingCriteria):
    """A condition of the user's own, which is not met."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Columns(BaseStreamer):
    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


class Rounds:
    """What rounds made the host wait for, but the first one, which fills tables, and those in which rows end."""

    def __init__(self, pretended: Pretend) -> None:
        self.pretended = pretended
        self.marks: list[tuple[int, int, int]] = []  # rows, reads and copies after each round

    def __call__(self, rows: int) -> None:
        self.marks.append((rows, *self.pretended.waits))

    @contextmanager
    def of_generate(self) -> Iterator[None]:
        """Marks each round of the calls of `generate` within."""
        with calling(watch=lambda round_: self(len(round_.new))):
            yield

    def most(self) -> Waits:
        pairs = [(a, b) for a, b in itertools.pairwise(self.marks[1:]) if a[0] == b[0]]
        assert pairs, "a call of so few rounds tells nothing"
        return max(b[1] - a[1] for a, b in pairs), max(b[2] - a[2] for a, b in pairs)


def within_the_table(rounds: Rounds, *case: str) -> None:
    most, allowed = rounds.most(), WAITS.get(case, ONCE)
    lines = [*rounds.pretended.reads.most_common(6), *rounds.pretended.copies.most_common(6)]
    assert all(now <= then for now, then in zip(most, allowed, strict=True)), f"{case}: {most} > {allowed}; {lines}"
    if most != allowed:
        warnings.warn(f"WAITS has {allowed} for {case}; it now is {most}, write that", stacklevel=2)


CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("one", {}),
    "ragged": ("ragged", {}),
    "sampled": ("one", {"do_sample": True, "top_k": 20}),
    "top-p": ("one", {"do_sample": True, "top_k": 0, "top_p": 0.9}),
    "criterion": ("one", {"stopping_criteria": [Never()]}),
}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in DRAFTERS},
    "eagle auto": ("eagle", {"auto": True}),
    "eagle drawn": ("eagle", {"tree": "mc_sim_7b_63", "draws": True}),
}
TEXT = by(DRAFTERS, "one", "ragged")
TEXT += [(name, "sampled") for name in ("plain", "ngram", "suffix", "recycle", "eagle", "eagle drawn", "vispec")]
TEXT += [("ngram", "criterion"), ("eagle", "criterion"), ("eagle auto", "one"), ("eagle", "top-p")]


@pytest.mark.parametrize(("drafter", "call"), TEXT)
@pytest.mark.every(18)
def test_waits_of_text(drafter: str, call: str) -> None:
    name, options = OPTIONS[drafter]
    made, (kind, how) = DRAFTERS[name](tiny_vlms.model("llava")), CALLS[call]
    with Pretend() as pretended:
        model, rounds = place(copy.deepcopy(tiny_vlms.model("llava")), FIRST), Rounds(pretended)
        with mmspec.enable(model, made, **options), rounds.of_generate():
            answered(model, kind, FIRST, **how)
        within_the_table(rounds, drafter, "exact", call)


# -- what a call asks besides ------------------------------------------------------------------------------------------


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are interpreted slowly, and those that read trees are seen above."""
    monkeypatch.setenv(dispatch.VARIABLE, "reference")


class Callback(T.StoppingCriteria):
    """A condition that is answered on the host."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> bool:
        return input_ids.shape[1] > 10**6


ASKED: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.4},
    "no repeated n-gram": {"no_repeat_ngram_size": 3},
    "min length": {"min_length": 30, "eos_token_id": 2},
    "min new tokens": {"min_new_tokens": 30, "eos_token_id": 2},
    "forced EOS": {"forced_eos_token_id": 77},
    "suppressed at the beginning": {"begin_suppress_tokens": [5, 6]},
    "bad words": {"bad_words_ids": [[5], [6, 7], [8, 9, 10]]},
    "sequence bias": {"sequence_bias": [[[30], 3.0], [[31, 99], 9.0]]},
    "decaying length": {"exponential_decay_length_penalty": (4, 1.01), "eos_token_id": 2},
    "stop strings": {"stop_strings": ["qqqqq"], "tokenizer": letters()},
    "max time": {"max_time": 1000.0},
    "a callback": {"stopping_criteria": [Callback()]},
    "a streamer": {"streamer": Columns()},
    "sampling": {"do_sample": True, "repetition_penalty": 1.1, "top_k": 0},
}


@pytest.mark.filterwarnings("ignore:Unfeasible length")
@pytest.mark.parametrize("drafter", ["ngram", "eagle"])
@pytest.mark.parametrize("what", ASKED)
@pytest.mark.every(12)
def test_what_a_call_asks_costs_a_copy_of_the_new_tokens_at_most(what: str, drafter: str, no_interpreter: None) -> None:
    made, (reads, copies) = DRAFTERS[drafter](tiny_vlms.model("llava")), WAITS.get((drafter, "exact", "one"), ONCE)
    with Pretend() as pretended:
        model, rounds = place(copy.deepcopy(tiny_vlms.model("llava")), FIRST), Rounds(pretended)
        with mmspec.enable(model, made), rounds.of_generate():
            answered(model, "one", FIRST, max_new_tokens=12, **ASKED[what])
    most = rounds.most()
    assert most[0] <= reads and most[1] <= copies + 1, (most, pretended.reads, pretended.copies)


@pytest.mark.parametrize("drafter", ["ngram", "eagle"])
def test_waits_of_a_stream(drafter: str, no_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own thread is pretended too; it tells of refused drafts, which only the device knows."""
    pretended, generate, told = Pretend(), T.LlavaForConditionalGeneration.generate, streaming._Relay._round
    rounds = Rounds(pretended)

    def there(*args: Any, **kwargs: Any) -> Any:
        with pretended:
            return generate(*args, **kwargs)

    def marked(relay: Any, round_: Any) -> None:
        told(relay, round_)
        rounds(1)

    monkeypatch.setattr(T.LlavaForConditionalGeneration, "generate", there)
    monkeypatch.setattr(streaming._Relay, "_round", marked)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    made = DRAFTERS[drafter](tiny_vlms.model("llava"))
    with Pretend():
        model, inputs = place(copy.deepcopy(tiny_vlms.model("llava")), FIRST), tiny_vlms.prompt("llava", "image first")
        handle, inputs = mmspec.enable(model, made), {name: t.to(FIRST) for name, t in inputs.items()}
    with handle:
        steps = list(streaming.stream(model, inputs, max_new_tokens=20, do_sample=False))
    assert sum(len(step.tokens) for step in steps) == 20 and any(step.corrected for step in steps)
    within_the_table(rounds, drafter, "exact", "one")


# -- drafters that come with a model, or are one -----------------------------------------------------------------------


def _heads(folder: Path, count: int) -> tuple[Any, Any]:
    model = copy.deepcopy(tiny_vlms.model("qwen3_5"))
    published_mtp.shipped(model, folder, published_mtp.qwen_heads(model, count))
    return place(model, FIRST), "mtp"


def _block(folder: Path, kind: str) -> tuple[Any, Any]:
    drafter = test_block.load(put(folder, *test_block.MADE[kind][1]()))
    return place(copy.deepcopy(tiny_vlms.model("llava")), FIRST), drafter


def _model(folder: Path) -> tuple[Any, Any]:
    return place(copy.deepcopy(tiny_vlms.model("llava")), FIRST), place(test_shipped.small("llava"), FIRST)


def _assistant(folder: Path) -> tuple[Any, Any]:
    model, assistant = test_assistant.pair()
    return place(model, FIRST), place(assistant, FIRST)


SHIPPED: dict[str, Callable[[Path], tuple[Any, Any]]] = {
    "mtp": partial(_heads, count=1),
    "mtp, three heads": partial(_heads, count=3),
    **{kind: partial(_block, kind=kind) for kind in ("dflash", "dspark", "dflash2")},
    "model": _model,
    "assistant": _assistant,
}


def shown(model: Any, rows: int) -> dict[str, Tensor]:
    """Prompts for a tiny model, on the pretended device."""
    if model.config.model_type == "gemma4_text":
        inputs = test_assistant.prompt(rows)
    else:
        kind = "ragged" if rows > 1 else "image first"
        inputs = tiny_vlms.prompt(model.config.model_type, kind, rows=list(range(rows)))
    return {name: t.to(FIRST) for name, t in inputs.items()}


def unless_full(cases: Iterable[Any], *dearest: Any) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.full if case in dearest else ()) for case in cases]


@pytest.mark.parametrize("call", unless_full(["one", "ragged", "sampled"], "one"))
@pytest.mark.parametrize("drafter", unless_full(SHIPPED, "mtp, three heads"))
@pytest.mark.every(8)
def test_waits_of_what_models_ship_with(drafter: str, call: str, tmp_path: Path, no_interpreter: None) -> None:
    with Pretend() as pretended:
        (model, made), rounds = SHIPPED[drafter](tmp_path), Rounds(pretended)
        with mmspec.enable(model, made), rounds.of_generate():
            tiny_vlms.generate(model, shown(model, 3 if call == "ragged" else 1), max_new_tokens=9, **CALLS[call][1])
        within_the_table(rounds, drafter, "exact", call)


# -- rows that come and go ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["plain", "suffix", "eagle", "vispec"])
@pytest.mark.every(3)
def test_waits_of_continuous_batches(drafter: str, no_interpreter: None) -> None:
    """Of rounds in which no row ends, comes or is left out."""
    made = DRAFTERS[drafter](tiny_vlms.model("llava"))
    with Pretend() as pretended:
        model, rounds = place(copy.deepcopy(tiny_vlms.model("llava")), FIRST), Rounds(pretended)
        with mmspec.enable(model, made):
            flow = ContinuousBatcher(model, None, 2, max_new_tokens=9, do_sample=False)
            waiting, changes = list(range(3)), 0
            while waiting or flow.busy:
                while waiting and flow.free:
                    inputs = tiny_vlms.prompt("llava", "image first", seed=waiting[0])
                    flow.add(waiting.pop(0), {name: t.to(FIRST) for name, t in inputs.items()})
                    changes += 1
                ended = flow.step()
                assert [end.error for end in ended if end.error] == []
                changes += len(ended)
                rounds(changes)
                changes += len(ended)  # rows that ended are left out in the next round
        within_the_table(rounds, drafter, "exact", "flow")


def test_waits_behind_a_known_prefix(no_interpreter: None) -> None:
    with Pretend() as pretended:
        model, rounds = place(copy.deepcopy(tiny_vlms.model("llava")), FIRST), Rounds(pretended)
        with mmspec.enable(model, DRAFTERS["eagle"](model), prefix_cache="16MB") as handle:
            answered(model, "one", FIRST)
            with rounds.of_generate():
                answered(model, "one", FIRST)
            assert handle.stats.prefix["reused tokens"] > 0
        within_the_table(rounds, "eagle", "exact", "known prefix")


# -- pictures ----------------------------------------------------------------------------------------------------------

RULES = ("exact", "lantern(k=10, lam=2.0)", "scaled(omega=1.5)", "typical(epsilon=0.3, delta=0.1)", "gsd(group=5)",
         "grouped(cells=8)", "pooled(cells=8)")  # fmt: skip
WINDOW = {"window": 4}
PICTURES: list[tuple[str, str, dict[str, Any]]] = [("jacobi", rule, WINDOW) for rule in RULES]
PICTURES += [("jacobi proactive", "exact", {**WINDOW, "proactive": (2, 3)})]
PICTURES += [("jacobi reproducible", "exact", {**WINDOW, "reproducible": True})]
PICTURES += [("heads reproducible", "exact", {**WINDOW, "reproducible": True})]
PICTURES += [("eagle", rule, {"tree": "mc_sim_7b_63"}) for rule in RULES[:2]]


@pytest.mark.parametrize(("drafter", "rule", "options"), PICTURES)
@pytest.mark.every(4)
def test_waits_of_pictures(drafter: str, rule: str, options: dict[str, Any]) -> None:
    pipe = tiny_llamagen.pipeline("class", grid=3)
    own = {"heads": test_heads.heads, "eagle": test_eagle_image.drafter}
    name = drafter.split()[0]
    made = own[name](grid=3) if name in own else name
    with Pretend() as pretended:
        for part in (pipe.transformer, pipe.vqvae):
            place(part, FIRST)
        rounds = Rounds(pretended)
        with mmspec.enable(pipe, made, rule=rule, **options):
            ended = {"callback_on_step_end": lambda pipe, step, done, more: rounds(0)}
            pipe(class_labels=[3], generator=torch.Generator().manual_seed(1), output_type="latent", **ended)
        within_the_table(rounds, drafter, rule, "pictures")


@pytest.mark.parametrize(("drafter", "kind"), [("none", "plain MAR"), ("self", "MAR")])
def test_waits_of_continuous_pictures(drafter: str, kind: str) -> None:
    pipe = tiny_mar.pipeline()
    with Pretend() as pretended:
        for part in (pipe.transformer, pipe.vae):
            place(part, FIRST)
        rounds = Rounds(pretended)
        if drafter == "self":
            pipe.enable_speculation(ahead=3)
        ended = {"callback_on_step_end": lambda pipe, step, done, more: rounds(0)}
        pipe([1], generator=tiny_mar.seeded(1), output_type="latent", **ended)
        within_the_table(rounds, drafter, kind, "pictures")


@pytest.mark.parametrize("rows", unless_full([1, 2], 1))
@pytest.mark.parametrize("painter", ["janus", "emu3", "glm_image", "chameleon"])
@pytest.mark.every(4)
def test_waits_of_models_that_draw(painter: str, rows: int, no_interpreter: None) -> None:
    call = tiny_image_models.PAINTERS[painter].call(rows)
    with Pretend() as pretended:
        model, rounds = place(copy.deepcopy(tiny_image_models.model(painter)), FIRST), Rounds(pretended)
        there = {name: t.to(FIRST) if isinstance(t, Tensor) else t for name, t in call.items()}
        with mmspec.enable(model, "jacobi", window=3), rounds.of_generate():
            tiny_image_models.draw(model, there, do_sample=True)
        within_the_table(rounds, "jacobi", painter, f"rows: {rows}")


@pytest.mark.parametrize("painter", ["emu3_5", "lumina_mgpt"])
@pytest.mark.every(2)
def test_waits_of_processors_that_keep_state(
    painter: str, no_interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The authors' processors are followed node by node, and most of the reads are theirs."""
    model = copy.deepcopy(remote_image_models.model(painter))
    with Pretend() as pretended:
        monkeypatch.setattr(remote_image_models, "model", lambda name: place(model, FIRST))
        rounds, call = Rounds(pretended), remote_image_models.call(painter)
        with mmspec.enable(model, "jacobi", window=3), rounds.of_generate():
            model.generate(**{**call, "input_ids": call["input_ids"].to(FIRST)}, do_sample=True)
        within_the_table(rounds, "jacobi", painter, "rows: 1")
