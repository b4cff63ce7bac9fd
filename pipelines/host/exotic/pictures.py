"""Tokens of images: their codes, those around an image, and the positions that GLM-Image computes in advance."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from mmspec.pipelines.host.forward import now
from mmspec.pipelines.host.hooks import stock
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.readable import head_shape

_one_at_a_time = threading.Lock()


def emu3(model: GenerativeModel) -> Tensor:
    """The codes of the image tokens, in the rows of their token ids."""
    return _by_token(_codes(model), model.vocabulary_mapping.img2bpe, head_shape(model)[0])


def chameleon(model: GenerativeModel) -> Tensor:
    """The codes of the image tokens, in the rows of their token ids."""
    return _by_token(_codes(model), model.model.vocabulary_mapping.img2bpe, model.config.vocab_size)


def glm_image(model: GenerativeModel) -> Tensor:
    """The codes of the head's first tokens; the tokens for an image's beginning and end come after them."""
    codes = torch.nn.functional.normalize(_codes(model), dim=-1)
    return _by_token(codes, {i: i for i in range(len(codes))}, head_shape(model)[0])


def chameleon_marks(model: GenerativeModel) -> Mapping[str, int]:
    """The ids of special tokens, by name."""
    return model.config.vocabulary_map


def chameleon_tokens(model: GenerativeModel) -> tuple[int, list[int]]:
    """The number of rows of an image, equal to that of its columns, and the ids of image tokens."""
    vq = model.config.vq_config
    return vq.resolution // 2 ** (len(vq.channel_multiplier) - 1), model.model.vocabulary_mapping.image_tokens


def _codes(model: GenerativeModel) -> Tensor:
    return model.model.vqmodel.quantize.embedding.weight


def _by_token(codes: Tensor, place: dict[int, int], vocab: int) -> Tensor:
    """[vocab, c + 1]: each code in the row of its token; the rows of all other tokens are orthogonal to every code.

    Args:
        codes: [K, c].
        place: code → token id; tokens beyond the vocabulary are skipped, since some heads leave them out.
        vocab: the number of tokens of the head.
    """
    K, c = codes.shape
    index = torch.tensor([(code, token) for code, token in place.items() if code < K and token < vocab], device="cpu")
    rows = torch.zeros(vocab, c + 1, dtype=torch.float32, device=codes.device)
    rows[:, c] = 1.0
    code, token = index.to(codes.device).unbind(1)
    rows[token] = torch.cat([codes.detach()[code].float(), torch.zeros(len(code), 1, device=codes.device)], 1)
    return rows


class Listing:
    """Mixin for GLM-Image's inner model, whose prefill stores the positions of all image tokens on it: each call reads
    its own, in any thread."""

    def get_rope_index(self, *args: object, **kwargs: object) -> object:
        with _one_at_a_time:
            index = stock(self).get_rope_index(self, *args, **kwargs)
            if (read := now().read) is not None:
                read.listed = self._cached_decode_position_ids  # type: ignore[attr-defined]
        return index
