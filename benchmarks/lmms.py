"""`python -m benchmarks.lmms`: lmms-eval with the model `mmspec`, which answers its tasks with mmspec enabled.

It takes the arguments of `python -m lmms_eval`.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.models.model_utils.gen_metrics import log_metrics
from PIL import Image
from tqdm import tqdm

from mmspec import media
from mmspec.app import embedded, enabling
from mmspec.app.devices import find_device
from mmspec.app.engine import load
from mmspec.app.media.decoder import VideoReader
from mmspec.app.media.video import FramePolicy
from mmspec.media import MediaLimits
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.prompts import Chat, inputs_of, knows_clips, shown
from mmspec.pipelines.serving.batcher import Batcher, FinishedPrompt, StaticBatcher
from mmspec.statistics import Stats

SUPPORTED = (  # generation_kwargs of tasks
    "max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "num_beams", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "min_new_tokens",
)  # fmt: skip


class Mmspec(lmms):  # type: ignore[misc]
    """The adapter for lmms-eval: loads and enables a model, and converts tasks to its inputs.

    Args:
        pretrained: a folder, a name on the Hub, or an embedded model.
        drafter: as for `mmspec.enable`; "": the default for the model; "none": the stock path, for comparison.
        device: auto, cuda, cuda:1, cpu, …; with several processes each takes the device of its own local rank.
        dtype: auto, float32, bfloat16, …
        batch_size: questions answered at once; "auto": as many as fit into the device's memory.
        max_batch_size: the limit of "auto".
        max_new_tokens: for tasks that do not set it.
        max_num_frames: frames of a video, evenly spaced.
        system_prompt: a text, or a file with one.
        options: further options of `mmspec.enable`, such as compile or depth.
    """

    is_simple = False

    def __init__(
        self, pretrained: str = embedded.MODEL, drafter: str = "", device: str = "auto", dtype: str = "auto",
        batch_size: int | str = 1, max_batch_size: int | None = None, max_new_tokens: int = 1024,
        max_num_frames: int = 32, system_prompt: str = "", **options: object,
    ):  # fmt: skip
        super().__init__()
        try:
            enable = enabling.given((f"{name}={value}" for name, value in options.items()), drafter or None)
        except enabling.EnableError as error:
            raise ValueError(f"--model_args: {str(error).removeprefix('--enable ')}") from error
        drafter = drafter or embedded.drafter(pretrained)
        self.engine = load(pretrained, drafter, _own(device), dtype, max_new_tokens, 0, sees=False, **enable)
        for note in self.engine.notes:
            print(f"mmspec: {note}", file=sys.stderr)
        automatic = str(batch_size).startswith("auto")
        self.batch_size = self.engine.suggest_rows() if automatic else int(batch_size)
        if automatic and max_batch_size is not None:
            self.batch_size = min(self.batch_size, int(max_batch_size))
        self.frames = FramePolicy("uniform", int(max_num_frames), int(max_num_frames))
        self.system_prompt = self._resolve_system_prompt(str(system_prompt))
        self.ignored = set[str]()  # settings that were reported to have no effect
        self.stats = Stats()

    @property
    def model(self) -> GenerativeModel:
        return self.engine.model

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """The answers to the requests, in order."""
        batches, seconds, waiting = self._batches(), 0.0, list(range(len(requests)))
        answers: dict[Any, GenerationResult] = {}
        lengths: dict[Any, int] = {}  # of the prompts
        bar = tqdm(total=len(requests), disable=self.rank != 0, desc="mmspec answers")
        with VideoReader(self.frames) as clips, bar:
            while waiting or batches.busy:
                while waiting and batches.free:
                    number = waiting.pop(0)
                    inputs = inputs_of(self.engine.processor, [self._chat(requests[number].args, clips)])
                    lengths[number] = inputs["input_ids"].shape[1]
                    settings = self._arguments(requests[number].args[2])
                    batches.add(number, inputs.to(self.model.dtype), number, **settings)
                began = time.perf_counter()
                finished = batches.step()
                seconds += time.perf_counter() - began
                for end in finished:
                    answers[end.ticket] = self._result(requests[end.ticket], end, lengths[end.ticket])  # type: ignore
                    bar.update()
        tokens = sum(one.token_counts.output_tokens for one in answers.values())
        self.stats.add(batches.stats)
        rate = batches.stats.tokens_per_target_call if batches.stats.row_rounds else None
        per_forward = None if rate is None else {"tokens_per_forward": rate}
        log_metrics(seconds, tokens, tokens / seconds if seconds else 0.0, per_forward)
        return [answers[number] for number in range(len(requests))]

    def generate_until_multi_round(self, requests: list[Instance]) -> list[list[str]]:
        raise NotImplementedError("--model mmspec has no tasks of several rounds; run them with --model huggingface")

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError(
            "mmspec accelerates generation; a likelihood takes a single forward, which has no use for drafts. "
            "Run loglikelihood tasks with lmms-eval's own models, such as --model huggingface"
        )

    def clean(self) -> None:
        """Print the statistics of mmspec at the end of a run, and free the model."""
        if self.engine.drafter is not None:
            print(f"mmspec: {self.stats}", file=sys.stderr)
        del self.engine
        super().clean()

    def _batches(self) -> Batcher:
        if self.engine.drafter is not None:
            return self.engine.batcher(self.batch_size)
        return StaticBatcher(self.model, self.engine.processor, self.batch_size, **self.engine.settings)

    def _chat(self, arguments: tuple[Any, ...], clips: VideoReader) -> Chat:
        """The messages of a task for its document, in the format of chat templates."""
        _, messages, _, number, task, split = arguments
        turns = self._apply_system_prompt(messages(self.task_dict[task][split][number]), self.system_prompt)
        pairs = [(turn["role"], turn["content"]) for turn in turns]
        listed = [(role, [{"type": "text", "text": text}] if isinstance(text, str) else text) for role, text in pairs]
        return [{"role": role, "content": [one for part in parts for one in self._parts(part, clips)]}
                for role, parts in listed]  # fmt: skip

    def _parts(self, part: dict[str, Any], clips: VideoReader) -> list[dict[str, object]]:
        """Convert a part of a message; a video becomes one part if the processor supports videos, else its frames."""
        kind, value = part["type"], part["url"] if "url" in part else part["text"]
        if kind == "text":
            return [{"type": "text", "text": value}]
        if kind == "image":
            return shown([media.rgb(value) if isinstance(value, Image.Image) else media.load_image(value)])
        cut = isinstance(value, dict) or part.get("start_time") is not None or part.get("end_time") is not None
        if kind != "video" or cut:
            what = "a part of a video" if cut else kind
            raise ValueError(f"--model mmspec supports pictures and whole videos; this task has {what}")
        frames = clips(media.read(value, MediaLimits().max_bytes), (), str(value))
        return shown(frames, knows_clips(self.engine.processor))

    def _arguments(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `generate`; a temperature of 0 or None is greedy."""
        given = {name: settings[name] for name in SUPPORTED if settings.get(name) is not None}
        heat = given.get("temperature")
        given["do_sample"] = bool(given.get("do_sample", heat)) and heat != 0
        if not given["do_sample"]:
            given = {name: value for name, value in given.items() if name not in ("temperature", "top_p")}
        if stops := _stops(settings):
            given["stop_strings"] = stops
        for name in settings.keys() - {"until", *SUPPORTED, *self.ignored}:
            self.ignored.add(name)
            print(f"mmspec: {name} of this task's generation_kwargs has no effect here", file=sys.stderr)
        return given

    def _result(self, request: Instance, end: FinishedPrompt, length: int) -> GenerationResult:
        """The text of an answer, cut at its stop strings, with token counts."""
        if end.error is not None:
            raise end.error
        context, _, settings, *_ = request.args
        text = self.engine.processor.batch_decode([end.tokens], skip_special_tokens=True)[0]
        text = text[: min((text.find(stop) for stop in _stops(settings) if stop in text), default=None)]
        self.cache_hook.add_partial("generate_until", (context, settings), text)
        return GenerationResult(text, TokenCounts(length, len(end.tokens)))


def _stops(settings: dict[str, Any]) -> list[str]:
    until = settings.get("until") or []
    return [stop for stop in ([until] if isinstance(until, str) else until) if stop]


def _own(device: str) -> str:
    """The device of this process: each of several processes on a machine has its own."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    kind = find_device(device).type if device == "auto" else device
    return f"{kind}:{os.environ.get('LOCAL_RANK', '0')}" if several and kind == "cuda" else device


def main() -> None:
    from lmms_eval.__main__ import cli_evaluate
    from lmms_eval.models import MODEL_REGISTRY_V2
    from lmms_eval.models.registry_v2 import ModelManifest

    MODEL_REGISTRY_V2.register_manifest(ModelManifest("mmspec", chat_class_path="benchmarks.lmms.Mmspec"))
    cli_evaluate()


if __name__ == "__main__":
    main()
