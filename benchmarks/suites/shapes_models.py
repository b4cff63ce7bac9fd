"""Kinds of models whose rounds are measured: how to build one, its drafters and its prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmspec.checkpoints.layouts import LAYOUTS
from mmspec.drafters.eagle import EagleDrafter
from mmspec.pipelines.drafters.mtp import MtpDrafter
from mmspec.registry import drafter_class

REAL, TOY = "real", "toy"
Config = Mapping[str, Any]  # arguments of one, by name
Sizes = Mapping[str, Config]  # by REAL and TOY
CONTEXTS = {REAL: (1024, 4096, 16384), TOY: (64, 128, 256)}  # of vision-language models, up to their maximum length

# The trees that the authors drafted with; EAGLE's is EAGLE-2's for targets of 7B (Li et al. 2024, §4).
TREES: dict[str, Config] = {
    "vispec": LAYOUTS["vispec"].usual,
    "msd": LAYOUTS["msd"].usual,
    "eagle": {"depth": 6, "width": 10, "size": 60},
}


@dataclass(frozen=True)
class Chat:
    """A vision-language model of transformers with one picture in its prompts, and its drafters.

    Attributes:
        build: a model of given shapes of text and vision, in a dtype, on the current device.
        text, vision: arguments of the two configs.
        picture: the tensors of B pictures, and how many tokens one has, from the vision config and `side`.
        side: patches along a side of the picture.
        drafters: by method, the values of its config that do not follow from the text model; none for "mtp".
        axes: M-RoPE: prompts have token types.
    """

    build: Callable[[Config, Config, torch.dtype], Any]
    text: Sizes
    vision: Sizes
    picture: Callable[[Config, int, int], tuple[dict[str, Tensor], int]]
    side: Mapping[str, int]
    drafters: Mapping[str, Config]
    axes: bool = False

    @property
    def contexts(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(c for c in some if not self.beyond(name, c)) for name, some in CONTEXTS.items()}

    def target(self, sizes: str, dtype: torch.dtype) -> Any:
        return self.build(self.text[sizes], self.vision[sizes], dtype)

    def feature_drafter(self, method: str, sizes: str) -> EagleDrafter:
        """The published shape: one layer of the text model, with grouped keys only where the table says so."""
        t, own = self.text[sizes], self.drafters[method]
        given = {
            "hidden": t["hidden_size"], "intermediate": t["intermediate_size"], "heads": t["num_attention_heads"],
            "kv_heads": t["num_attention_heads"], "vocab": t["vocab_size"], "norm_eps": t["rms_norm_eps"],
            "rope_theta": t["rope_parameters"]["rope_theta"], **TREES[method], **own,
        }  # fmt: skip
        if given.pop("grouped", False):
            given["kv_heads"] = t["num_key_value_heads"]
        made = drafter_class(method)
        return made(made.Config.of(given)).eval()

    def parts(self, sizes: str, dtype: torch.dtype) -> dict[str, nn.Module]:
        """The target and all drafters; multi-token-prediction heads use the model's own classes."""
        made_parts: dict[str, nn.Module] = {"target": self.target(sizes, dtype)}
        for name in self.drafters:
            own = name == MtpDrafter.method
            made = MtpDrafter.untrained(made_parts["target"]) if own else self.feature_drafter(name, sizes)
            made_parts[name] = nn.Module.to(made, dtype)  # here, so that each `enable` uses the same weights
        return made_parts

    def beyond(self, sizes: str, context: int) -> str:
        """Why the model cannot read this many tokens; empty if it can."""
        most = self.text[sizes]["max_position_embeddings"]
        return f"beyond {most} positions" if context > most else ""

    def held(self, sizes: str, context: int, batch: int) -> int:
        """Numbers that a cell needs besides the weights: keys and values of a static and of a growing cache."""
        t = self.text[sizes]
        width = t.get("head_dim", t["hidden_size"] // t["num_attention_heads"]) * t["num_key_value_heads"]
        layers = t["num_hidden_layers"] // t.get("full_attention_interval", 1)
        return 2 * 2 * layers * width * context * batch

    def prompt(self, model: Any, sizes: str, length: int, batch: int) -> dict[str, Tensor]:
        """A picture and random text, [batch, length], without padding; rows differ.

        Raises:
            ValueError: the picture alone is longer than `length`.
        """
        pictures, count = self.picture(self.vision[sizes], self.side[sizes], batch)
        if length < count + 2:
            raise ValueError(f"a prompt of {length} tokens has no room for a picture of {count}; take longer contexts")
        image = model.config.image_token_id
        ids = torch.randint(3, min(image, self.text[sizes]["vocab_size"]) - 8, (batch, length))
        ids[:, 1 : 1 + count] = image
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pictures}
        if self.axes:
            inputs["mm_token_type_ids"] = (ids == image).long()
        return {n: t.to(model.device, model.dtype if t.is_floating_point() else None) for n, t in inputs.items()}


@dataclass(frozen=True)
class Drawn:
    """An image model; its pictures have a fixed length.

    Attributes:
        shape: arguments of the model.
        before: the argument that sets the number of positions before a picture.
    """

    shape: Sizes
    before: ClassVar[str]

    @property
    def contexts(self) -> dict[str, tuple[int, ...]]:
        return {name: (c[self.before] + c["grid"] ** 2,) for name, c in self.shape.items()}

    def beyond(self, sizes: str, context: int) -> str:
        return ""


@dataclass(frozen=True)
class Codes(Drawn):
    """LlamaGen with text features and guidance; Jacobi windows draw whole pictures."""

    before = "prefix"
    window: int = 32

    def target(self, sizes: str, dtype: torch.dtype) -> Any:
        from mmspec.models.llamagen import LlamaGenTransformer  # needs diffusers

        return nn.Module.to(LlamaGenTransformer(**self.shape[sizes]), dtype)

    def parts(self, sizes: str, dtype: torch.dtype) -> dict[str, nn.Module]:
        return {"target": self.target(sizes, dtype)}

    def held(self, sizes: str, context: int, batch: int) -> int:
        c = self.shape[sizes]
        return 2 * 2 * 2 * c["num_layers"] * c["dim"] * context * batch  # two streams


@dataclass(frozen=True)
class Latents(Drawn):
    """MAR with a smaller MAR as drafter and guidance, one token per iteration, from the middle of a picture on.

    Attributes:
        steps: denoising steps.
        ahead: tokens drafted in a round.
    """

    before = "buffer"
    draft: Sizes
    steps: Mapping[str, int]
    ahead: int = 8

    def parts(self, sizes: str, dtype: torch.dtype) -> dict[str, nn.Module]:
        from mmspec.models.mar import MARTransformer2DModel  # needs diffusers

        shapes = {"target": self.shape[sizes], "draft": self.draft[sizes]}
        return {name: nn.Module.to(MARTransformer2DModel(**shape), dtype) for name, shape in shapes.items()}

    def held(self, sizes: str, context: int, batch: int) -> int:
        return 0


Shape = Chat | Codes | Latents


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def on_paper(shape: Shape, sizes: str) -> dict[str, int]:
    """The number of parameters of the target and of its drafters, without allocating them."""
    with torch.device("meta"):
        return {name: parameters(part) for name, part in shape.parts(sizes, torch.bfloat16).items()}
