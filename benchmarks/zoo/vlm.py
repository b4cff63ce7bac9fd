"""Builds and trains a vision-language model of the zoo from stock classes: tokenizer, tower, decoder, export."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast

from benchmarks.zoo import fit as zoo_fit
from benchmarks.zoo import language, lexicon, llava, pack, qwen, sheets, tower
from benchmarks.zoo.fit import Say
from benchmarks.zoo.recipes.vlm import Hybrid, Mix, VlmRecipe, ZooStage
from mmspec.pipelines.host.kinds import Processor
from mmspec.zoo import scenes

# streams of random numbers: [recipe.seed, stream, step]
TOWER, TEXTS = 1, 2
ZooVlm = llava.LlavaForConditionalGeneration | qwen.Qwen3_5ForConditionalGeneration


def kind(of: VlmRecipe | ZooVlm) -> ModuleType:
    """The module, of two with the same functions, that knows the classes of a recipe, or of a model."""
    shape = of.language if isinstance(of, VlmRecipe) else of
    return qwen if isinstance(shape, Hybrid | qwen.Qwen3_5ForConditionalGeneration) else llava


def build_tokenizer(recipe: VlmRecipe) -> PreTrainedTokenizerFast:
    """Byte-level BPE learnt from generated texts of all kinds; the special tokens take the first ids."""
    special = [*pack.SPECIAL, *kind(recipe).FRAME.special]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.language.vocabulary,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(_sample_texts(recipe), trainer)
    names = dict(zip(("pad_token", "bos_token", "eos_token"), pack.SPECIAL, strict=False))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        **names,
        extra_special_tokens=special[3:],
        padding_side="left",
        model_max_length=recipe.language.positions,
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


def build_processor(recipe: VlmRecipe, tokenizer: PreTrainedTokenizerFast) -> Processor:
    """The stock processor of the recipe's kind."""
    made: Processor = kind(recipe).build_processor(recipe, tokenizer)
    return made


def build_model(recipe: VlmRecipe) -> ZooVlm:
    """The untrained model in float32, initialised from the recipe's seed."""
    torch.manual_seed(recipe.seed)
    model: ZooVlm = kind(recipe).build_model(recipe)
    model.generation_config.update(
        bos_token_id=pack.BOS, eos_token_id=pack.EOS, pad_token_id=pack.PAD, max_new_tokens=320
    )
    return model


def train_tower(recipe: VlmRecipe, folder: Path, say: Say, stop: int | None = None) -> nn.Module:
    """First stage, or on from its checkpoint in `folder`."""
    torch.manual_seed(recipe.seed)
    untrained, width = kind(recipe).build_tower(recipe)
    reader = tower.CellReader(untrained, kind(recipe).see, width, recipe.vision.patch)

    def loss_of(step: int) -> tuple[torch.Tensor, int]:
        rng = np.random.default_rng([recipe.seed, TOWER, step])
        loss = reader.loss([scenes.draw(rng) for _ in range(recipe.tower.batch)])
        return loss, recipe.tower.batch * len(reader.cells)

    zoo_fit.fit(reader, recipe.tower, loss_of, folder / "tower.pt", say, stop)
    return reader.tower


def packed_loss(model: ZooVlm, batch: pack.Packed, pixel_values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of everything the assistant says, weighted by token id, `weights` [V]."""
    with zoo_fit.autocast():
        hidden = kind(model).packed_hidden(model, batch, pixel_values)
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


@contextmanager
def on_packed_rows(model: ZooVlm, compiled: bool) -> Iterator[None]:
    """Within, the decoder reads packed rows, and the tower does not learn.

    Compiled layer by layer and with the plain attention a step is faster on a CPU.
    """
    of_kind, decoder = kind(model), model.model.language_model
    of_kind.tower_of(model).requires_grad_(False)
    of_kind.branching(model, True)
    decoder.set_attn_implementation("eager")
    for layer in decoder.layers if compiled else ():
        layer.compile(dynamic=False)
    try:
        yield
    finally:
        of_kind.branching(model, False)
        for layer in decoder.layers:
            layer._compiled_call_impl = None
        decoder.set_attn_implementation("sdpa")


def train_decoder(
    recipe: VlmRecipe,
    model: ZooVlm,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    say: Say,
    stop: int | None = None,
    compiled: bool = True,
) -> None:
    """The stages after the tower's: projector, decoder and head on packed texts; the tower stays as it is.

    `stop` breaks off the first of the stages after that many steps.
    """
    of_kind = kind(model)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    for stage in recipe.stages:
        weights = emphasis(tokenizer, stage.mix)[: recipe.language.vocabulary]  # a stock processor adds tokens

        def loss_of(step: int, stage: ZooStage = stage, weights: torch.Tensor = weights) -> tuple[torch.Tensor, int]:
            turn, seed = stage.turns[step % len(stage.turns)], [recipe.seed, stage.stream, step]
            shown, batch = pack.draw_batch(recipe, stage.mix, turn, stage.plan.batch, encode, seed, of_kind.FRAME)
            return packed_loss(model, batch, tower.pixels(shown), weights), batch.ids.numel()

        with on_packed_rows(model, compiled):
            zoo_fit.fit(model, stage.plan, loss_of, folder / f"{stage.name}.pt", say, stop or stage.plan.stop)
        if stop is not None:
            break


def export(model: ZooVlm, processor: Processor, folder: Path) -> None:
    """Weights in bfloat16 safetensors, processor, chat template and generation config."""
    state = {name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()}
    made: Callable[..., ZooVlm] = type(model)
    twin = made(model.config)
    twin.generation_config = model.generation_config
    twin.load_state_dict(state)
    twin.bfloat16().save_pretrained(folder)
    processor.save_pretrained(folder)
    words = folder / "tokenizer.json"
    said = json.dumps(json.loads(words.read_text(encoding="utf-8")), ensure_ascii=False, separators=(",", ":"))
    words.write_text(said + "\n", encoding="utf-8")  # less than half of what it is with a token a line
    sheets.readable(folder)
