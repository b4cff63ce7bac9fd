"""What annotations call the things of the host: models, their decoders and processors, and what these take and give."""

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

Mask = Tensor | Mapping[str, Tensor | None] | None  # one for all layers, or for each type; None: all is seen

if TYPE_CHECKING:
    from transformers import GenerationMixin, PretrainedConfig

    class GenerativeModel(PreTrainedModel, GenerationMixin):
        """A model with `generate`. What its own class adds is found by name."""

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
        """The module with the layers that write a model's text."""

        config: PretrainedConfig
        layers: nn.ModuleList

        def __getattr__(self, name: str) -> Any: ...

    class Weighted(nn.Module):
        """What embeds ids, or gives logits; where it is quantized, its weight may be packed."""

        weight: Tensor
        out_features: int
        in_features: int

else:
    GenerativeModel, TextDecoder, Weighted, PretrainedConfig = PreTrainedModel, PreTrainedModel, nn.Module, object


class Configured(Protocol):
    """A model or a pipeline, by what it says of itself."""

    @property
    def config(self) -> object: ...


class Processor(Protocol):
    """What makes a model's inputs of texts and pictures; of a model of text alone it is the tokenizer."""

    @property
    def __call__(self) -> Callable[..., BatchFeature | BatchEncoding]: ...
    @property
    def apply_chat_template(self) -> Callable[..., Any]: ...
    def __hash__(self) -> int: ...
    def __getattr__(self, name: str) -> Any: ...
