"""What most tests ask: does an enabled model answer as stock does, token for token, and prompts in a flow as alone?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_vlms
import torch
from hostile_drafters import DRAFTERS, Oracle
from torch import Tensor

import mmspec
from mmspec.pipelines.serving.batcher import Batcher
from mmspec.pipelines.serving.continuous import ContinuousBatcher, FinishedPrompt

Draw = Callable[..., Any]  # the model, the inputs, what the call is told → its tokens


def as_stock(
    target: Any, inputs: dict[str, Any] | list[dict[str, Any]], drafter: Any = None, *,
    call: dict[str, Any] | None = None, seed: int | None = None, times: int = 1, draw: Draw = tiny_vlms.generate,
    begun: Callable[[Any], Any] = lambda handle: None, **options: Any,
) -> Any:  # fmt: skip
    """Asserts that the model, once enabled, gives what stock gives; where it is reproducible, it also leaves torch's
    generator where stock leaves it. Its handle, which knows what was drafted.

    Args:
        inputs: of one call, or of several, one after the other.
        drafter: as `enable` takes it, or a name of DRAFTERS, of which some know what stock gives to the first call.
        call: what `generate` is told beside its inputs.
        seed: of torch's generator before each call, where it draws.
        times: how often it is called.
        draw: what answers; it takes the model, the inputs and what the call is told.
        begun: is shown the handle before the first call.
        options: as `enable` takes them.
    """
    asked = inputs if isinstance(inputs, list) else [inputs]

    def answer(one: dict[str, Any]) -> Any:
        if seed is not None:
            torch.manual_seed(seed)
        found = draw(target, one, **(call or {}))
        states.append(torch.get_rng_state())
        return getattr(found, "sequences", found)

    states: list[Tensor] = []
    wanted = [answer(one) for one in asked]
    seeded = seed is not None and options.get("reproducible")
    if isinstance(drafter, str) and drafter in DRAFTERS:
        drafter = DRAFTERS[drafter](target, Oracle.of(asked[0]["input_ids"], wanted[0]))
    with mmspec.enable(target, drafter, **options) as handle:
        begun(handle)
        for _ in range(times):
            for one, want, state in zip(asked, wanted, states[: len(asked)], strict=True):
                assert torch.equal(answer(one), want)
                assert not seeded or torch.equal(states[-1], state), "torch's generator is not where stock leaves it"
    return handle


def refused_or_stock(
    target: Any, inputs: dict[str, Any], why: str, *, draw: Draw = tiny_vlms.generate, **call: Any
) -> None:
    """Asserts that a call is refused with this reason, or, as a fallback, runs as stock with one warning that says it;
    it never has another distribution."""
    with mmspec.enable(target), pytest.raises(mmspec.UnsupportedError, match=why) as refused:
        draw(target, inputs, **call)
    assert "on_unsupported='fallback'" in str(refused.value)
    seed = 2 if call.get("do_sample") else None
    with pytest.warns(UserWarning, match=why) as said:
        handle = as_stock(target, inputs, call=call, seed=seed, times=2, draw=draw, on_unsupported="fallback")
    assert handle.stats.rounds == 0
    assert len([w for w in said if "stock path" in str(w.message)]) == 1


def alone(target: Any, inputs: dict[str, Tensor], draw: Draw = tiny_vlms.generate, **call: Any) -> list[int]:
    """The answer to one prompt."""
    return draw(target, inputs, **call)[0, inputs["input_ids"].shape[1] :].tolist()


def drain(
    flow: Batcher, asked: list[Any], seeds: list[int] | None = None, own: list[dict[str, Any]] | None = None
) -> list[FinishedPrompt]:
    """Everything through the flow, added as room is, with settings of its own; the ends in the order of the prompts."""
    found: dict[Any, FinishedPrompt] = {}
    waiting = list(range(len(asked)))
    while waiting or flow.busy:
        while waiting and flow.free:
            number = waiting.pop(0)
            flow.add(number, asked[number], seeds[number] if seeds else 0, **(own[number] if own else {}))
        for end in flow.step():
            assert end.ticket not in found
            found[end.ticket] = end
    assert flow.free == flow.rows
    return [found[number] for number in range(len(asked))]


def answers(flow: Batcher, asked: list[Any], seeds: list[int] | None = None) -> list[list[int]]:
    """What `drain` gives, where nothing fails."""
    ends = drain(flow, asked, seeds)
    assert [end.error for end in ends] == [None] * len(asked)
    return [end.tokens for end in ends]


def as_alone(
    target: Any, asked: list[dict[str, Tensor]], drafter: Any, rows: int, call: dict[str, Any],
    draw: Draw = tiny_vlms.generate, lengths: int = 1, **options: Any,
) -> ContinuousBatcher:  # fmt: skip
    """Asserts that prompts that share a few rows of a flow are answered as stock answers each alone. The flow.

    Args:
        lengths: that the answers have at least.
    """
    want = [alone(target, one, draw, **call) for one in asked]
    with mmspec.enable(target, drafter, **options):
        flow = ContinuousBatcher(target, None, rows, **call)
        assert answers(flow, asked) == want
        assert flow.stats.tokens in (0, sum(map(len, want))), "none on the stock path"
        assert flow.stats.tokens == mmspec.stats(target).tokens and len({*map(len, want)}) >= lengths
    return flow


def stock_drafts(generator: type, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What one of stock's own candidate generators will have proposed, round by round."""
    seen: list[list[int]] = []
    own = generator.get_candidates  # type: ignore[attr-defined]

    def told(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = own(self, input_ids, *args, **kwargs)
        seen.append(found[0][0, input_ids.shape[1] :].tolist())
        return found

    monkeypatch.setattr(generator, "get_candidates", told)
    return seen
