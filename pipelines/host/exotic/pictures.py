"""Models that draw pictures token by token: the codes that their tokens stand for, and what surrounds a picture."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.readable import head_shape


def emu3(model: GenerativeModel) -> Tensor:
    """The codes of the visual tokens, on their places in the vocabulary."""
    return _by_token(_codes(model), model.vocabulary_mapping.img2bpe, head_shape(model)[0])


def chameleon(model: GenerativeModel) -> Tensor:
    """The codes of the picture tokens, on their places in the vocabulary."""
    return _by_token(_codes(model), model.model.vocabulary_mapping.img2bpe, model.config.vocab_size)


def glm_image(model: GenerativeModel) -> Tensor:
    """The codes of the head's first tokens; behind them stand the marks of a picture's beginning and end."""
    codes = torch.nn.functional.normalize(_codes(model), dim=-1)
    return _by_token(codes, {i: i for i in range(len(codes))}, head_shape(model)[0])


def chameleon_marks(model: GenerativeModel) -> Mapping[str, int]:
    """The ids of special tokens, by name."""
    return model.config.vocabulary_map


def chameleon_tokens(model: GenerativeModel) -> tuple[int, list[int]]:
    """Rows of a picture, as many as columns, and the ids that its codes have."""
    vq = model.config.vq_config
    return vq.resolution // 2 ** (len(vq.channel_multiplier) - 1), model.model.vocabulary_mapping.image_tokens


def _codes(model: GenerativeModel) -> Tensor:
    return model.model.vqmodel.quantize.embedding.weight


def _by_token(codes: Tensor, place: dict[int, int], vocab: int) -> Tensor:
    """[vocab, c + 1]: each code in the row of its token; all other tokens stand at right angles to every code.

    Args:
        codes: [K, c].
        place: code → token id; tokens beyond the vocabulary (a head that leaves them out) are left out.
        vocab: tokens of the head.
    """
    K, c = codes.shape
    index = torch.tensor([(code, token) for code, token in place.items() if code < K and token < vocab])
    rows = torch.zeros(vocab, c + 1, dtype=torch.float32, device=codes.device)
    rows[:, c] = 1.0
    code, token = index.to(codes.device).unbind(1)
    rows[token] = torch.cat([codes.detach()[code].float(), torch.zeros(len(code), 1, device=codes.device)], 1)
    return rows
