"""Trains a LLaVA from the decoder of SmolLM2-135M-Instruct and the vision tower of `scenes-video`.

    python -m benchmarks.real_vision --out runs/smollm2-vision      # the same command resumes
    mmspec train --target runs/smollm2-vision/model --data scenes:600 ... --out runs/smollm2-vision/eagle
    mmspec bench vlm --model runs/smollm2-vision/model --drafters runs/smollm2-vision/eagle/drafter

Training follows LLaVA (Liu et al. 2023, arXiv 2304.08485, §4.2), on drawn scenes: first the projector alone, then the
projector and the decoder; the tower is frozen. `report.json` has the cost and the accuracy.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

from benchmarks.real import loaded
from benchmarks.zoo import fit, language
from benchmarks.zoo.evaluate import load, score_style
from benchmarks.zoo.recipes.vlm import Mix
from mmspec import zoo
from mmspec.zoo import scenes

SEED, HELD_OUT = 5, 1  # of all draws, and their second number where nothing learns from them
PROJECTOR, STEPS, BATCH = 60, 200, 12  # steps of the projector alone, of all, and pictures in each
RATES = {"projector": 2e-3, "decoder": 4e-4}
MIX = Mix(0.12, 1.0, False)
IMAGE = "<repo_name>"  # a token of SmolLM2 that occurs in no text
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{% if part.type == 'image' %}" + IMAGE + "{% endif %}{% endfor %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build() -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """The tower and the decoder with an untrained projector between them, and a processor."""
    words, tokenizer = loaded()
    reads, seeing = load(zoo.path("scenes-video"))
    text = words.config
    del text.quantization_config
    config = LlavaConfig(  # type: ignore[call-arg]  # a plain PreTrainedConfig takes these, too
        vision_config=seeing.config.vision_config, text_config=text, image_seq_length=seeing.config.image_seq_length,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE), vision_feature_layer=-1, tie_word_embeddings=True,
        vision_feature_select_strategy="default", bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(SEED)
    model = LlavaForConditionalGeneration(config)
    model.model.vision_tower.load_state_dict(seeing.model.vision_tower.state_dict())
    model.model.language_model.load_state_dict(words.model.state_dict())
    model.tie_weights()
    model.generation_config.update(bos_token_id=1, eos_token_id=2, pad_token_id=2, max_new_tokens=320)
    processor = LlavaProcessor(
        reads.image_processor, tokenizer, patch_size=12, num_additional_image_tokens=1,
        vision_feature_select_strategy="default", image_token=IMAGE, chat_template=TEMPLATE,
    )  # fmt: skip
    tokenizer.padding_side = "left"
    return model, processor


def lesson(rng: np.random.Generator) -> tuple[scenes.Scene, language.Exchange]:
    """A scene and a question about it: in two of three cases for a caption, sometimes a long one."""
    scene, kind = scenes.draw(rng), rng.random()
    if kind < MIX.long_share:
        return scene, language.long(rng, scene, MIX)
    return scene, language.short(rng, scene, MIX) if kind < 0.7 else language.any_question(rng, scene, MIX)


def loss_of(model: LlavaForConditionalGeneration, processor: LlavaProcessor, rng: np.random.Generator) -> Tensor:
    """Mean cross-entropy of the answers to a batch of prompts."""
    shown = [lesson(rng) for _ in range(BATCH)]
    chats: Any = [
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": said.prompt}]}] for _, said in shown
    ]
    asked = [processor.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    whole = [before + said.answer + "<|im_end|>" for before, (_, said) in zip(asked, shown, strict=True)]
    inputs: Any = processor(
        images=[scenes.render(scene) for scene, _ in shown], text=whole, padding=True, padding_side="right",
        return_tensors="pt",
    )  # fmt: skip
    visual = model.config.image_seq_length
    begins = torch.tensor([len(processor.tokenizer(text)["input_ids"]) - 1 + visual for text in asked])
    places = torch.arange(inputs["input_ids"].shape[1])
    learnt = (places >= begins[:, None]) & inputs["attention_mask"].bool()
    with fit.autocast():
        hidden = model.model(**inputs).last_hidden_state
        logits = model.lm_head(hidden[:, :-1][learnt[:, 1:]])
    return F.cross_entropy(logits.float(), inputs["input_ids"][:, 1:][learnt[:, 1:]])


def rate(step: int) -> float:
    """Factor of the learning rates: warm-up, then linear decay to zero, in each stage."""
    first, after = (0, PROJECTOR) if step < PROJECTOR else (PROJECTOR, STEPS)
    done = (step + 1 - first) / (after - first)
    return min(1.0, done / 0.1) * (1.0 - done + 0.02)


def train(model: LlavaForConditionalGeneration, processor: LlavaProcessor, out: Path) -> float:
    """Run both stages, resuming from `out`; returns their times in seconds."""
    model.model.vision_tower.requires_grad_(False)
    projector = list(model.model.multi_modal_projector.parameters())
    decoder = list(model.model.language_model.parameters())
    groups = [{"params": projector, "name": "projector"}, {"params": decoder, "name": "decoder"}]
    tool = torch.optim.AdamW(groups, weight_decay=0.0, betas=(0.9, 0.95), fused=True)
    file = out / "training.pt"
    step, spent = fit.resume(file, model, [tool])
    began = saved = time.monotonic()
    model.train()
    while step < STEPS:
        for weight in decoder:
            weight.requires_grad_(step >= PROJECTOR)
        for group in tool.param_groups:
            group["lr"] = RATES[group["name"]] * rate(step)
        loss = loss_of(model, processor, np.random.default_rng([SEED, 0, step]))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([*projector, *decoder], 1.0)
        tool.step()
        tool.zero_grad(set_to_none=True)
        step += 1
        now = time.monotonic()
        if step % 10 == 0:
            print(f"step {step}/{STEPS}, loss {loss.item():.3f}, {(spent + now - began) / 60:.0f} min", flush=True)
        if now - saved > fit.CHECKPOINT_SECONDS or step == STEPS:
            fit.save(file, model, [tool], step, spent + now - began)
            saved = now
    return spent + time.monotonic() - began


def graded(folder: Path, count: int) -> dict[str, Any]:
    """The share of correct facts in short captions of unseen scenes, by kind of fact."""
    processor, model = load(folder)
    shown = [scenes.draw(np.random.default_rng([SEED, HELD_OUT, i])) for i in range(count)]
    found = score_style(model, processor, shown, "short")
    found["right"] = {fact: right / of for fact, (right, of) in found.pop("facts").items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model, processor = build()
    seconds = train(model, processor, args.out)
    model.eval().save_pretrained(args.out / "model")
    processor.save_pretrained(args.out / "model")
    facts = {"minutes": seconds / 60, "steps": STEPS, "batch": BATCH} | graded(args.out / "model", 24)
    (args.out / "report.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
