"""Types of transformers for annotations: models, decoders and processors, with their inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

from torch import Tensor, nn
from transformers import (
    BatchEncoding,
    BatchFeature,
    Cache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import ModelOutput

__all__ = ["BatchFeature", "Cache", "GenerationConfig", "ModelOutput", "PreTrainedTokenizerBase", "PretrainedConfig"]

Mask = Tensor | Mapping[str, Tensor | None] | None  # for all layers, or one for each layer type; None: no mask

if TYPE_CHECKING:
    from transformers import GenerationMixin, PretrainedConfig

    class GenerativeModel(PreTrainedModel, GenerationMixin):
        """A model with `generate`. `__getattr__` allows the attributes of its own class."""

        config: PretrainedConfig
        generation_config: GenerationConfig

        def __getattr__(self, name: str) -> Any: ...
        def to(self, *args: object, **kwargs: object) -> Self: ...  # type: ignore[override]
        def get_decoder(self) -> TextDecoder: ...
        def get_input_embeddings(self) -> Weighted: ...
        def get_output_embeddings(self) -> Weighted | None: ...
        def _prefill(
            self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any],
            is_first_iteration: bool = True,
        ) -> ModelOutput: ...  # fmt: skip

    class TextDecoder(PreTrainedModel):
        """The module with a model's text decoder layers."""

        config: PretrainedConfig
        layers: nn.ModuleList

        def __getattr__(self, name: str) -> Any: ...

    class Weighted(nn.Module):
        """An embedding or a head; its weight may be packed if it is quantized."""

        weight: Tensor
        out_features: int
        in_features: int

else:
    GenerativeModel, TextDecoder, Weighted, PretrainedConfig = PreTrainedModel, PreTrainedModel, nn.Module, object


class Configured(Protocol):
    """A model or a pipeline with a config."""

    @property
    def config(self) -> object: ...


class Processor(Protocol):
    """Turns texts and images into a model's inputs; for a text-only model it is the tokenizer."""

    @property
    def __call__(self) -> Callable[..., BatchFeature | BatchEncoding]: ...
    @property
    def apply_chat_template(self) -> Callable[..., Any]: ...
    def __hash__(self) -> int: ...
    def __getattr__(self, name: str) -> Any: ...
