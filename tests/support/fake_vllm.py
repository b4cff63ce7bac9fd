"""A module that keeps the interface of vLLM that `--engine vllm` uses, and answers from the pixels; for tests."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any


@dataclass
class EngineArgs:
    """The fields of vLLM's that are used; any other is refused, as there."""

    model: str
    dtype: str = "auto"
    limit_mm_per_prompt: dict[str, int] = field(default_factory=dict)
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    speculative_config: dict[str, Any] | None = None
    disable_log_stats: bool = False


@dataclass
class SamplingParams:
    max_tokens: int | None = 16
    temperature: float = 1.0
    seed: int | None = None


@dataclass
class CompletionOutput:
    text: str
    token_ids: list[int]
    finish_reason: str | None


@dataclass
class RequestOutput:
    request_id: str
    outputs: list[CompletionOutput]
    finished: bool


class LLMEngine:
    """Every step writes one token of each of its requests; an answer has as many as its text has letters."""

    made: list[LLMEngine] = []
    dies_after: int | None = None

    def __init__(self, args: EngineArgs):
        self.args, self.running, self.steps = args, {}, 0
        self.prompts: list[str] = []
        LLMEngine.made.append(self)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        return cls(engine_args)

    def add_request(self, request_id: str, prompt: dict[str, Any], params: SamplingParams) -> None:
        pictures = prompt["multi_modal_data"]["image"]
        if len(pictures) > self.args.limit_mm_per_prompt["image"]:
            raise ValueError(f"at most {self.args.limit_mm_per_prompt['image']} images may be provided in one prompt")
        self.prompts.append(prompt["prompt"])
        seen = hashlib.sha256(b"".join(picture.tobytes() for picture in pictures)).hexdigest()
        self.running[request_id] = [f" saw {seen[:8]} {params.seed or ''}", 0, params.max_tokens]

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[RequestOutput]:
        self.steps += 1
        if self.dies_after is not None and self.steps > self.dies_after:
            raise RuntimeError("EngineCore encountered an issue")
        found = []
        for name, one in list(self.running.items()):
            one[1] += 1
            text, written, most = one
            over = written == min(len(text), most)
            reason = "length" if over and len(text) > most else "stop" if over else None
            found.append(RequestOutput(name, [CompletionOutput(text[:written], [*range(written)], reason)], over))
            if over:
                del self.running[name]
        return found
