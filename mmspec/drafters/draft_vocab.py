"""A reduced draft vocabulary for drafters with the target's head; its rows of the head are copied once."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

from mmspec.functional import Linear, linear
from mmspec.modes import lasting, own_class
from mmspec.protocols import TargetInfo

_State = list[tuple[int, int, torch.dtype, torch.device]]  # of a head's tensors: address, version, dtype, device
_CACHE: WeakValueDictionary[tuple[tuple[int, ...], torch.device], DraftVocab] = WeakValueDictionary()


class DraftVocab:
    """The tokens that a drafter with the target's head may propose (FR-Spec, Zhao et al. 2025, arXiv 2502.14856, §3).

    The target verifies with its whole head, so a missing token only lowers the acceptance rate; the output distribution
    does not change.

    Attributes:
        ids: int64 [V_d], the target's ids, ascending.
    """

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids
        self._cut: WeakKeyDictionary[nn.Module, tuple[_State, list[Tensor]]] = WeakKeyDictionary()

    @classmethod
    def of(cls, wanted: int | Sequence[int], target: TargetInfo) -> DraftVocab:
        """The first `wanted` tokens and those that end an answer, or the tokens of the given ascending ids.

        The same arguments return the same object, so that all drafters of a model share one copy of the rows.

        Raises:
            ValueError: a token that the target does not have, or a target whose tokens are not text.
        """
        if target.ends is None:
            raise ValueError(f"draft_vocab is for text, and {target.name} draws pictures; leave it out")
        most = wanted if isinstance(wanted, int) else wanted[-1] + 1
        if most > target.vocab:
            what = f"{wanted} tokens" if isinstance(wanted, int) else f"the id {wanted[-1]}"
            raise ValueError(f"draft_vocab asks for {what}; {target.name} has {target.vocab}, from 0 on")
        ends = [i for i in target.ends if i < target.vocab]
        ids = tuple(sorted({*range(wanted), *ends})) if isinstance(wanted, int) else tuple(wanted)
        key = (ids, target.device)
        vocab = _CACHE.get(key)
        if vocab is None:
            with lasting():
                vocab = _CACHE[key] = cls(torch.tensor(ids, device=target.device))
        return vocab

    def become(self, ids: Tensor) -> None:
        """Hold other tokens, as many. All is changed in place, the rows of a head when it is next used."""
        with torch.no_grad():
            self.ids.copy_(ids)
        for head, (_, rows) in list(self._cut.items()):
            self._cut[head] = ([], rows)

    @property
    def tensors(self) -> list[Tensor]:
        """The ids and all rows that were copied so far."""
        return [self.ids, *(t for _, cut in self._cut.values() for t in cut)]

    def logits(self, head: nn.Module, hidden: Tensor) -> Tensor:
        """Logits [..., V_d] of features [..., H] by a head of V rows; a head that is no plain Linear computes all V."""
        if not plain(head):
            logits = head(hidden)
            return logits[..., self.ids.to(logits.device)]
        return linear(hidden, *self._rows(head))

    def _rows(self, head: nn.Module) -> list[Tensor]:
        """The copied rows of the head's weight and bias; updated in place if the head was changed since."""
        own = [t for t in (head.weight, head.bias) if isinstance(t, Tensor)]
        state = [(t.data_ptr(), 0 if t.is_inference() else t._version, t.dtype, t.device) for t in own]
        before, rows = self._cut.get(head, ([], []))
        if before != state:
            with lasting():
                fresh = [t[self.ids.to(t.device)] for t in own]
                if [(t.shape, t.dtype, t.device) for t in fresh] == [(t.shape, t.dtype, t.device) for t in rows]:
                    fresh = [old.copy_(new) for old, new in zip(rows, fresh, strict=True)]  # captures use them
            rows = fresh
            self._cut[head] = (state, rows)
        return rows


def plain(head: nn.Module) -> bool:
    """Whether the head is a plain Linear: not quantized, without hooks or adapters."""
    own, hooks = vars(head), (head._forward_hooks, head._forward_pre_hooks)
    linear_one = own_class(type(head)) in (nn.Linear, Linear) and type(head.weight) is nn.Parameter
    return linear_one and "forward" not in own and not any(hooks)
