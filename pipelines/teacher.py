"""The teacher in distillation: a frozen target that generates answers and returns its features, batch by batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmspec.drafters.draft_vocab import DraftVocab
from mmspec.pipelines.host import forward, wrappers
from mmspec.pipelines.host.call import TYPES
from mmspec.pipelines.host.decoder import dtype_of, embedding, head
from mmspec.pipelines.host.kinds import BatchFeature, GenerativeModel, Processor
from mmspec.pipelines.host.tapping import taps
from mmspec.pipelines.host.vision import media, placeholders
from mmspec.pipelines.prompts import chat, inputs_of, knows_clips
from mmspec.train.data import TrainingSample
from mmspec.train.trace import Trace

_PER_TOKEN = (*TYPES[:2], "attention_mask")


class Teacher:
    """Context manager around a stock model; while it is open, hooks record the decoder's features."""

    def __init__(self, model: GenerativeModel, processor: Processor, features: tuple[int, ...]) -> None:
        self.model = wrappers.unwrap(model).eval().requires_grad_(False)
        self.processor, self.dtype = processor, dtype_of(self.model)
        self.features = features
        self._taps = taps(self.model, features)

    def __enter__(self) -> Teacher:
        self._taps.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._taps.__exit__()

    def embed(self, ids: Tensor) -> Tensor:
        return embedding(self.model)(ids)

    def head(self, hidden: Tensor, vocab: DraftVocab | None = None) -> Tensor:
        """Logits [..., V], or of a draft vocabulary [..., V_d], of final features [..., H]."""
        last = head(self.model)
        assert last is not None
        return last(hidden) if vocab is None else vocab.logits(last, hidden)

    def _inputs(self, samples: Sequence[TrainingSample]) -> BatchFeature:
        clips = knows_clips(self.processor)
        chats = [chat(sample.prompt, sample.load(), clips=sample.clip and clips) for sample in samples]
        return inputs_of(self.processor, chats).to(self.model.device)

    @torch.no_grad()
    def answers(self, samples: Sequence[TrainingSample], max_new_tokens: int, temperature: float) -> list[list[int]]:
        """The target's own answers as token ids, including the end-of-sequence token; temperature 0 is greedy."""
        inputs = self._inputs(samples)
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        out = self.model.generate(**inputs, max_new_tokens=max_new_tokens, **sampling)
        out, eos = out[:, inputs["input_ids"].shape[1] :], self.model.generation_config.eos_token_id
        ends = set(eos if isinstance(eos, list) else [eos])
        return [_cut(row, ends, set(placeholders(self.model.config))) for row in out.tolist()]

    @torch.no_grad()
    def trace(self, samples: Sequence[TrainingSample], answers: Sequence[Sequence[int]]) -> Trace:
        """One right-padded forward over prompts and answers, with the features and input embeddings of the decoder."""
        inputs = self._inputs(samples)
        mask = inputs["attention_mask"].bool()
        prompts = [row[keep].tolist() for row, keep in zip(inputs["input_ids"], mask, strict=True)]
        longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
        device = mask.device
        ids = torch.zeros(len(prompts), longest, dtype=torch.long, device=device)
        valid, answered = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
        arguments = {name: t for name, t in inputs.items() if name not in (*_PER_TOKEN, "input_ids")}
        types = {name: torch.zeros_like(ids) for name in _PER_TOKEN[:2] if name in inputs}
        for b, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            n, m = len(prompt), len(answer)
            ids[b, : n + m] = torch.tensor([*prompt, *answer], device=device)
            valid[b, : n + m] = True
            answered[b, n : n + m] = True
            for name, t in types.items():
                t[b, :n] = inputs[name][b, mask[b]]
                t[b, n:] = inputs[name][b, -1]
        read = forward.cacheless(self.model, ids, valid, {**arguments, **types})
        features = torch.cat(read.features(self.features), -1)
        embeds = read.arguments.get("inputs_embeds")
        embeds = self.embed(ids) if embeds is None else embeds
        visual = media(ids, self.model.config, inputs)
        places = read.arguments.get("position_ids")
        places = torch.arange(longest, device=device).expand_as(ids) if places is None else places
        positions = places.movedim(0, -1) if places.dim() == 3 else places[..., None]
        positions = positions.expand(*ids.shape, -1)
        return Trace(ids, embeds, features, read.final, valid, answered, visual, positions)


def _cut(row: list[int], ends: set[int], placeholders: set[int]) -> list[int]:
    """Cut after the first end-of-sequence token, or before the first image placeholder, which text cannot contain."""
    for i, token in enumerate(row):
        if token in placeholders:
            return row[:i]
        if token in ends:
            return row[: i + 1]
    return row
