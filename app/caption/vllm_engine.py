"""`--engine vllm`: captions with vLLM's offline engine; needs the extra `vllm`.

Written against the interface that vLLM documents: EngineArgs, LLMEngine (add_request, step), SamplingParams, and
prompts with `multi_modal_data`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Sequence
from typing import Any

from PIL import Image

from mmspec.app.caption.model import FatalError
from mmspec.app.embedded import STOCK
from mmspec.app.engine import CaptionResult
from mmspec.app.extras import installing
from mmspec.app.media import video
from mmspec.app.prompt import PromptChoice
from mmspec.pipelines.host.kinds import Processor
from mmspec.pipelines.prompts import chat_text

ROWS = 256  # requests given to vLLM at once; its scheduler decides how many of them run in a batch
DRAFT = 5  # draft length of its speculative decoding, unless depth= sets another
LOOKUP = 4  # longest n-gram that its prompt lookup matches
NGRAM = "ngram"


class VllmFlow:
    """Items are added one by one; `step` returns answers as vLLM's scheduler finishes them."""

    def __init__(self, engine: VllmEngine, rows: int):
        self._engine, self.rows = engine, rows
        self._requests: dict[str, tuple[Hashable, str, float]] = {}
        self._refused: list[CaptionResult] = []
        self._count = 0

    @property
    def free(self) -> int:
        return self.rows - len(self._requests)

    @property
    def busy(self) -> bool:
        return bool(self._requests or self._refused)

    def add(self, ticket: Hashable, frames: Sequence[Image.Image], choice: PromptChoice, seed: int = 0) -> None:
        """Add one picture, or the frames of one clip as several pictures; `seed` is used for sampling."""
        name, self._count = str(self._count), self._count + 1
        try:
            text = chat_text(self._engine.processor, choice.text, len(frames), choice.system, choice.start)
            prompt = {"prompt": text, "multi_modal_data": {"image": list(frames)}}
            self._engine.core.add_request(name, prompt, self._engine.sampling(seed))
        except Exception as error:  # the prompt is too long, or the processor refuses the picture
            self._refused.append(CaptionResult(ticket, error=error))
        else:
            self._requests[name] = (ticket, choice.start, time.perf_counter())

    def step(self) -> list[CaptionResult]:
        """Run one step of vLLM and return the finished answers. Raises FatalError: the engine has died."""
        results, self._refused = self._refused, []
        if not self._requests:
            return results
        try:
            outputs = self._engine.core.step()
        except Exception as error:  # a step runs all requests, so no single item is the cause
            raise FatalError(f"vLLM has died; run the command again. {type(error).__name__}: {error}") from error
        for one in outputs:
            if one.finished and one.request_id in self._requests:
                ticket, start, begun = self._requests.pop(one.request_id)
                best, seconds = one.outputs[0], time.perf_counter() - begun
                text, finish = (start + best.text).strip(), best.finish_reason or ""
                results.append(CaptionResult(ticket, text, len(best.token_ids), seconds, None, finish))
        return results


class VllmEngine:
    drafter = None  # vLLM drafts by itself; it is not compared with stock generate
    notes: list[str] = []

    def __init__(self, core: Any, sampling: Any, processor: Processor, tokens: int, temperature: float):
        self.core, self.processor = core, processor
        self._sampling, self._tokens, self._temperature = sampling, tokens, temperature

    def flow(self, rows: int) -> VllmFlow:
        return VllmFlow(self, rows)

    def suggest_rows(self, frames: int, size: tuple[int, int]) -> int:
        return ROWS

    def sampling(self, seed: int) -> Any:
        drawn = {"seed": seed} if self._temperature > 0 else {}
        return self._sampling(max_tokens=self._tokens, temperature=self._temperature, **drawn)


def load(
    model: str, drafter: str, device: str, dtype: str, max_new_tokens: int, temperature: float, **options: Any
) -> VllmEngine:
    """An engine for a name on the Hub or a folder, on one GPU unless `tensor_parallel_size` says otherwise.

    Args:
        drafter: "none", "ngram", or a draft model that vLLM can load.
        options: `depth`, the draft length; all others are fields of vLLM's EngineArgs.

    Raises FatalError: vLLM is not installed.
    """
    _, _, number = device.partition("cuda:")
    if number and int(options.get("tensor_parallel_size", 1)) == 1:  # must be set before vLLM lists the devices
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = seen[int(number)] if int(number) < len(seen) and seen[0] else number
    try:
        from vllm import EngineArgs, LLMEngine, SamplingParams
    except ImportError as error:
        raise FatalError(f"--engine vllm needs vLLM ({error}); {installing('vllm')}") from error
    from mmspec.pipelines.host.loading import AutoProcessor

    depth = options.pop("depth", DRAFT)
    if drafter != STOCK:
        named = {"method": NGRAM, "prompt_lookup_max": LOOKUP} if drafter == NGRAM else {"model": drafter}
        options["speculative_config"] = {**named, "num_speculative_tokens": depth}
    options.setdefault("limit_mm_per_prompt", {"image": video.MAX_FRAMES})
    core = LLMEngine.from_engine_args(EngineArgs(model=model, dtype=dtype, disable_log_stats=True, **options))
    return VllmEngine(core, SamplingParams, AutoProcessor.from_pretrained(model), max_new_tokens, temperature)
