"""Janus and Janus-Pro: replaces the separate loop that stock has for `generate(generation_mode="image")`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.compile.version import unchanging
from mmspec.drafters.draft_vocab import DraftVocab
from mmspec.pipelines.families.decoder_only import DecoderOnly, DecoderOnlyPatch
from mmspec.pipelines.host.cache import RaggedCache
from mmspec.pipelines.host.call import Call, output
from mmspec.pipelines.host.exotic import janus
from mmspec.pipelines.host.exotic.janus import Prepared
from mmspec.pipelines.host.forward import Read, reading
from mmspec.pipelines.host.kinds import GenerativeModel, Mask, ModelOutput
from mmspec.pipelines.host.processors.table import LogitsProcessorList, Processors
from mmspec.pipelines.host.vision import media
from mmspec.pipelines.patching import drafting, obstacles
from mmspec.pipelines.patching.generate import rounds, row_seeds
from mmspec.pipelines.patching.handle import Patch
from mmspec.pipelines.patching.obstacles import Obstacle
from mmspec.pipelines.target.model import Request
from mmspec.pipelines.target.noise import TorchNoise
from mmspec.pipelines.target.state import Onward, State, selected
from mmspec.pipelines.target.vlm import VlmTarget
from mmspec.protocols import TargetInfo
from mmspec.rules import Rule, exact
from mmspec.session import Row, Session
from mmspec.tree import lone
from mmspec.types import Prompt, Scores, unfold


class JanusPatch(janus.UpToTheLoop, DecoderOnlyPatch):
    """Text is left to DecoderOnlyPatch; for images stock prepares the arguments, and a session runs the loop."""

    def generate(  # type: ignore[override]  # stock's own arguments
        self, inputs: Tensor | None = None, attention_mask: Tensor | None = None,
        logits_processor: LogitsProcessorList | None = None, **kwargs: object,
    ) -> object:  # fmt: skip
        args, patch = (inputs, attention_mask, logits_processor), Patch.of(self)
        if patch is None or kwargs.get("generation_mode", "text") != "image":
            if patch is not None and patch.target is not None and patch.target.ends is None:
                patch.decline(Obstacle("the drafter is for pictures, and this call generates text"))
                return janus.stock_generate(self, *args, **kwargs)
            return DecoderOnlyPatch.generate(self, *janus.own(*args), **kwargs)
        ready = janus.prepared(self, *args, **kwargs)
        if not isinstance(ready, Prepared):
            return ready
        with unchanging():
            why = _obstacle(self, patch, ready)
            if why is None:
                with patch.running(self):
                    return _draw(self, patch, ready)
        patch.decline(why)
        return janus.stock_generate(self, *args, **kwargs)


def _obstacle(model: GenerativeModel, patch: Patch, ready: Prepared) -> Obstacle | None:
    """Why these images have to be generated on the stock path, or None."""
    config = ready.config
    if ready.owns_cache:
        return Obstacle("only the stock loop fills a caller's own cache in image mode")
    if config.output_scores or config.output_logits or config.output_attentions or config.output_hidden_states:
        return Obstacle("only the stock loop returns scores, logits, attentions and hidden states of image mode")
    if not ready.guided:
        return Obstacle("image mode without guidance (guidance_scale ≤ 1) does not run in stock either")
    if ready.unsupported:
        why = f"the logits processor {ready.unsupported[0]} reads the prompt in image mode, or keeps state"
        return Obstacle(why, always_falls_back=True)
    return obstacles.now(model, config, len(ready.ids)) or _unfit(model, patch)


def _unfit(model: GenerativeModel, patch: Patch) -> Obstacle | None:
    """Why the drafter cannot draft images, or None."""
    try:
        patch.drafter.fit(_describe_pictures(model), patch.given)
    except ValueError as error:
        return Obstacle(f"in image mode, {error}")
    return None


class JanusTarget(VlmTarget):
    """Image mode: the embedding and head of image codes, and both streams in one batch, as in stock."""

    @property
    def tables(self) -> tuple[nn.Module, ...]:
        return (self.model,)  # several of its modules

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.prepare_embeddings_for_image_generation(ids).to(ids.device)

    def logits(self, hidden: Tensor, vocab: DraftVocab | None = None) -> Tensor:
        return janus.head(self.model, hidden)

    def prefill(  # type: ignore[override]  # stock's arguments for images
        self, session: Session, inputs: Prepared, nodes: int
    ) -> tuple[Prompt, Scores]:
        """Read both streams in one forward; the streams of a row are adjacent."""
        rows, L = inputs.ids.shape
        order = torch.arange(rows, device=inputs.ids.device).view(2, -1).T.flatten()
        embeds, arguments = inputs.embeds[order], {k: selected(v, order, rows) for k, v in inputs.arguments.items()}
        slots = RaggedCache(rows, inputs.ids.device, L + session.rows[0].limit + nodes)
        with reading() as read:
            out = janus.prefill(self.model, inputs.ids[order], embeds, arguments, slots)
        slots.advance(L)
        given = read.arguments.get("position_ids")  # without any, stock counts cache slots
        first = inputs.ids.new_full((rows, 1), L) if given is None else given[:, -1:] + 1
        valid, ids = arguments["attention_mask"].bool(), inputs.ids[: rows // 2]
        session.cache = State(slots, Onward(first), valid, {}, {}, 2)
        hidden = self._features(read)
        hidden = None if hidden is None else unfold(hidden, 2)
        prompt = Prompt(
            ids=torch.zeros_like(ids),  # text tokens have no id among the codes
            embeds=unfold(embeds, 2),
            hidden=hidden,
            visual=media(ids, self.model.config, {}),
            valid=valid[::2],
            grid=janus.grid(self.model),
        )
        end, root = None if hidden is None else hidden[:, -1:], lone(prompt.ids[:, -1:])
        return prompt, self.scores(self._logits(out, read)[:, -1:], session, root, end)

    def _forward(self, state: State, ids: Tensor, places: Tensor, mask: Mask) -> Tensor:
        return janus.step(self.model, self.embed(ids), places, mask, state.cache)

    def _logits(self, out: Any, read: Read) -> Tensor:
        return self.logits(out).to(self.device)


def _draw(model: GenerativeModel, patch: Patch, ready: Prepared) -> Tensor | ModelOutput:
    """Generate images; returns the same as stock's image mode."""
    config = ready.config
    patch.fitted_proposer(model)  # updates `patch.drafter` if the model was moved
    info = _describe_pictures(model)
    if info not in patch.fitted:
        fitted = patch.drafter.fit(info, patch.given)
        patch.fitted[info] = drafting.proposer(model, fitted, patch.config, info, drafts=False)
    drafter = patch.fitted[info]
    rule = patch.heeded(bool(config.do_sample))
    noise = TorchNoise() if config.do_sample and patch.config.reproducible else None
    guidance, warpers = ready.split
    # stock draws from distributions of the model's own precision, so its noise has that too
    request = Request(Processors(warpers), bool(config.do_sample), noise, widen=noise is None)
    target = JanusTarget(model, drafter.features, guidance)
    count, limit = len(ready.ids) // 2, janus.tokens(model)
    seeds = row_seeds(model, count, config.do_sample and noise is None)
    rows = [Row([], 0, limit, seed, index=b, rule=rule, request=request) for b, seed in enumerate(seeds)]
    with torch.no_grad():
        for session, _ in rounds(target, drafter, list(rows), ready):
            stats = session.stats
    if noise is not None:
        noise.close(limit)
    patch.add_stats(stats)
    sequences = torch.tensor([row.tokens for row in rows], dtype=ready.ids.dtype, device=ready.ids.device)
    return output(sequences) if config.return_dict_in_generate else sequences


def _describe_pictures(model: GenerativeModel) -> TargetInfo:
    """What a drafter has to fit in image mode: the head for codes."""
    return replace(DecoderOnly().describe(model), vocab=janus.codes(model), ends=None)


class Janus(DecoderOnly):
    """Text, and images in a separate mode."""

    mixin = JanusPatch

    def rule(self, named: Rule, call: Call) -> Rule:
        """A relaxed rule applies only to images, which do not come here; text stays exact."""
        return exact

    def pictures(self, model: GenerativeModel) -> TargetInfo:
        return _describe_pictures(model)

    def embeddings(self, model: GenerativeModel) -> None:
        """None, since image codes have a separate embedding and aligner."""

    def codebook(self, model: GenerativeModel) -> Tensor:
        return janus.codebook(model)
