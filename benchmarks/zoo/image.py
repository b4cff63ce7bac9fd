"""Builds and trains the embedded image generator: its VQ tokenizer, then the LlamaGen transformer with its T5."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from benchmarks.zoo import lessons, sheets
from benchmarks.zoo.card import Results
from benchmarks.zoo.faithful import PictureReader
from benchmarks.zoo.fit import Say, fit
from benchmarks.zoo.recipes.pictures import ImageRecipe
from benchmarks.zoo.recipes.pictures import Tokenizer as VqRecipe
from mmspec.models.llamagen import PREFIX, LlamaGenTransformer, visible
from mmspec.models.llamagen_vq import LlamaGenVQ
from mmspec.pipelines.llamagen.pipeline import LlamaGenPipeline
from mmspec.zoo import pictures

# Which stage a random state belongs to.
_VQ, _GENERATOR, _READING, _SETTLE, _MEANING = range(1, 6)
SPECIAL = ("<pad>", "</s>", "<unk>")


def pixels(drawn: list[pictures.Picture]) -> Tensor:
    """[B, 3, SIDE, SIDE] in [−1, 1]."""
    return sheets.pixels([pictures.render(picture) for picture in drawn])


def build_vq(recipe: VqRecipe, seed: int) -> LlamaGenVQ:
    torch.manual_seed(seed)
    return LlamaGenVQ(
        base=recipe.base, multipliers=recipe.multipliers, latent=recipe.latent, codes=recipe.codes,
        code_dim=recipe.code_dim, blocks=recipe.blocks, groups=recipe.groups,
    )  # fmt: skip


def train_vq(recipe: ImageRecipe, work: Path, say: Say) -> LlamaGenVQ:
    """Train the tokenizer, or go on from its checkpoint in `work`."""
    plan, vq = recipe.tokenizer, build_vq(recipe.tokenizer, recipe.seed)

    def some(step: int, count: int, part: int) -> Tensor:
        rng = np.random.default_rng((recipe.seed, _VQ, step, part))
        return pixels([pictures.draw(rng) for _ in range(count)])

    def loss_at(step: int) -> tuple[Tensor, int]:
        if plan.warm <= step < plan.reseed and (step - plan.warm) % plan.reseed_every == 0:
            rng = np.random.default_rng((recipe.seed, _VQ, step, 2))
            _reseed(vq, some(step, plan.reseed_pictures, 1), rng, fresh=step == plan.warm)
        seen = some(step, plan.plan.batch, 0)
        if step < plan.warm:
            return _distance(vq.render(vq.latents(seen)), seen), len(seen)
        made, z, codes = vq(seen)
        kept = F.mse_loss(codes, z.detach()) + plan.commitment * F.mse_loss(z, codes.detach())
        return _distance(made, seen) + kept, len(seen)

    fit(vq, plan.plan, loss_at, work / "vq.pt", say)
    return vq.eval()


def _distance(made: Tensor, seen: Tensor) -> Tensor:
    """Squared error above all: absolute error would let the grain of backgrounds, which nothing foretells, lead."""
    return F.mse_loss(made, seen) + 0.2 * F.l1_loss(made, seen)


@torch.no_grad()
def _reseed(vq: LlamaGenVQ, seen: Tensor, rng: np.random.Generator, fresh: bool) -> None:
    """Put codes that none of these pictures uses onto random latents of theirs."""
    z = vq.latents(seen).flatten(0, 2)
    used = torch.bincount(vq.nearest(z), minlength=vq.config.codes) > 0
    idle = torch.arange(vq.config.codes) if fresh else (~used).nonzero()[:, 0]
    chosen = torch.from_numpy(rng.choice(len(z), size=len(idle), replace=len(idle) > len(z)))
    vq.quantize.embedding.weight[idle] = z[chosen]


@torch.no_grad()
def score_vq(vq: LlamaGenVQ, count: int = 64) -> dict[str, float]:
    """PSNR in dB on held-out pictures, and how many codes they use, with the entropy of their use in bits."""
    seen = pixels([picture for picture, _ in pictures.held_out(count)])
    ids = vq.encode(seen)
    made = vq.decode(ids).clamp(-1, 1)
    share = torch.bincount(ids.flatten(), minlength=vq.config.codes).double()
    share = share[share > 0] / share.sum()
    return {
        "psnr": sheets.psnr(made, seen),
        "codes": len(share),
        "bits": float(-(share * share.log2()).sum()),
    }


def build_tokenizer(prefix: int) -> PreTrainedTokenizerFast:
    """One token per word of the prompts, and T5's end token."""
    words = [*SPECIAL, *pictures.vocabulary()]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=core, **names, model_max_length=prefix, padding_side="right")


def build_pipeline(recipe: ImageRecipe, vq: LlamaGenVQ) -> LlamaGenPipeline:
    """The pipeline around a trained tokenizer, everything else still random."""
    torch.manual_seed(recipe.seed)
    shape, tokenizer = recipe.generator, build_tokenizer(recipe.generator.prefix)
    text_encoder = T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer), d_model=shape.text_width, d_kv=shape.text_width // shape.text_heads,
            d_ff=shape.text_feed_forward, num_layers=shape.text_layers, num_heads=shape.text_heads, dropout_rate=0.0,
            feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    transformer = LlamaGenTransformer(
        dim=shape.dim, num_layers=shape.layers, heads=shape.heads, vocab=recipe.tokenizer.codes,
        grid=pictures.SIDE // vq.downsample, prefix=shape.prefix, caption_width=shape.text_width,
        multiple_of=shape.multiple_of,
    )  # fmt: skip
    for name, weight in transformer.named_parameters():
        if weight.ndim == 2:
            last = name.endswith(("wo.weight", "w2.weight"))
            nn.init.normal_(weight, std=0.02 / (2 * shape.layers) ** 0.5 if last else 0.02)
    for name, weight in text_encoder.named_parameters():
        if "relative_attention_bias" in name:
            nn.init.normal_(weight, std=3.0)  # heads that look to one side: small steps take long to get there
    defaults = {"guidance_scale": shape.guidance, "top_k": 0, "clean_caption": False}
    return LlamaGenPipeline(transformer, vq, text_encoder, tokenizer, defaults)


def loss_of(
    pipe: LlamaGenPipeline, prompts: list[str], ids: Tensor, null: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Mean cross-entropy of the tokens ids [B, n] after their prompts; rows where `null` [B] see no prompt."""
    model = pipe.transformer
    features, valid = pipe.encode_prompt(prompts, clean_caption=False)
    condition = torch.where(null[:, None, None], model.null_condition(len(ids)), features)
    embeds = torch.cat([model.prefix_embeds(condition), model.tok_embeddings(ids[:, :-1])], 1)
    P, n = valid.shape[1], embeds.shape[1]
    place = torch.cat([torch.full((P,), PREFIX), torch.arange(n - P)]).expand(len(ids), n)
    seen = visible(F.pad(valid, (0, n - P), value=True), n)
    hidden = model(embeds, place, seen)[:, P - 1 :]
    each = F.cross_entropy(model.head(hidden).flatten(0, 1), ids.flatten(), reduction="none")
    return each.mean() if weights is None else (each * weights.flatten()).sum() / weights.sum()


def train_reading(recipe: ImageRecipe, pipe: LlamaGenPipeline, work: Path, say: Say) -> nn.Linear:
    """Train the text encoder so that the mean of the prefix says what a prompt means, or on from `work`'s checkpoint.

    The mean is all that a picture's tokens can learn of the prefix in one layer, because every prefix token weighs the
    same; which word belongs to which object must be sorted out before. Returns the classifier that tells the meaning.
    """
    plan = recipe.generator.reading
    torch.manual_seed(recipe.seed)
    probe = nn.Linear(pipe.transformer.config.dim, sum(lessons.KINDS))

    def loss_at(step: int) -> tuple[Tensor, int]:
        return _reading_loss(pipe, probe, np.random.default_rng((recipe.seed, _READING, step)), plan.batch), plan.batch

    parts = {"text_encoder": pipe.text_encoder, "embedding": pipe.transformer.cls_embedding, "probe": probe}
    fit(nn.ModuleDict(parts).train(), plan, loss_at, work / "reading.pt", say)
    return probe


def _reading_loss(pipe: LlamaGenPipeline, probe: nn.Linear, rng: np.random.Generator, batch: int) -> Tensor:
    """Mean cross entropy of what the prompts of `batch` pictures mean, told from the mean of their prefixes."""
    drawn = [pictures.draw(rng) for _ in range(batch)]
    prompts = [pictures.caption(picture, rng) for picture in drawn]
    meant = torch.tensor([lessons.meaning(*both) for both in zip(drawn, prompts, strict=True)])
    features, valid = pipe.encode_prompt(prompts, clean_caption=False)
    prefix = F.rms_norm(pipe.transformer.prefix_embeds(features), (probe.in_features,)) * valid[..., None]
    told = probe(prefix.sum(1) / valid.sum(1, keepdim=True)).split(lessons.KINDS, 1)
    return torch.stack([F.cross_entropy(*pair) for pair in zip(told, meant.T, strict=True)]).mean()


def train_generator(recipe: ImageRecipe, pipe: LlamaGenPipeline, meaning: nn.Linear, work: Path, say: Say) -> None:
    """Train transformer and text encoder together on pictures drawn as it goes, or on from `work`'s checkpoints.

    `meaning`: the classifier of `train_reading`, whose lesson goes on.
    """
    shape, model = recipe.generator, pipe.transformer
    vq, grid = pipe.vqvae.eval().requires_grad_(False), model.config.grid
    torch.manual_seed(recipe.seed)
    probes = nn.ModuleList(lessons.Probe(model.config.dim, shape.emphasis) for _ in shape.tell_after)
    parts = {"transformer": model, "text_encoder": pipe.text_encoder, "probes": probes, "meaning": meaning}
    taught = nn.ModuleDict(parts).train()

    def loss_at(step: int, stream: int, emphasis: float, batch: int) -> tuple[Tensor, int]:
        rng = np.random.default_rng((recipe.seed, stream, step))
        drawn = [pictures.draw(rng) for _ in range(batch)]
        prompts = [pictures.caption(picture, rng) for picture in drawn]
        with torch.no_grad():
            ids = vq.encode(pixels(drawn)).flatten(1)
        null = torch.from_numpy(rng.random(batch) < shape.drop)
        touched = np.stack([lessons.covered(picture, grid) for picture in drawn])
        weights = torch.from_numpy(np.where(touched, emphasis, 1.0)).float()
        with _overheard([model.layers[index] for index in shape.tell_after]) as heard:
            loss = loss_of(pipe, prompts, ids, null, weights)
        truth = torch.from_numpy(np.concatenate([lessons.shown(picture, grid) for picture in drawn]))
        for probe, hidden in zip(probes, heard, strict=True):
            before = hidden[:, shape.prefix - 1 :].flatten(0, 1)  # each has seen what comes before its square
            loss = loss + shape.tell * probe(before, truth)
        rng = np.random.default_rng((recipe.seed, _MEANING, stream, step))
        return loss + _reading_loss(pipe, meaning, rng, shape.reading.batch), len(truth)

    main = partial(loss_at, stream=_GENERATOR, emphasis=shape.emphasis, batch=shape.plan.batch)
    settling = partial(loss_at, stream=_SETTLE, emphasis=1.0, batch=shape.settle.batch)
    fit(taught, shape.plan, main, work / "generator.pt", say)
    fit(taught, shape.settle, settling, work / "settle.pt", say)
    taught.eval()


@contextmanager
def _overheard(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """What these layers give, in the order in which they are run."""
    heard: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _, __, out: heard.append(out)) for layer in layers]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def score_generator(pipe: LlamaGenPipeline, count: int = 32) -> dict[str, float]:
    """Nats per token on held-out pictures under their full prompts, and under the next one's."""
    drawn, prompts = zip(*pictures.held_out(count), strict=True)
    ids = pipe.vqvae.encode(pixels(list(drawn))).flatten(1)
    shown = {"nats": [*prompts], "other": [*prompts[1:], prompts[0]]}
    return {name: float(loss_of(pipe, of, ids, torch.zeros(count, dtype=torch.bool))) for name, of in shown.items()}


def sheet(pipe: LlamaGenPipeline, count: int = 16) -> Image.Image:
    """Held-out prompts: above each picture of the generator the drawn scene, as its tokenizer gives it back."""
    drawn, prompts = zip(*pictures.held_out(count), strict=True)
    made = sheets.drawn(pipe, prompts)
    with torch.no_grad():
        back = pipe.vqvae.decode(pipe.vqvae.encode(pixels(list(drawn)))).clamp(-1, 1)
    known = [Image.fromarray(x) for x in ((back + 1) * 127.5).byte().permute(0, 2, 3, 1).numpy()]
    return sheets.paired(known, made)


def faithfulness(pipe: LlamaGenPipeline, count: int = 96) -> dict[str, Results]:
    """What the embedded VLM reads in pictures of held-out prompts, under their own prompt and under the next one's."""
    drawn, prompts = zip(*pictures.held_out(count), strict=True)
    made, reader = sheets.drawn(pipe, prompts), PictureReader()
    return {"own": reader.score(made, drawn), "other": reader.score(made, [*drawn[1:], drawn[0]])}


def export(pipe: LlamaGenPipeline, folder: Path) -> None:
    """A folder for `LlamaGenPipeline.from_pretrained`. The pipeline itself is cast, too.

    Safetensors in bfloat16. diffusers loads them in float32, transformers as the config says.
    """
    for part in (pipe.transformer, pipe.vqvae, pipe.text_encoder):
        part.to(torch.bfloat16)
    pipe.save_pretrained(folder)
    pipe.text_encoder.config.dtype = torch.float32
    pipe.text_encoder.config.save_pretrained(folder / "text_encoder")
    sheets.readable(folder)
