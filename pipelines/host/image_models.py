"""Image models of transformers and pipelines of diffusers: how they are loaded, called with prompts and decoded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoProcessor

from mmspec.config import Options
from mmspec.pipelines.host import wrappers
from mmspec.pipelines.host.kinds import GenerativeModel, Processor
from mmspec.pipelines.host.loading import checked, stock_class

SIZE = "image_area"  # a processor's argument: the number of pixels of an image
SIDES = 32  # sides of pictures of diffusers pipelines are multiples of it
VAE_PARTS = 3  # tokens after an image of Emu3: end of file, end of image, end of sequence


@dataclass(frozen=True)
class ImageModel:
    """A model or pipeline that generates images from prompts; TypeError for one that generates no tokens."""

    target: object  # what `mmspec.enable` takes
    # prompts and settings → an image each, sampled from torch's global generator
    draw: Callable[..., Sequence[Image.Image]]  # returns none if transformers cannot decode them
    codes: int = 0  # the size of the codebook; 0: unknown
    about: str = ""  # what its images depend on besides the model's name

    def __post_init__(self) -> None:
        wrappers.unwrap(self.target)


def load(where: str, device: torch.device, dtype: torch.dtype, decoded: bool = True) -> ImageModel | None:
    """Load the model or pipeline in a folder or on the Hub; None: this file does not know how to call it.

    Args:
        decoded: return None for models whose images transformers cannot decode.

    Raises:
        OSError, ValueError: there is no such model, or its processor is missing.
        TypeError: a pipeline that generates no tokens.
        RuntimeError: a pipeline whose files lack weights.
    """
    try:
        kind = AutoConfig.from_pretrained(where).model_type
    except (OSError, ValueError):
        return _pipeline(where, device, dtype)
    if kind not in CALLS or (decoded and kind in UNDECODED):
        return None
    name, call = CALLS[kind]
    model = checked(stock_class(name), where, dtype=dtype).to(device).eval()
    processor = AutoProcessor.from_pretrained(where)
    return ImageModel(model, lambda prompts, **settings: call(model, processor, prompts, settings), codes_of(model))


def codes_of(model: object) -> int:
    """The size of a model's image codebook by its config; 0: the config does not say."""
    vq = getattr(getattr(model, "config", None), "vq_config", None)
    return getattr(vq, "num_embeddings", 0) or getattr(vq, "codebook_size", 0)


def _pipeline(where: str, device: torch.device, dtype: torch.dtype) -> ImageModel | None:
    import diffusers

    kind = diffusers.DiffusionPipeline.load_config(where).get("_class_name")
    if kind == "LlamaGenPipeline" or not hasattr(diffusers, str(kind)):
        return None
    wrappers.check_pipeline(getattr(diffusers, kind))
    pipe = diffusers.DiffusionPipeline.from_pretrained(where, torch_dtype=dtype)
    try:
        pipe.to(device)
    except NotImplementedError as error:
        raise RuntimeError("its files lack weights. Is the checkpoint complete?") from error
    pipe.set_progress_bar_config(disable=True)

    takes = inspect.signature(pipe.__call__).parameters
    sides = {"height", "width"} & takes.keys()

    def draw(prompts: Sequence[str], **settings: Any) -> Sequence[Image.Image]:
        area = settings.pop(SIZE, None) if sides else None
        if unknown := settings.keys() - takes.keys():
            raise ValueError(f"{kind} takes no {min(unknown)}; leave it out")
        if not sides & settings.keys():
            settings |= dict.fromkeys(sides, _side(pipe, area))
        return pipe(prompt=list(prompts), **settings).images

    return ImageModel(pipe, draw)


def _side(pipe: Any, area: int | None) -> int | None:
    """The side of a square picture of so many pixels, or of the pipeline's own default size; None: it has none."""
    if area:
        return max(1, round(area**0.5 / SIDES)) * SIDES
    own = getattr(pipe, "default_sample_size", None)
    return own * pipe.vae_scale_factor if own else None  # diffusers leaves it to processors that refuse None


def _refuse_size(settings: Options) -> None:
    """Check the settings of a model with a fixed image size.

    Raises:
        ValueError: they have a size.
    """
    if settings.get(SIZE):
        raise ValueError(f"{SIZE} is for Emu3 and diffusers pipelines; leave it out, since this model has one size")


def _sampling(settings: Options) -> dict[str, Any]:
    """Arguments of `generate` for temperature (0 is greedy), top-k and guidance."""
    args = {name: settings[name] for name in ("top_k", "guidance_scale") if settings.get(name) is not None}
    heat = settings.get("temperature")
    return {**args, "do_sample": False} if heat == 0 else {**args, "do_sample": True, "temperature": heat or 1.0}


def _chat(processor: Processor, prompts: Sequence[str]) -> list[str]:
    """The prompts in the form of the processor's chat template, if it has one."""
    if not getattr(processor, "chat_template", None):
        return list(prompts)
    turns = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in prompts]
    return [processor.apply_chat_template(turn, add_generation_prompt=True, tokenize=False) for turn in turns]


def _janus(
    model: GenerativeModel, processor: Processor, prompts: Sequence[str], settings: Options
) -> Sequence[Image.Image]:
    _refuse_size(settings)
    config: Any = model.generation_config
    if not hasattr(config, "generation_kwargs"):  # some releases drop unknown settings of the file
        config.generation_kwargs = {"boi_token_id": processor.tokenizer.boi_token_id}
    inputs = processor(
        text=_chat(processor, prompts), generation_mode="image", return_tensors="pt", padding=True
    ).to(model.device)  # fmt: skip
    drawn = model.generate(**inputs, generation_mode="image", **_sampling(settings))
    return _pictures(processor, model.decode_image_tokens(drawn).permute(0, 3, 1, 2))


def _emu3(
    model: GenerativeModel, processor: Processor, prompts: Sequence[str], settings: Options
) -> Sequence[Image.Image]:
    """Images guided by the empty prompt, on the grid that the processor computes from `image_area`."""
    size = {SIZE: settings[SIZE]} if settings.get(SIZE) else {}
    both = [
        processor(
            text=texts, return_for_image_generation=True, return_tensors="pt", padding=True, padding_side="left", **size
        )
        for texts in (list(prompts), [""] * len(prompts))
    ]  # fmt: skip
    inputs, empty = ({name: torch.as_tensor(value).to(model.device) for name, value in one.items()} for one in both)
    height, width = inputs.pop("image_sizes")[0].tolist()
    sampling = {"guidance_scale": 3.0, **_sampling(settings)}
    if sampling["guidance_scale"] > 1:
        sampling |= {
            "negative_prompt_ids": empty["input_ids"],
            "negative_prompt_attention_mask": empty["attention_mask"],
        }
    length = height * (width + 1) + VAE_PARTS
    drawn = model.generate(
        **inputs, **sampling, max_new_tokens=length,
        prefix_allowed_tokens_fn=_emu3_grid(model, processor, height, width),
    )  # fmt: skip
    tokens = drawn[:, inputs["input_ids"].shape[1] :]
    return _pictures(processor, model.decode_image_tokens(image_tokens=tokens, height=height, width=width))


def _chameleon(
    model: GenerativeModel, processor: Processor, prompts: Sequence[str], settings: Options
) -> Sequence[Image.Image]:
    """Generates tokens but returns no images; needs an enabled model, since stock has no such call and no decoder."""
    _refuse_size(settings)
    inputs = processor(text=list(prompts), return_tensors="pt", padding=True, padding_side="left").to(model.device)
    model.generate(**inputs, multimodal_generation_mode="image-only", **_sampling(settings))
    return []


def _pictures(processor: Processor, pixels: Tensor) -> list[Image.Image]:
    """Images from a decoder's output [B, 3, H, W], which is normalized like the model's inputs."""
    mean, std = (torch.tensor(getattr(processor.image_processor, name)) for name in ("image_mean", "image_std"))
    pixels = pixels.float().cpu() * std[:, None, None] + mean[:, None, None]
    return [Image.fromarray(one) for one in (255 * pixels).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()]


def _emu3_grid(
    model: GenerativeModel, processor: Processor, height: int, width: int
) -> Callable[[int, Tensor], list[int]]:
    """Allowed next tokens: rows of `width` codes, each with an end-of-line token, then the tokens that end an image."""
    tokenizer = processor.tokenizer
    codes = list(model.vocabulary_mapping.image_tokens)
    begin, line = tokenizer.image_wrapper_token_id, model.vocabulary_mapping.eol_token_id
    ends = [*tokenizer.convert_tokens_to_ids([processor.eof_token, processor.image_end_token]), tokenizer.eos_token_id]

    def allowed(row: int, ids: Tensor) -> list[int]:
        place = int(len(ids) - (ids == begin).nonzero()[0]) - 1  # tokens since the begin-of-image token
        if place < height * (width + 1):
            return [line] if place % (width + 1) == width else codes
        return [ends[min(place - height * (width + 1), VAE_PARTS - 1)]]

    allowed.mmspec_pure = True  # type: ignore[attr-defined]
    return allowed


CALLS: dict[str, tuple[str, Callable[..., Sequence[Image.Image]]]] = {  # config's model_type → class, and its call
    "janus": ("JanusForConditionalGeneration", _janus),
    "emu3": ("Emu3ForConditionalGeneration", _emu3),
    "chameleon": ("ChameleonForConditionalGeneration", _chameleon),
}
UNDECODED = {"chameleon"}
