"""What the application uses of a model of transformers, of its processor and of what that makes, whatever the class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn


class ModelInputs(Protocol):
    """Tensors by name, a row each."""

    def __getitem__(self, name: str, /) -> Tensor: ...

    def keys(self) -> Iterable[str]: ...


class Processor(Protocol):
    def batch_decode(self, rows: Sequence[Sequence[int]], /, *, skip_special_tokens: bool) -> list[str]: ...

    def decode(self, tokens: Sequence[int], /, *, skip_special_tokens: bool) -> str: ...


class LoadedModel(Protocol):
    config: Any
    generation_config: Any

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def generate(self, **arguments: object) -> Any: ...

    def eval(self) -> Self: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def buffers(self) -> Iterator[Tensor]: ...

    def set_attn_implementation(self, name: str, /) -> None: ...

    def get_decoder(self) -> Any: ...

    def get_encoder(self, *, modality: str) -> nn.Module: ...

    def get_input_embeddings(self) -> nn.Embedding: ...
