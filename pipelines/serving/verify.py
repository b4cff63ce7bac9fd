"""verify: checks on the user's own model and inputs that greedy tokens equal stock's, and that the image matters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from mmspec.config import UnsupportedError
from mmspec.pipelines.host import wrappers
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.patching.handle import Patch, put_on

_PICTURES = ("pixel_values", "pixel_values_videos")


@dataclass(frozen=True)
class Report:
    """The result of `verify`.

    Attributes:
        identical: every row has the stock path's tokens; if another image changes nothing, with that image as well.
        rows: the number of rows compared.
        tokens: the number of generated tokens compared, in the longest row.
        first_difference: (row, generated token index) of the first difference, or None.
        gap: the difference of the two best stock logits there; a gap near zero is a tie that low precision may break.
        image_matters: whether another image changes the output; None if the inputs have no image. A short answer, such
            as yes or no, may well stay the same.
        tokens_per_target_call: τ, including the bonus token.
    """

    identical: bool
    rows: int
    tokens: int
    first_difference: tuple[int, int] | None
    gap: float | None
    image_matters: bool | None
    tokens_per_target_call: float

    @property
    def ok(self) -> bool:
        """`identical`. An image that changes nothing is no error, since it changes nothing on the stock path either."""
        return self.identical

    def __str__(self) -> str:
        if self.identical:
            same = f"identical to stock generate on {self.rows} of {self.rows} rows"
        else:
            assert self.first_difference is not None
            row, index = self.first_difference
            same = f"DIFFERS from stock generate, first at row {row}, token {index} (logit gap {self.gap:.2e})"
        these = f"these {self.tokens} tokens" if self.tokens > 1 else "this token"
        seen = {
            None: "no picture in these inputs",
            True: "another picture changes the answer",
            False: f"the picture made no difference to {these}; ask for more"
            if self.identical
            else "ANOTHER PICTURE CHANGES NOTHING",
        }
        return f"{same}; {seen[self.image_matters]}; {self.tokens_per_target_call:.2f} tokens per target call"


def verify(model_or_pipe: object, inputs: Any, max_new_tokens: int = 64) -> Report:
    """Generate greedily with mmspec and on the stock path, and again with another image.

    If the other image changes nothing, it is also given to the stock path, which shows whether mmspec lost the image.

    Args:
        model_or_pipe: an enabled model that generates tokens from a prompt, or the pipeline that contains it.
        inputs: the output of a processor, as for `model.generate(**inputs)`; on the model's device, in its dtype.
        max_new_tokens: the number of tokens to compare.

    Returns:
        A Report; it prints as one line, and `ok` says whether the check passed. Its calls count in `stats`.

    Raises:
        UnsupportedError: the model is not enabled, or cannot be accelerated in this call.
        TypeError: the model only generates images, or does not generate.
    """
    model, outer = wrappers.unwrap(model_or_pipe), wrappers.called(model_or_pipe)
    name = type(model).__name__
    if not hasattr(model, "generate"):
        raise TypeError(
            f"verify compares text, but {name} generates pictures; `mmspec generate PROMPT --model FOLDER "
            "--compare --enable reproducible=true` compares the pictures of a LlamaGen"
        )
    if not hasattr(inputs, "keys") or "input_ids" not in inputs:
        raise TypeError(f"verify takes what the processor returns, with input_ids; got {type(inputs).__name__}")
    handle = Patch.of(model)
    if handle is None:
        raise UnsupportedError(f"{name} is not enabled; call mmspec.enable(model) first")
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "num_beams": 1, "num_return_sequences": 1}
    settings["return_dict_in_generate"] = False
    before = (handle.stats.gained, handle.stats.row_rounds)
    fast = outer.generate(**inputs, **settings)
    gained, rounds = handle.stats.gained - before[0], handle.stats.row_rounds - before[1]
    stock, prompt, fill = _stock(model, outer, inputs, settings), inputs["input_ids"].shape[1], _fill(model)
    where = _first_difference(fast, stock.sequences, prompt, fill)
    other = _other_picture(inputs)
    changed = None
    if other is not None:
        again = outer.generate(**other, **settings)
        changed = _first_difference(fast, again, prompt, fill) is not None
        if where is None and not changed:
            stock = _stock(model, outer, other, settings)
            where = _first_difference(again, stock.sequences, prompt, fill)
    gap = None
    if where is not None:
        best = stock.scores[min(where[1], len(stock.scores) - 1)][where[0]].topk(2).values
        gap = float(best[0] - best[1])
    tau = gained / rounds if rounds else 1.0
    return Report(where is None, len(fast), fast.shape[1] - prompt, where, gap, changed, tau)


def _stock(model: GenerativeModel, outer: GenerativeModel, inputs: Any, settings: dict[str, Any]) -> Any:
    """One call on the stock path; the patch is restored in any case."""
    patch, scored = put_on(model, None), {"return_dict_in_generate": True, "output_scores": True}
    try:
        return outer.generate(**inputs, **(settings | scored))
    finally:
        put_on(model, patch)


def _other_picture(inputs: Any) -> dict[str, Any] | None:
    """The same inputs with every image replaced by its negative; None: there is no image."""
    negatives = {name: -inputs[name] for name in _PICTURES if inputs.get(name) is not None}
    return {**inputs, **negatives} if negatives else None


def _fill(model: GenerativeModel) -> int:
    """The token that `generate` appends to rows that have ended."""
    config = model.generation_config
    ends = config.eos_token_id
    fill = ends if config.pad_token_id is None else config.pad_token_id
    return next(iter(fill), -1) if isinstance(fill, list) else -1 if fill is None else fill


def _first_difference(fast: Tensor, stock: Tensor, prompt: int, fill: int) -> tuple[int, int] | None:
    """(row, generated token index) where two batches [B, ·] first differ; the shorter one is padded."""
    longest = max(fast.shape[1], stock.shape[1])
    a, b = (pad(tokens, (0, longest - tokens.shape[1]), value=fill) for tokens in (fast, stock))
    differs = (a != b).nonzero().tolist()
    if not differs:
        return None
    row, column = min(differs, key=lambda at: at[1])
    return row, column - prompt
