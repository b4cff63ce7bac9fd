"""Self-test on a release of transformers that mmspec was not tested with, before a model is accelerated there.

First the assumptions in host/contract.py are checked. If they hold, an embedded model describes an image twice, once
with stock decoding and once with partly correct drafts, and has to generate the same tokens.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image

from mmspec import zoo
from mmspec.config import Options
from mmspec.pipelines.host import loading, release
from mmspec.pipelines.host.model import HostModel
from mmspec.pipelines.host.readable import head_shape
from mmspec.protocols import SessionView, Target, TargetInfo
from mmspec.tree import from_parents
from mmspec.types import Draft, Prompt

TOKENS = 8
_lock = threading.RLock()
_results: dict[str, str | None] = {}  # embedded model → what the self-test found wrong with it, or None


class _AnswerDrafter:
    """Drafts the next two tokens of a given answer, each with a wrong token as its sibling."""

    features: tuple[int, ...] = ()
    nodes = 5

    def __init__(self, answer: list[int], vocab: int) -> None:
        self.answer, self.vocab = answer, vocab

    def fit(self, target: TargetInfo, given: Options) -> _AnswerDrafter:
        return self

    def start(self, session: SessionView, target: Target, prompt: Prompt) -> None:
        return None

    def propose(self, session: SessionView, target: Target) -> Draft:
        row = session.rows[0]
        a, b, *_ = *self.answer[row.generated :], 0, 0
        tokens = [(a + 1) % self.vocab, a, (b + 1) % self.vocab, b]
        below = torch.tensor([tokens], device=session.pending.device)
        tree = from_parents(torch.tensor([[0, 0, 0, 2, 2]], device=below.device), 2)
        return Draft(torch.cat([session.pending[:, None], below], 1), tree)


def refusal(model: Any, drafter: object, enable: Callable[..., Any]) -> str | None:
    """The reason, in a sentence, why a model must not be accelerated with the installed release; None: it may be, and
    a warning says that the release is untested."""
    modules = {type(module).__name__ for module in model.modules()} if hasattr(model, "modules") else set()
    names = {*modules, type(model).__name__, type(drafter).__name__, *([drafter] if isinstance(drafter, str) else [])}
    if (why := release.broken(names)) is not None:
        return why
    if not loading.is_model(model):  # one of mmspec's own pipelines
        return None
    name = "scenes-hybrid" if HostModel.of(model).recurrent else "scenes-video"
    with _lock:
        if name not in _results:
            _results[name] = None  # lets the self-test itself enable the embedded model
            try:
                _results[name] = _self_test(name, enable)
            except BaseException:  # such as Ctrl-C
                del _results[name]
                raise
            if _results[name] is None:
                what = f"mmspec is untested with transformers {release.installed()}, where all that it assumes holds"
                warnings.warn(what, stacklevel=4)
    return None if _results[name] is None else f"{_results[name]}. {release.advice()}"


def _self_test(name: str, enable: Callable[..., Any]) -> str | None:
    """What is wrong with drafting for an embedded model; None: it generates stock's tokens, in fewer rounds."""
    folder, picture = zoo.path(name), Image.open(sorted(zoo.samples().glob("*.png"))[0])
    words = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "Describe."}]}]
    state = torch.get_rng_state()
    try:
        model, processor = loading.model_and_processor(folder, torch.float32)
        inputs = processor.apply_chat_template(
            words, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        arguments = {**inputs, "max_new_tokens": TOKENS, "do_sample": False}
        want = model.generate(**arguments)
        drafter = _AnswerDrafter(want[0, inputs["input_ids"].shape[1] :].tolist(), head_shape(model)[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with enable(model, drafter=drafter) as handle:
                got = model.generate(**arguments)
    except Exception as error:
        return f"eight tokens of the embedded {name} fail: {type(error).__name__}: {error}"
    finally:
        torch.set_rng_state(state)
    if not torch.equal(got, want):
        return f"the embedded {name} generates other tokens with drafts than without"
    if handle.stats.rounds == 0 or handle.stats.rounds >= TOKENS - 1:
        return f"drafts of the embedded {name} have no effect"
    return None
