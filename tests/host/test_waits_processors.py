"""Where the host waits for the device: processors, criteria and streams add nothing to the one read of a round."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import tiny_vlms
import torch
import transformers as T
from hostile_drafters import eagle
from pretend_cuda import Pretend, place
from torch import Tensor

import mmspec
from mmspec.pipelines.serving.stream import stream
from tests.host.test_generate import letters

CUDA = torch.device("cuda", 0)


class Never(T.StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids[:, -1] == -5


class Callback(T.StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> bool:
        return input_ids.shape[1] > 10**6


HOW: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": lambda: {},
    "repetition penalty": lambda: {"repetition_penalty": 1.4},
    "no repeated n-gram": lambda: {"no_repeat_ngram_size": 3},
    "min length": lambda: {"min_length": 30, "eos_token_id": 2},
    "min new tokens": lambda: {"min_new_tokens": 30, "eos_token_id": 2},
    "forced EOS": lambda: {"forced_eos_token_id": 77},
    "suppressed at the beginning": lambda: {"begin_suppress_tokens": [5, 6]},
    "bad words": lambda: {"bad_words_ids": [[5], [6, 7], [8, 9, 10]]},
    "sequence bias": lambda: {"sequence_bias": [[[30], 3.0], [[31, 99], 9.0]]},
    "decaying length": lambda: {"exponential_decay_length_penalty": (4, 1.01), "eos_token_id": 2},
    "stop strings": lambda: {"stop_strings": ["qqqqq"], "tokenizer": letters()},
    "max time": lambda: {"max_time": 1000.0},
    "a callback": lambda: {"stopping_criteria": [Callback()]},
    "sampling": lambda: {"do_sample": True, "repetition_penalty": 1.1, "top_k": 0},
}
DRAFTER = ["ngram", "eagle"]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MMSPEC_KERNELS", "reference")  # the kernels' own interpreter is slow, and reads memory anyway
    with Pretend():
        return place(copy.deepcopy(tiny_vlms.model("llava")), CUDA)


def made(model: Any, name: str) -> Any:
    return place(eagle(tiny_vlms.model("llava"), depth=4, width=3, size=14), CUDA) if name == "eagle" else name


def asked() -> dict[str, Tensor]:
    """A prompt on the device."""
    with Pretend():
        return {name: t.to(CUDA) for name, t in tiny_vlms.prompt("llava", "image first").items()}


def counted(model: Any, drafter: Any, tokens: int, **how: Any) -> Counter[str]:
    """Rounds, waits of the host, and copies to the device of one call."""
    with Pretend() as seen, mmspec.enable(model, drafter=drafter) as handle:
        tiny_vlms.generate(model, asked(), max_new_tokens=tokens, **{"eos_token_id": None, **how})
    return Counter(rounds=handle.stats.rounds, waits=seen.waits[0], copies=seen.waits[1])


def per_round(model: Any, drafter: Any, **how: Any) -> Counter[str]:
    """What the rounds of a long call cost beyond those of a shorter one."""
    long, short = (counted(model, drafter, tokens, **how) for tokens in (20, 8))
    long.subtract(short)
    return long


@pytest.mark.filterwarnings("ignore:Unfeasible length")
@pytest.mark.parametrize("drafter", DRAFTER)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.every(12)
def test_a_round_waits_once_whatever_is_asked_of_it(model: Any, how: str, drafter: str) -> None:
    proposer = made(model, drafter)
    cost = per_round(model, proposer, **HOW[how]())
    assert cost["rounds"] > 3 and cost["waits"] == cost["rounds"]
    alone = cost["rounds"] if drafter == "ngram" else 0  # which finds its drafts on the host
    assert cost["copies"] - alone <= cost["rounds"] + 1, "one copy of new tokens, and a text that outgrew its room"


@pytest.mark.parametrize("drafter", DRAFTER)
def test_answers_of_a_criterion_that_lie_on_the_device_are_read_together(model: Any, drafter: str) -> None:
    cost = per_round(model, made(model, drafter), stopping_criteria=[Never()])
    assert cost["rounds"] > 3 and cost["waits"] == 2 * cost["rounds"]


@pytest.mark.parametrize("drafter", DRAFTER)
def test_a_streamed_round_waits_once(model: Any, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream's own thread is pretended too; it tells of refused drafts, which only the device knows."""
    inputs = asked()
    seen: list[Pretend] = []
    generate = type(model).generate

    def pretended(*args: Any, **kwargs: Any) -> Any:
        with Pretend() as mode:
            seen.append(mode)
            return generate(*args, **kwargs)

    monkeypatch.setattr(type(model), "generate", pretended)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    found = []
    for tokens in (8, 20):
        with Pretend():
            handle = mmspec.enable(model, drafter=made(model, drafter))
        with handle:
            steps = list(stream(model, inputs, max_new_tokens=tokens, do_sample=False, eos_token_id=None))
        assert sum(len(step.tokens) for step in steps) == tokens
        found.append(Counter(rounds=handle.stats.rounds, waits=seen[-1].waits[0]))
    found[1].subtract(found[0])
    assert found[1]["rounds"] > 3 and found[1]["waits"] == found[1]["rounds"]
    assert any(step.corrected for step in steps)
