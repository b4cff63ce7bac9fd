"""LlamaGen as a diffusers pipeline: images from a prompt or a class, token by token or with speculative decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.pipeline_loading_utils import LOADABLE_CLASSES
from diffusers.utils import BaseOutput
from torch import Tensor

from mmspec.config import Options, is_number, is_whole
from mmspec.drafters.plain import Plain
from mmspec.loop import decode, start
from mmspec.models.llamagen import LlamaGenTransformer
from mmspec.models.llamagen_vq import LlamaGenVQ
from mmspec.pipelines.drawing.outputs import OUTPUTS, Generators, Labels, OffloadedWhole, Pictures, class_ids, seeds
from mmspec.pipelines.host import devices
from mmspec.pipelines.host.loading import PreTrainedTokenizerFast, T5EncoderModel
from mmspec.pipelines.host.processors.guidance import Guidance
from mmspec.pipelines.host.processors.table import Processors, warpers
from mmspec.pipelines.llamagen import captions
from mmspec.pipelines.target import captures
from mmspec.pipelines.target.llamagen import Condition, LlamaGenTarget
from mmspec.pipelines.target.model import Request
from mmspec.pipelines.target.noise import CounterNoise
from mmspec.protocols import Proposer
from mmspec.rules import Rule, exact
from mmspec.session import Row, Session
from mmspec.statistics import Stats

# The authors' sampling settings, by kind of condition; a pipeline's own `defaults` override these.
TEXT = {"guidance_scale": 7.5, "top_k": 1000, "top_p": 1.0, "temperature": 1.0, "clean_caption": True}
CLASS = {"guidance_scale": 4.0, "top_k": 2000, "top_p": 1.0, "temperature": 1.0, "clean_caption": True}
for module in (LlamaGenTransformer.__module__, LlamaGenVQ.__module__):  # lets diffusers load them from the hub, too
    LOADABLE_CLASSES.setdefault(module, {})


@dataclass
class LlamaGenOutput(BaseOutput):
    """The result of a call.

    Attributes:
        images: PIL images, or an array or tensor of them, or the token ids for `output_type="latent"`.
        tokens: the token ids [B, grid, grid] of the images.
        stats: the statistics of this call.
        spent: for each image, the total-variation cost of a relaxed rule, 0 without one. Its mean over many images
            bounds the total-variation distance of their distribution from the model's own.
    """

    images: Pictures
    tokens: Tensor | None = None
    stats: Stats | None = None
    spent: list[float] | None = None


@dataclass(frozen=True)
class DecodingPlan:
    """How a call decodes; the default is plain decoding with noise that is fixed by the rows' seeds."""

    drafter: Proposer
    rule: Rule
    reproducible: bool
    compile: bool = False
    add_stats: Callable[[Stats], None] = lambda stats: None


class LlamaGenPipeline(OffloadedWhole):
    """Generates images with LlamaGen (Sun et al. 2024, arXiv 2406.06525), text- or class-conditional.

    Args:
        transformer: the model.
        vqvae: the VQ tokenizer of its tokens.
        text_encoder: T5, for a text-conditional model.
        tokenizer: that of the text encoder.
        defaults: defaults of a call's sampling arguments that differ from the authors'; any of TEXT.
    """

    model_cpu_offload_seq = "text_encoder->transformer->vqvae"
    _optional_components = ["text_encoder", "tokenizer"]

    def __init__(
        self, transformer: LlamaGenTransformer, vqvae: LlamaGenVQ, text_encoder: T5EncoderModel | None = None,
        tokenizer: PreTrainedTokenizerFast | None = None, defaults: dict | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        _check(transformer, vqvae, text_encoder, defaults)
        self.register_modules(transformer=transformer, vqvae=vqvae, text_encoder=text_encoder, tokenizer=tokenizer)
        self.register_to_config(defaults=dict(defaults or {}))
        self.image_processor = VaeImageProcessor(vae_scale_factor=vqvae.downsample)

    @torch.no_grad()
    def __call__(
        self, prompt: str | Sequence[str] | None = None, class_labels: Labels | None = None,
        guidance_scale: float | None = None, top_k: int | None = None, top_p: float | None = None,
        temperature: float | None = None, num_images_per_prompt: int = 1, generator: Generators = None,
        guidance_interval: int = -1, clean_caption: bool | None = None, output_type: str = "pil",
        return_dict: bool = True, callback_on_step_end: Callable[..., object] | None = None,
    ) -> LlamaGenOutput | tuple[Pictures]:  # fmt: skip
        """Generate images.

        Args:
            prompt: one or several texts, or
            class_labels: one or several class numbers.
            guidance_scale: by default 7.5 for text and 4.0 for classes; 1 or less omits the unconditional half.
            top_k: by default 1000 for text and 2000 for classes; 0 keeps every token. Ties at the k-th are kept.
            top_p: by default 1.0, which keeps every token.
            temperature: by default 1.0; 0 takes the likeliest token.
            num_images_per_prompt: the number of images for each prompt or class.
            generator: one, or one per image, which then does not depend on the other images of the call.
            guidance_interval: k ≥ 0 guides only the first k + 2 tokens; −1 all of them.
            clean_caption: clean prompts as in training, which needs `ftfy` and `beautifulsoup4`.
            output_type: "pil", "pt" ([B, 3, h, w]) or "np" ([B, h, w, 3]), pixels in [0, 1], or "latent": token ids.
            return_dict: return a LlamaGenOutput instead of a tuple.
            callback_on_step_end: called after each round with this pipeline, the round's number, the number of tokens
                that every image has, and {"tokens": [list of token ids per image]}.

        Returns:
            LlamaGenOutput, or (images,) with `return_dict=False`.

        Raises:
            ValueError: an invalid argument; the message says what is allowed.
        """
        given = {"guidance_scale": guidance_scale, "top_k": top_k, "top_p": top_p, "temperature": temperature}
        args = self._settings({**given, "clean_caption": clean_caption}, output_type, num_images_per_prompt)
        if not is_whole(guidance_interval, -1):
            raise ValueError(f"guidance_interval must be a whole number ≥ −1 (−1: all); got {guidance_interval!r}")
        condition, valid = self._condition(prompt, class_labels, args["clean_caption"])
        condition, valid = (t.repeat_interleave(num_images_per_prompt, 0) for t in (condition, valid))
        tokens_each, each = self.transformer.config.grid**2, enumerate(seeds(generator, len(valid)))
        rows = [Row([], 0, tokens_each, seed, index=b) for b, seed in each]
        first = None if guidance_interval < 0 else guidance_interval + 2
        guidance = Guidance(args["guidance_scale"], tokens=first) if args["guidance_scale"] > 1 else None
        with self.progress_bar(total=rows[0].limit) as bar:
            for step, session in enumerate(self._rounds(rows, Condition(condition, valid), guidance, args)):
                stats, done = session.stats, min(row.generated for row in rows)
                bar.update(done - bar.n)
                if callback_on_step_end is not None:
                    callback_on_step_end(self, step, done, {"tokens": [list(row.tokens) for row in rows]})
        grid = self.transformer.config.grid
        tokens = torch.tensor([row.tokens for row in rows], device=valid.device).view(-1, grid, grid)
        images = tokens if output_type == "latent" else self._picture(tokens, output_type)
        self.maybe_free_model_hooks()
        return LlamaGenOutput(images, tokens, stats, [row.spent for row in rows]) if return_dict else (images,)

    def _rounds(
        self, rows: list[Row], condition: Condition, guidance: Guidance | None, args: Options
    ) -> Iterator[Session]:
        """The session after each round, starting with the prefill's; it still has the rows that ended in the round."""
        plan, home = self._plan(args["temperature"] > 0), devices.execution(self.transformer)
        devices.wake(self.transformer)
        condition = Condition(condition.what.to(home), condition.valid.to(home))
        noise = CounterNoise() if plan.reproducible else None
        request = Request(Processors(warpers(args)), args["temperature"] > 0, noise)
        for row in rows:
            row.rule, row.request = plan.rule, request
        captured = captures.of(self.transformer, plan.compile)
        target = LlamaGenTarget(self.transformer, plan.drafter.features, guidance, captured, len(rows))
        session, _ = start(target, plan.drafter, list(rows), condition)
        yield session
        for _ in decode(session, target, plan.drafter):
            yield session
        plan.add_stats(session.stats)

    def _plan(self, sample: bool) -> DecodingPlan:
        return DecodingPlan(Plain(), exact, True)

    def _settings(self, given: Options, output_type: str, pictures: int) -> dict[str, Any]:
        """The sampling arguments, filled up with the pipeline's defaults, then with the authors'."""
        args = {**(CLASS if self.transformer.config.classes else TEXT), **self.config.defaults}
        args |= {name: value for name, value in given.items() if value is not None}
        if output_type not in OUTPUTS:
            raise ValueError(f"output_type must be one of {', '.join(OUTPUTS)}; got {output_type!r}")
        for name, fine, allowed in (
            ("guidance_scale", is_number(args["guidance_scale"]), "a number"),
            ("top_k", is_whole(args["top_k"], 0), "a whole number ≥ 0 (0: off)"),
            ("top_p", is_number(args["top_p"]) and 0 < args["top_p"] <= 1, "in (0, 1]"),
            ("temperature", is_number(args["temperature"], 0), "≥ 0 (0: the likeliest token)"),
        ):
            if not fine:
                raise ValueError(f"{name} must be {allowed}; got {args[name]!r}")
        if not is_whole(pictures, 1):
            raise ValueError(f"num_images_per_prompt must be a whole number ≥ 1; got {pictures!r}")
        return args | {"top_k": int(args["top_k"])}

    def _condition(
        self, prompt: str | Sequence[str] | None, class_labels: Labels | None, clean_caption: bool
    ) -> tuple[Tensor, Tensor]:
        """Class ids [B] or text features [B, P, width], and which places of the prefix are valid, bool [B, P]."""
        classes = self.transformer.config.classes
        kind = f"class_labels (0 to {classes - 1})" if classes else "a prompt"
        if (prompt is None) == (class_labels is None) or (class_labels is None) == bool(classes):
            got = [name for name, value in (("prompt", prompt), ("class_labels", class_labels)) if value is not None]
            raise ValueError(f"this model draws from {kind} only; got {' and '.join(got) or 'none'}")
        if class_labels is None:
            texts: list[Any] = list(prompt) if isinstance(prompt, list | tuple) else [prompt]
            return self.encode_prompt(texts, clean_caption)
        device = self._execution_device
        labels = torch.tensor(class_ids(class_labels, classes), device=device)
        valid = torch.ones(len(labels), self.transformer.config.prefix, dtype=torch.bool, device=device)
        return labels, valid

    def encode_prompt(self, prompts: list[str], clean_caption: bool = True) -> tuple[Tensor, Tensor]:
        """T5 features [B, P, width] of texts, at the end of the prefix, zero elsewhere; and which are valid."""
        if self.text_encoder is None or self.tokenizer is None:
            raise ValueError("a prompt needs the components text_encoder and tokenizer; load the pipeline with them")
        if not prompts or not all(isinstance(text, str) and text.strip() for text in prompts):
            raise ValueError(f"a prompt is a text that is not empty, or a list of them; got {prompts!r}")
        texts = captions.cleaned(prompts) if clean_caption else captions.lowered(prompts)
        P, device = self.transformer.config.prefix, self._execution_device
        features, valid = captions.read(texts, self.tokenizer, self.text_encoder, P, device)
        return features.to(self.transformer.dtype), valid

    def _picture(self, tokens: Tensor, output_type: str) -> Pictures:
        devices.wake(self.vqvae)
        tokens = tokens.to(devices.execution(self.vqvae))
        return self.image_processor.postprocess(self.vqvae.decode(tokens).float(), output_type)


def _check(
    transformer: LlamaGenTransformer, vqvae: LlamaGenVQ, text_encoder: T5EncoderModel | None, defaults: Options | None
) -> None:
    """Raise ValueError for components that do not belong together."""
    vocab, codes = transformer.config.vocab, vqvae.config.codes
    if vocab != codes:
        raise ValueError(
            f"the transformer draws from {vocab} tokens, but this VQ tokenizer has {codes} codes; load the tokenizer "
            "that the model was trained with"
        )
    if text_encoder is not None and text_encoder.config.d_model != transformer.config.caption_width:
        raise ValueError(
            f"the transformer reads text features of width {transformer.config.caption_width}, but this text encoder "
            f"has {text_encoder.config.d_model}; load the one that the model was trained with"
        )
    unknown = sorted(set(defaults or {}) - set(TEXT))
    if unknown:
        raise ValueError(f"unknown default {unknown[0]!r}; choose from {', '.join(TEXT)}")
