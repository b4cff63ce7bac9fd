"""The default family, for decoder-only models of transformers, with the mixin that accelerates `generate`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from mmspec.compile.version import unchanging
from mmspec.pipelines.drafters import own_files
from mmspec.pipelines.host import assisted, devices, tree_attention
from mmspec.pipelines.host.call import Call, calling, current
from mmspec.pipelines.host.decoder import decoder, dtype_of, embedding, shared_scale
from mmspec.pipelines.host.hooks import Taps, stock
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.loops import like_generate, loops, reached
from mmspec.pipelines.host.model import HostModel
from mmspec.pipelines.host.names import by_name, origin, translated
from mmspec.pipelines.host.processors import followed
from mmspec.pipelines.host.processors.guidance import Guidance
from mmspec.pipelines.host.readable import head_shape, unsupported
from mmspec.pipelines.host.release import advice
from mmspec.pipelines.host.tapping import taps
from mmspec.pipelines.patching.family import Family
from mmspec.pipelines.patching.generate import generate, obstacle, or_stock, watched
from mmspec.pipelines.patching.handle import Patch
from mmspec.pipelines.patching.obstacles import BEAMS, Obstacle
from mmspec.pipelines.target import captured_tower
from mmspec.pipelines.target.vlm import VlmTarget
from mmspec.protocols import TargetInfo
from mmspec.rules import Rule, only


@lru_cache(maxsize=8)
def _only(rule: Rule, tokens: bytes) -> Rule:
    """`only`, the same object for all calls, so that their rows may share a batch."""
    return only(rule, torch.frombuffer(bytearray(tokens), dtype=torch.bool))


def _keeps(model: GenerativeModel) -> bool:
    patch = Patch.of(model)
    return patch is not None and patch.prefixes is not None


def _run(model: GenerativeModel, call: Call) -> tuple[object, ...]:
    patch, now = Patch.of(model), current.get()
    if patch is None:  # it was disabled after this call began
        return ()
    if now is not None and now.patch is not None and now.patch.stats is patch.stats:  # the drafter that the call names
        patch = now.patch
    with or_stock(patch, call):
        why = obstacle(model, call, patch)
        if why is None:
            with patch.running(model):
                output, stats = generate(model, patch, call)
            patch.add_stats(stats)
            return (output,)
        patch.family.decline(patch, why)
    return ()


def _leave(model: GenerativeModel, beams: bool) -> None:
    if (patch := Patch.of(model)) is not None:
        why = "only stock has this kind of assisted decoding (early exit, another tokenizer)"
        patch.family.decline(patch, Obstacle(BEAMS if beams else why))


def _encoding(model: GenerativeModel) -> AbstractContextManager[object]:
    patch = Patch.of(model)
    return nullcontext() if patch is None or not patch.config.compile else captured_tower.encoding(model)


class DecoderOnlyPatch(loops(_run, _leave, _keeps, _encoding)):  # type: ignore[misc]
    """Mixin for an enabled model.

    Another thread may swap the class at any time. So stock methods are called through `stock(self)`, a call reads its
    Patch once, and what depends on the kind of model is in `patch.family`.
    """

    _mmspec_patch: Patch

    @like_generate
    def generate(self, *args: object, **kwargs: object) -> object:
        args, kwargs = by_name(stock(self).generate, args, translated(kwargs))
        enabled = patch = Patch.of(self)
        if patch is None:  # it was disabled after this call began
            return stock(self).generate(self, *args, **kwargs)
        custom = kwargs.get("custom_generate")
        if callable(custom) and not str(getattr(custom, "__module__", "")).startswith("mmspec."):
            kwargs["custom_generate"] = watched(custom, self, patch)
        if (drafts := assisted.requested(self, kwargs)) is not None:
            patch, kwargs = patch.for_request(self, drafts[0]), drafts[1]
        given = {**dict(zip(("inputs",), args, strict=False)), **kwargs}
        with unchanging(), calling(given=given, patch=patch, reached=False) as call:
            answer = stock(self).generate(self, *args, **kwargs)
        if custom is None and not call.reached and Patch.of(self) is enabled:
            patch.warn_once(f"mmspec took no part in this call: generate never ran the loop it replaces. {advice()}")
        return answer

    def init_continuous_batching(self, *args: object, **kwargs: object) -> object:
        """Called first by stock's `generate_batch`, also if `generate` delegates to that."""
        reached()
        self._warn("mmspec does not accelerate generate_batch, which has its own cache; use ContinuousBatcher")
        return stock(self).init_continuous_batching(self, *args, **kwargs)

    def save_pretrained(self, *args: object, **kwargs: object) -> object:
        from mmspec.pipelines.drafters.mtp import MtpDrafter

        patch = Patch.of(self)
        if patch is not None and isinstance(patch.drafter, MtpDrafter):
            self._warn(
                "save_pretrained leaves out the multi-token-prediction heads, which transformers does not load; a "
                f"model that is loaded from the new folder has none. Keep those in {own_files.folder(self)}"
            )
        return stock(self).save_pretrained(self, *args, **kwargs)

    def _warn(self, message: str) -> None:
        if (patch := Patch.of(self)) is not None:
            patch.warn_once(message)


class DecoderOnly(Family[GenerativeModel]):
    """Decoder-only models of transformers, with or without images."""

    mixin = DecoderOnlyPatch

    def taps(self, model: GenerativeModel, features: tuple[int, ...]) -> Taps:
        return taps(model, features)

    def embeddings(self, model: GenerativeModel) -> Tensor | None:
        table = embedding(model).weight
        return table if len(table) == self.describe(model).vocab else None

    def rule(self, named: Rule, call: Call) -> Rule:
        """If a call's processors know which tokens are image tokens, a relaxed rule applies only to these."""
        tokens = None if named.lossless else followed.picture_tokens(call.logits_processor)
        return named if tokens is None else _only(named, tokens.numpy().tobytes())

    def target(self, model: GenerativeModel, features: tuple[int, ...], guidance: Guidance | None) -> VlmTarget:
        patch = Patch.of(model)
        return VlmTarget(model, features, guidance, None if patch is None else patch.prefixes)

    def unsupported(self, model: GenerativeModel) -> str | None:
        return unsupported(model) or shared_scale(model)

    def note(self, model: GenerativeModel) -> str | None:
        host = HostModel.of(model)
        reader, name = host.draft_attention, host.attention
        if reader is None or name in tree_attention.TREES:
            return None
        flash = "" if name == tree_attention.FLEX else ", and chains of one row"
        return (
            f"{name!r} takes no tree mask: it reads prompts{flash}, and {reader!r} reads other drafts. The model "
            f"keeps {name!r} for everything else, and after mmspec.disable"
        )

    def describe(self, model: GenerativeModel) -> TargetInfo:
        table, (vocab, hidden) = embedding(model), head_shape(model)
        ends = model.generation_config.eos_token_id
        return TargetInfo(
            name=origin(model)[0] or type(model).__name__, vocab=vocab, hidden=hidden, embedding=table.weight.shape[-1],
            layers=len(decoder(model).layers), device=devices.execution(table), dtype=dtype_of(model),
            ends=() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,),
        )  # fmt: skip
