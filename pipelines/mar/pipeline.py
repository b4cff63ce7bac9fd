"""MAR as a diffusers pipeline: class-conditional images, whose continuous tokens are drawn in a random order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.pipeline_loading_utils import LOADABLE_CLASSES
from diffusers.utils import BaseOutput
from torch import Tensor

from mmspec.config import Options, is_number, is_whole, option_names
from mmspec.continuous.denoising import NOT_NUMBERS
from mmspec.models.mar import MARTransformer2DModel
from mmspec.models.mar_scheduler import MARScheduler
from mmspec.modes import Mode, each_in
from mmspec.pipelines.drawing.outputs import OUTPUTS, Generators, Labels, OffloadedWhole, Pictures, class_ids, seeds
from mmspec.pipelines.host import devices
from mmspec.pipelines.host.devices import mode_of
from mmspec.pipelines.mar.loop import GUIDANCE, STEPS, MarRunner, MarState, canvas, distribution, plain
from mmspec.pipelines.mar.plan import MarStats, Speculation, tally
from mmspec.pipelines.mar.speculate import draw
from mmspec.pipelines.patching.family import Family

# The authors' settings for fast sampling; a pipeline's own `defaults` override these.
DEFAULTS = {
    "guidance_scale": 3.0, "guidance_schedule": "linear", "num_inference_steps": 64, "num_diffusion_steps": 100,
    "annealing": "linear", "temperature": 1.0,
}  # fmt: skip
for module in (MARTransformer2DModel.__module__, MARScheduler.__module__):  # lets diffusers load them, too
    LOADABLE_CLASSES.setdefault(module, {"MARScheduler": ["save_pretrained", "from_pretrained"]})


@dataclass
class MAROutput(BaseOutput):
    """The result of a call.

    Attributes:
        images: PIL images, or an array or tensor of them, or the tokens for `output_type="latent"`.
        tokens: fp32 [B, grid², channels], in raster order.
        work: forwards of the trunk, rows in them, and evaluations of the head; with `draft_` those of a draft model.
        stats: statistics of drafted tokens, by turn; None without speculation.
    """

    images: Pictures
    tokens: Tensor | None = None
    work: dict[str, int] | None = None
    stats: MarStats | None = None


class MARPipeline(OffloadedWhole):
    """Generates class-conditional images with MAR (Li et al. 2024, arXiv 2406.11838).

    Args:
        transformer: the model with its diffusion head.
        scheduler: the head's sampler.
        vae: decodes the tokens.
        defaults: defaults of a call's sampling arguments that differ from the authors'; any of DEFAULTS.
        id2label: names of the classes.
    """

    model_cpu_offload_seq = "transformer->vae"

    def __init__(
        self, transformer: MARTransformer2DModel, scheduler: MARScheduler, vae: AutoencoderKL,
        defaults: dict | None = None, id2label: dict | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        channels, latent = transformer.config.channels, vae.config.latent_channels
        if channels != latent:
            raise ValueError(
                f"the transformer draws tokens of {channels} channels, but this VAE has {latent}; load the VAE "
                "that the model was trained with"
            )
        unknown = sorted(set(defaults or {}) - set(DEFAULTS))
        if unknown:
            raise ValueError(f"unknown default {unknown[0]!r}; choose from {', '.join(DEFAULTS)}")
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae)
        self.register_to_config(defaults=dict(defaults or {}), id2label=dict(id2label or {}))
        self._speculation: Speculation | None = None
        self.image_processor = VaeImageProcessor(vae_scale_factor=2 ** (len(vae.config.block_out_channels) - 1))

    @torch.no_grad()
    def __call__(
        self, class_labels: Labels, guidance_scale: float | None = None, guidance_schedule: str | None = None,
        num_inference_steps: int | None = None, num_diffusion_steps: int | tuple[int, int] | None = None,
        annealing: str | None = None, temperature: float | None = None, generator: Generators = None,
        fast_head: bool = True, compile: bool = False, output_type: str = "pil", return_dict: bool = True,
        callback_on_step_end: Callable[..., object] | None = None,
    ) -> MAROutput | tuple[Pictures]:  # fmt: skip
        """Generate an image of each class.

        Args:
            class_labels: one or several class numbers, or names in the pipeline's `id2label`.
            guidance_scale: by default 3.0; 1 omits the unconditional half.
            guidance_schedule: "linear" grows the guidance from 1 with the share of tokens drawn, "constant" does not.
            num_inference_steps: the number of iterations, by default 64; with one per token they are drawn one by one.
            num_diffusion_steps: denoising steps of a token, by default 100; two numbers: of the first and the last
                token (DiSA), which is another distribution than that of the larger number.
            annealing: "linear", "cosine" or "two-stage", the schedule between two numbers of denoising steps.
            temperature: of the noise of the steps, by default 1.0.
            generator: one, or one per image, which then does not depend on the other images of the call.
            fast_head: compute only once what the head's steps share; False runs the head as it is defined.
            compile: compile the fast head's steps, separately for 1, 2, 4, 8 … tokens at a time, which takes seconds
                each; checked against the uncompiled ones.
            output_type: "pil", "pt" ([B, 3, h, w]) or "np" ([B, h, w, 3]), pixels in [0, 1], or "latent": tokens.
            return_dict: return a MAROutput instead of a tuple.
            callback_on_step_end: called after each iteration with this pipeline, its number, the number of tokens that
                every image has, and {"tokens": [B, grid², channels]}.

        Raises:
            ValueError: an invalid argument; the message says what is allowed.
        """
        given = {
            "guidance_scale": guidance_scale, "guidance_schedule": guidance_schedule, "temperature": temperature,
            "num_inference_steps": num_inference_steps, "num_diffusion_steps": num_diffusion_steps,
            "annealing": annealing,
        }  # fmt: skip
        args = self._settings(given, output_type)
        labels = self._labels(class_labels)
        devices.wake(self.transformer)
        runner, speculation = self._runner(args, fast_head, compile), self._speculation
        draft_runner, stats = runner, None
        state = canvas(self.transformer, labels, seeds(generator, len(labels)))
        if speculation is None:
            rounds = plain(runner, state)
        else:
            speculation.check(self.transformer.tokens, runner.distribution, self.scheduler)
            if speculation.draft is not None:
                draft_runner = replace(runner, model=speculation.draft.to(self.transformer.device))
            stats = tally(self.transformer.tokens)
            rounds = draw(runner, state, speculation, draft_runner, stats)
        try:
            self._follow(mode_of(runner.model, draft_runner.model), rounds, callback_on_step_end)
            if state.tokens.isnan().any():
                raise ValueError(NOT_NUMBERS)
            images = state.tokens if output_type == "latent" else self.picture(state.tokens, output_type)
        finally:
            self.maybe_free_model_hooks()
            if draft_runner is not runner:
                draft_runner.model.to(self.transformer.device)  # from which offloaded models have gone
        work = runner.work()
        if draft_runner is not runner:
            work |= {f"draft_{name}": n for name, n in draft_runner.work().items()}
        return MAROutput(images, state.tokens, work, stats) if return_dict else (images,)

    def _follow(self, mode: Mode, rounds: Iterator[MarState], callback: Callable[..., object] | None) -> None:
        """Run all rounds, with a progress bar and the caller's callback, which runs outside of the mode."""
        with self.progress_bar(total=self.transformer.tokens) as bar:
            for step, state in enumerate(each_in(mode, rounds)):
                done = min(state.counts)
                bar.update(done - bar.n)
                if callback is not None:
                    callback(self, step, done, {"tokens": state.tokens.clone()})

    def enable_speculation(
        self, draft: MARTransformer2DModel | MARPipeline | str | Path | None = None, **settings: Any
    ) -> None:
        """Use speculative decoding in all later calls, for the distribution of one token per iteration.

        Args:
            draft: a smaller MAR on the same VAE: a transformer, a pipeline with one, or a folder or hub name of
                weights; None: the model drafts for itself.
            settings: `ahead`, `rule`, `eta`, `prefill` and `width`, see `mmspec.pipelines.mar.plan.Speculation`.

        Raises:
            ValueError: settings out of range, a draft model that does not fit, or a scheduler without `final_noise`,
                which the exact rule needs.
        """
        if isinstance(draft, (str, Path)):
            draft = MARTransformer2DModel.from_pretrained(draft).to(self.transformer.device, self.transformer.dtype)
        model: Any = getattr(draft, "transformer", draft)
        known = [name for name in option_names(Speculation) if name != "draft"]
        if unknown := next((name for name in settings if name not in known), None):
            raise ValueError(f"speculation has no setting {unknown!r}; choose from {', '.join(known)}")
        speculation = Speculation(model, **settings)
        if model is not None:
            if not isinstance(model, MARTransformer2DModel):
                raise ValueError(f"a draft must be a MAR or a pipeline with one; got a {type(draft).__name__}")
            for name in ("channels", "grid", "classes"):
                own, its = getattr(self.transformer.config, name), getattr(model.config, name)
                if own != its:
                    raise ValueError(f"a draft must have the model's {name}, {own}; this one has {its}")
        speculation.check_noise(self.scheduler)
        self._speculation = speculation

    def disable_speculation(self) -> None:
        """Turn speculative decoding off."""
        self._speculation = None

    def _runner(self, args: Options, fast: bool, compile: bool) -> MarRunner:
        if compile and not fast:
            raise ValueError("compile=True compiles the fast head; leave fast_head=False out")
        steps = args["num_diffusion_steps"]
        steps = tuple(map(int, steps)) if isinstance(steps, (list, tuple)) else int(steps)
        for each in steps if isinstance(steps, tuple) else (steps,):
            self.scheduler.check(each)
        definition = distribution(
            self.transformer.tokens, args["num_inference_steps"], args["guidance_scale"], args["guidance_schedule"],
            steps, args["annealing"], args["temperature"],
        )  # fmt: skip
        return MarRunner(self.transformer, self.scheduler, definition, fast, compile)

    def _settings(self, given: Options, output_type: str) -> dict[str, Any]:
        """The sampling arguments, filled up with the pipeline's defaults, then with the authors'."""
        args = {**DEFAULTS, **self.config.defaults, **{name: v for name, v in given.items() if v is not None}}
        L = self.transformer.tokens
        if given["num_inference_steps"] is None:
            args["num_inference_steps"] = min(args["num_inference_steps"], L)
        for name, fine, allowed in (
            ("output_type", output_type in OUTPUTS, f"one of {', '.join(OUTPUTS)}"),
            ("guidance_schedule", args["guidance_schedule"] in GUIDANCE, f"one of {', '.join(GUIDANCE)}"),
            ("annealing", args["annealing"] in STEPS, f"one of {', '.join(STEPS)}"),
            (
                "annealing",
                given["annealing"] is None or isinstance(args["num_diffusion_steps"], (list, tuple)),
                "left out, or num_diffusion_steps two numbers, between which it is the schedule",
            ),
            ("guidance_scale", is_number(args["guidance_scale"]), "a number"),
            (
                "num_inference_steps",
                is_whole(args["num_inference_steps"], 1) and args["num_inference_steps"] <= L,
                f"from 1 to the picture's {L} tokens",
            ),
            ("num_diffusion_steps", _steps(args["num_diffusion_steps"]), "a whole number, or two of them"),
            ("temperature", is_number(args["temperature"], 0), "≥ 0 (0: no noise in the steps)"),
        ):
            if not fine:
                raise ValueError(f"{name} must be {allowed}; got {({**args, 'output_type': output_type})[name]!r}")
        return args

    def _labels(self, given: Labels) -> Tensor:
        """Class ids [B] of numbers or names."""
        names = {str(name): int(i) for i, name in self.config.id2label.items()}
        return torch.tensor(class_ids(given, self.transformer.config.classes, names), device=self._execution_device)

    def picture(self, tokens: Tensor, output_type: str = "pil") -> Pictures:
        """Images of tokens [B, grid², channels] in the call's form; tokens that are not drawn yet are zero."""
        devices.wake(self.vae)
        grid = self.transformer.config.grid
        latents = tokens.transpose(1, 2).unflatten(2, (grid, grid)) / self.vae.config.scaling_factor
        pixels = self.vae.decode(latents.to(self.vae.dtype)).sample.clamp(-1, 1)
        return self.image_processor.postprocess(pixels.float(), output_type)


def _steps(given: object) -> bool:
    """Whether this is a valid number of steps, or two, for the first and the last token."""
    pair = given if isinstance(given, (list, tuple)) and len(given) == 2 else [given]
    return all(is_whole(one, 1) for one in pair)


class Mar(Family[MARPipeline]):
    """The family of MAR, which `enable` refuses: continuous tokens are drafted by `pipe.enable_speculation()`."""

    def unsupported(self, model: MARPipeline) -> str:
        return (
            "its tokens are continuous, so drafters of token ids and their rules do not fit; call "
            "pipe.enable_speculation(), with draft=… for a smaller MAR as the draft model"
        )
