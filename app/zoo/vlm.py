"""Builds and trains a vision-language model of the zoo from stock classes: tokenizer, tower, decoder, export."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from mmspec.app.zoo import fit as zoo_fit
from mmspec.app.zoo import pack, sheets, tower
from mmspec.zoo import language, lexicon, scenes
from mmspec.zoo.recipes import Mix, VlmRecipe, ZooStage

# streams of random numbers: [recipe.seed, stream, step]
TOWER, TEXTS = 1, 2
CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ '<assistant>' }}{% else %}{{ '<user>' }}{% endif %}"
    "{% if message.content is string %}{{ message.content | trim }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text | trim }}{% endif %}{% endfor %}"
    "{% endif %}"
    "{% if message.role == 'assistant' %}{{ '<eos>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def build_tokenizer(recipe: VlmRecipe) -> PreTrainedTokenizerFast:
    """Byte-level BPE learnt from generated texts of all kinds; the special tokens take the first ids."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        _sample_texts(recipe),
        trainers.BpeTrainer(
            vocab_size=recipe.language.vocabulary,
            special_tokens=list(pack.SPECIAL),
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    names = dict(zip(("pad_token", "bos_token", "eos_token"), pack.SPECIAL, strict=False))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        **names,
        extra_special_tokens=list(pack.SPECIAL[3:]),
        model_max_length=recipe.language.positions,
        padding_side="left",
    )


def _sample_texts(recipe: VlmRecipe) -> list[str]:
    rng = np.random.default_rng([recipe.seed, TEXTS])
    texts = []
    for _ in range(recipe.tokenizer_scenes):
        here = scenes.draw(rng)
        told = [language.short(rng, here, recipe.texts), language.long(rng, here, recipe.texts)]
        told.append(language.pair_question(rng, (here, scenes.draw(rng)), recipe.texts))
        told += [language.any_question(rng, here, recipe.texts) for _ in range(4)]
        texts += [text for exchange in told for text in (exchange.prompt, exchange.answer)]
    return texts


def build_processor(recipe: VlmRecipe, tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """The stock processor; pictures of any size and shape are squeezed to SIDE x SIDE."""
    side = {"height": scenes.SIDE, "width": scenes.SIDE}
    images = CLIPImageProcessorPil(
        size=side, crop_size=side, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=recipe.vision.patch,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        image_token="<image>",
        chat_template=CHAT_TEMPLATE,
    )


def vision_config(recipe: VlmRecipe) -> CLIPVisionConfig:
    shape = recipe.vision
    return CLIPVisionConfig(
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward,
        image_size=scenes.SIDE,
        num_attention_heads=shape.heads,
        num_hidden_layers=shape.layers,
        patch_size=shape.patch,
    )


def build_model(recipe: VlmRecipe) -> LlavaForConditionalGeneration:
    """The untrained model in float32, initialised from the recipe's seed."""
    torch.manual_seed(recipe.seed)
    shape = recipe.language
    text = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.positions,
        bos_token_id=pack.BOS,
        eos_token_id=pack.EOS,
        pad_token_id=pack.PAD,
        tie_word_embeddings=False,
    )
    config = LlavaConfig(  # type: ignore[call-arg]  # a plain PreTrainedConfig takes these, too
        vision_config=vision_config(recipe),
        text_config=text,
        image_token_id=pack.IMAGE,
        vision_feature_layer=-1,
        image_seq_length=(scenes.SIDE // recipe.vision.patch) ** 2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
        pad_token_id=pack.PAD,
        eos_token_id=pack.EOS,
        bos_token_id=pack.BOS,
    )
    model = LlavaForConditionalGeneration(config)
    model.generation_config.update(
        bos_token_id=pack.BOS, eos_token_id=pack.EOS, pad_token_id=pack.PAD, max_new_tokens=320
    )
    return model


def train_tower(
    recipe: VlmRecipe, folder: Path, say: Callable[[str], None], stop: int | None = None
) -> CLIPVisionModel:
    """First stage; ends with the share of right cells by field in the log."""
    torch.manual_seed(recipe.seed)
    reader = tower.CellReader(CLIPVisionModel(vision_config(recipe)), recipe)
    right: list[float] = []

    def loss_of(step: int) -> tuple[torch.Tensor, int]:
        shown = tower.draw_scenes([recipe.seed, TOWER, step], recipe.tower.batch)
        loss, right[:] = reader.loss(shown)
        return loss, recipe.tower.batch * len(reader.cells)

    def watch(step: int) -> None:
        if step % 50 == 0:
            shares = zip((*tower.FIELDS, "background"), right, strict=True)
            say("cells right: " + " ".join(f"{field} {share:.3f}" for field, share in shares))

    zoo_fit.fit(reader, recipe.tower, loss_of, folder / "tower.pt", say, watch, stop)
    return reader.tower


def visual_tokens(model: LlavaForConditionalGeneration, pixel_values: torch.Tensor) -> torch.Tensor:
    """Projected visual tokens, [images, tokens, width]; the tower itself is frozen."""
    with torch.no_grad():
        seen = model.model.vision_tower(pixel_values).last_hidden_state[:, 1:]
    return model.model.multi_modal_projector(seen)


def packed_hidden(
    model: LlavaForConditionalGeneration,
    batch: pack.Packed,
    pixel_values: torch.Tensor,
) -> torch.Tensor:
    """Last hidden states [B, S, width] of packed rows, by the stock decoder."""
    inner = model.model.language_model
    embedded = inner.embed_tokens(batch.ids)
    visual = visual_tokens(model, pixel_values).to(embedded.dtype)
    shown = (batch.ids == pack.IMAGE)[..., None].expand_as(embedded)
    embedded = embedded.masked_scatter(shown, visual)
    mask = batch.mask(torch.bfloat16 if torch.is_autocast_enabled("cpu") else embedded.dtype)
    out = inner(inputs_embeds=embedded, attention_mask=mask, position_ids=batch.positions, use_cache=False)
    return out.last_hidden_state


def packed_loss(
    model: LlavaForConditionalGeneration,
    batch: pack.Packed,
    pixel_values: torch.Tensor,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean cross entropy of everything the assistant says, weighted by token id if `weights` [V] are given."""
    with zoo_fit.autocast():
        hidden = packed_hidden(model, batch, pixel_values)
        said = batch.labels != pack.IGNORED
        logits = model.lm_head(hidden[said])
    return F.cross_entropy(logits.float(), batch.labels[said], weight=weights)


def emphasis(tokenizer: PreTrainedTokenizerFast, mix: Mix) -> torch.Tensor:
    """Weight in the loss of every token id: `mix.emphasis` for numbers, relations, yes, no, stressed words; else 1."""
    words = [*lexicon.NUMBERS, "left", "right", "above", "below", "yes", "no", "is", "are"]
    weights = torch.ones(len(tokenizer))
    for word in words:
        for spelled in (word, word.capitalize(), " " + word):
            ids = tokenizer.encode(spelled, add_special_tokens=False)
            if len(ids) == 1:
                weights[ids[0]] = mix.emphasis
    for word in mix.stressed:
        weights[tokenizer.encode(" " + word, add_special_tokens=False)[0]] = mix.emphasis
    return weights


def train_decoder(
    recipe: VlmRecipe,
    model: LlavaForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    say: Callable[[str], None],
    watch: Callable[[int], None] = lambda step: None,
    stop: int | None = None,
    compiled: bool = True,
) -> None:
    """The stages after the tower's: projector, decoder and head on packed texts; the tower stays as it is.

    Compiled layer by layer and with the plain attention the step is faster on a CPU; both are undone
    afterwards. `stop` breaks off the first of the stages after that many steps.
    """
    model.model.vision_tower.requires_grad_(False)
    decoder = model.model.language_model
    decoder.set_attn_implementation("eager")
    for layer in decoder.layers if compiled else ():
        layer.compile(dynamic=False)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def look(step: int) -> None:
        with torch.compiler.set_stance("force_eager"):  # generation has other shapes at every step
            watch(step)

    for stage in recipe.stages:
        weights = emphasis(tokenizer, stage.mix)

        def loss_of(step: int, stage: ZooStage = stage, weights: torch.Tensor = weights) -> tuple[torch.Tensor, int]:
            turn, seed = stage.turns[step % len(stage.turns)], [recipe.seed, stage.stream, step]
            shown, batch = pack.draw_batch(recipe, stage.mix, turn, stage.plan.batch, encode, seed)
            return packed_loss(model, batch, tower.pixels(shown), weights), batch.ids.numel()

        zoo_fit.fit(model, stage.plan, loss_of, folder / f"{stage.name}.pt", say, look, stop or stage.plan.stop)
        if stop is not None:
            break
    for layer in decoder.layers:
        layer._compiled_call_impl = None
    decoder.set_attn_implementation("sdpa")


def export(model: LlavaForConditionalGeneration, processor: LlavaProcessor, folder: Path) -> None:
    """Weights in bfloat16 safetensors, processor, chat template and generation config."""
    state = {name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()}
    twin = LlavaForConditionalGeneration(model.config)
    twin.generation_config = model.generation_config
    twin.load_state_dict(state)
    twin.bfloat16().save_pretrained(folder)
    processor.save_pretrained(folder)
    sheets.readable(folder)
