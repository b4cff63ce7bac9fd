"""A transformers model as it stands: the mixin that makes its `generate` fast, and what has to be known of it."""

from __future__ import annotations

from torch import Tensor

from mmspec.compile.version import unchanging
from mmspec.pipelines.drafters import own_files
from mmspec.pipelines.host import devices, quantized, renamed
from mmspec.pipelines.host.call import Call, calling, current
from mmspec.pipelines.host.decoder import decoder, embedding
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
from mmspec.pipelines.patching import assisted
from mmspec.pipelines.patching.family import Family
from mmspec.pipelines.patching.generate import generate, obstacle, or_stock, watched
from mmspec.pipelines.patching.handle import Patch
from mmspec.pipelines.patching.obstacles import BEAMS, Obstacle
from mmspec.pipelines.target.vlm import VlmTarget
from mmspec.protocols import TargetInfo
from mmspec.rules import Rule, only


def _keeps(model: GenerativeModel) -> bool:
    patch = Patch.of(model)
    return patch is not None and patch.prefixes is not None


def _run(model: GenerativeModel, call: Call) -> tuple[object, ...]:
    patch, now = Patch.of(model), current.get()
    if patch is None:  # disabled since this call began
        return ()
    if now is not None and now.patch in patch.by_request.values():
        patch = now.patch
    with or_stock(patch, call), unchanging():
        why = obstacle(model, call, patch)
        if why is None:
            with patch.running(model):
                output, stats = generate(model, patch, call)
            patch.book(stats)
            return (output,)
        patch.family.decline(patch, why)
    return ()


def _leave(model: GenerativeModel, beams: bool) -> None:
    if (patch := Patch.of(model)) is not None:
        why = "this kind of assisted decoding (early exit, other tokens) drafts by itself"
        patch.family.decline(patch, Obstacle(BEAMS if beams else why))


class DecoderOnlyPatch(loops(_run, _leave, _keeps)):  # type: ignore[misc]
    """Mixin of an enabled model.

    Another thread may swap the class at any time. So methods take the stock ones from `stock(self)`, a call asks once
    for its Patch, and what belongs to the kind of model rather than to the model is asked of `patch.family`.
    """

    _mmspec_patch: Patch

    @like_generate
    def generate(self, *args: object, **kwargs: object) -> object:
        args, kwargs = by_name(stock(self).generate, args, translated(kwargs))
        custom = kwargs.get("custom_generate")
        if callable(custom) and not str(getattr(custom, "__module__", "")).startswith("mmspec."):
            kwargs["custom_generate"] = watched(custom, type(self)._mmspec_patch)
        patch, drafts = Patch.of(self), assisted.requested(self, kwargs)
        if patch is not None and drafts is not None:
            patch, kwargs = assisted.patch_for(self, patch, drafts[0]), drafts[1]
        given = {**dict(zip(("inputs",), args, strict=False)), **kwargs}
        with calling(given=given, patch=patch, reached=False) as call:
            answer = super().generate(*args, **kwargs)  # type: ignore[misc]
        if patch is not None and custom is None and not call.reached:
            patch.say(f"mmspec had no part in this call: generate did not come to the loop it replaces. {advice()}")
        return answer

    def init_continuous_batching(self, *args: object, **kwargs: object) -> object:
        """What stock's `generate_batch` begins with, and `generate` where it hands over to that."""
        reached()
        self._say("mmspec does not accelerate generate_batch, whose cache is its own; ContinuousBatcher does")
        return stock(self).init_continuous_batching(self, *args, **kwargs)

    def save_pretrained(self, *args: object, **kwargs: object) -> object:
        from mmspec.pipelines.drafters.mtp import MtpDrafter

        patch = Patch.of(self)
        if patch is not None and isinstance(patch.drafter, MtpDrafter):
            self._say(
                "save_pretrained leaves out the multi-token-prediction heads, which transformers does not load; a "
                f"model that is loaded from the new folder has none. Keep those of {own_files.folder(self)}"
            )
        return stock(self).save_pretrained(self, *args, **kwargs)

    def _say(self, what: str) -> None:
        if (patch := Patch.of(self)) is not None:
            patch.say(what)


class DecoderOnly(Family[GenerativeModel]):
    """Decoder-only models of transformers, with or without pictures."""

    mixin = DecoderOnlyPatch

    def taps(self, model: GenerativeModel, features: tuple[int, ...]) -> Taps:
        return taps(model, features)

    def embeddings(self, model: GenerativeModel) -> Tensor | None:
        table = embedding(model).weight
        return table if len(table) == self.describe(model).vocab else None

    def rule(self, named: Rule, call: Call) -> Rule:
        """Where a call's processors know which tokens are a picture's, a relaxed rule is for these."""
        tokens = None if named.lossless else followed.picture_tokens(call.logits_processor)
        return named if tokens is None else only(named, tokens)

    def target(self, model: GenerativeModel, features: tuple[int, ...], guidance: Guidance | None) -> VlmTarget:
        patch = Patch.of(model)
        return VlmTarget(model, features, guidance, None if patch is None else patch.prefixes)

    def unsupported(self, model: GenerativeModel) -> str | None:
        return unsupported(model) or quantized.shared_scale(model)

    def note(self, model: GenerativeModel) -> str | None:
        host = HostModel.of(model)
        instead, name = host.instead, host.attention
        if instead is None:
            return None
        flash = "" if name == renamed.FLEX else ", and chains of one row"
        return (
            f"{name!r} takes no tree mask: prompts{flash} are read by it, other drafts by {instead!r}. The model keeps "
            f"{name!r} for all else, and after mmspec.disable"
        )

    def describe(self, model: GenerativeModel) -> TargetInfo:
        table, (vocab, hidden) = embedding(model), head_shape(model)
        ends = model.generation_config.eos_token_id
        return TargetInfo(
            name=origin(model)[0] or type(model).__name__, vocab=vocab, hidden=hidden, embedding=table.weight.shape[-1],
            layers=len(decoder(model).layers), device=devices.execution(table), dtype=model.dtype,
            ends=() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,),
        )  # fmt: skip
