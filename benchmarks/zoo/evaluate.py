"""Scores an embedded VLM on held-out scenes, questions, picture pairs and clips, and writes its card."""

import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from benchmarks.zoo import card, clips, language, score
from benchmarks.zoo.card import Results, Score
from benchmarks.zoo.recipes.vlm import VlmRecipe
from benchmarks.zoo.vlm import ZooVlm
from mmspec import zoo
from mmspec.pipelines.host.kinds import Processor
from mmspec.zoo import scenes
from mmspec.zoo.scenes import Scene

HELD_OUT = 4  # stream of random numbers; training uses 1 to 3
SAMPLES = 12
FRAMES = (4, 8)  # of the clips that are scored
CLIP_SAMPLES, CLIP_FRAMES, CLIP_RATE, CLIP_SCALE = 4, 24, 8, 3  # of the clips that come along


def held_out(recipe: VlmRecipe, count: int, stream: int = 0) -> list[Scene]:
    """Scenes that no training step has drawn, the same ones every time."""
    return [scenes.draw(np.random.default_rng([recipe.seed, HELD_OUT, stream, i])) for i in range(count)]


def load(folder: Path) -> tuple[Processor, ZooVlm]:
    """The processor and, in float32, the model of a folder."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return AutoProcessor.from_pretrained(folder), model


@torch.no_grad()
def answer(
    model: ZooVlm, processor: Processor, asked: list[tuple[list[Scene], str]], batch: int = 30
) -> tuple[list[str], float]:
    """Greedy answers to (pictures, prompt) pairs, and the mean number of generated tokens."""
    texts, tokens = [], 0
    for start in range(0, len(asked), batch):
        chats = []
        for shown, prompt in asked[start : start + batch]:
            pictures = [{"type": "image", "image": scenes.render(scene)} for scene in shown]
            chats.append([{"role": "user", "content": [*pictures, {"type": "text", "text": prompt}]}])
        inputs: Any = processor.apply_chat_template(
            chats,  # type: ignore[arg-type]  # a picture is no text
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        )
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
        out = model.generate(**inputs, do_sample=False, max_new_tokens=320)[:, inputs["input_ids"].shape[1] :]
        tokens += int((out != model.generation_config.pad_token_id).sum())
        texts += processor.batch_decode(out, skip_special_tokens=True)
    return texts, tokens / max(1, len(asked))


def _facts(tallies: Iterable[score.Tally]) -> dict[str, Score]:
    """How many facts are right, and how many there were."""
    tally = sum(tallies, Counter[tuple[str, str]]())
    return {fact: (tally[fact, "right"], tally[fact, "of"]) for fact, part in sorted(tally) if part == "of"}


def score_style(model: ZooVlm, processor: Processor, shown: list[Scene], style: str) -> Results:
    """Right facts in the captions of one style, and examples."""
    texts, tokens = answer(model, processor, [([scene], zoo.PROMPTS[style]) for scene in shown])
    facts = _facts(map(score.score_caption, texts, shown))
    words = len({word for text in texts for word in text.lower().split()})
    return {"scenes": len(shown), "tokens": tokens, "facts": facts, "examples": texts[:3], "different words": words}


def score_questions(
    model: ZooVlm, processor: Processor, recipe: VlmRecipe, shown: list[Scene], pairs: bool
) -> dict[str, Score]:
    """Exactly right answers by kind of question."""
    rng = np.random.default_rng([recipe.seed, HELD_OUT, 9, int(pairs)])
    asked, wanted = [], []
    mix = replace(recipe.texts, shape_counts=recipe.stages[-1].mix.shape_counts)
    for first, second in zip(shown[::2], shown[1::2], strict=False):
        for _ in range(2):
            here = [first, second] if pairs else [first if rng.random() < 0.5 else second]
            pair = (first, second)
            wanted.append(language.pair_question(rng, pair, mix) if pairs else language.any_question(rng, here[0], mix))
            asked.append((here, wanted[-1].prompt))
    given, _ = answer(model, processor, asked)
    tally = score.Tally()
    for exchange, text in zip(wanted, given, strict=True):
        tally.note(exchange.kind, text.strip() == exchange.answer)
    return _facts([tally])


def score_clips(model: ZooVlm, processor: Processor, count: int, frames: int) -> Results:
    """Right facts in the captions of held-out clips of so many frames, and examples."""
    held = clips.held_out(count)
    asked = [([clips.at(clip, time) for time in clips.moments(frames)], clips.PROMPTS[0]) for clip in held]
    texts, tokens = answer(model, processor, asked)
    examples = list(zip(texts[:3], map(clips.caption, held[:3]), strict=True))
    facts = _facts(map(score.score_clip, texts, held))
    return {"clips": count, "frames": frames, "tokens": tokens, "facts": facts, "examples": examples}


def sees_clips(recipe: VlmRecipe) -> bool:
    return any(turn.kind == "clip" for stage in recipe.stages for turn in stage.turns)


def evaluate(recipe: VlmRecipe, folder: Path, work: Path, count: int) -> Results:
    """Score the exported model in float32 on `count` held-out scenes; write results.json, README.md and the samples."""
    processor, model = load(folder)
    shown, begun = held_out(recipe, count), time.monotonic()
    results: Results = {
        **{style: score_style(model, processor, shown, style) for style in ("short", "long")},
        "questions": score_questions(model, processor, recipe, shown, False),
        "pairs": score_questions(model, processor, recipe, shown, True),
        "clips": [score_clips(model, processor, count, frames) for frames in FRAMES if sees_clips(recipe)],
        "parameters": sum(weight.numel() for weight in model.parameters()),
    }
    report = work / "head" / "report.json"  # of what drafts for it
    results["head tau"] = json.loads(report.read_text())["held_out_tau"] if report.is_file() else 0.0
    results["seconds"] = time.monotonic() - begun
    work.mkdir(parents=True, exist_ok=True)
    (work / "results.json").write_text(json.dumps(results, indent=1))
    (folder / "README.md").write_text(card.vlm_card(recipe, results, card.wall_minutes(work)))
    if recipe.embedded and sees_clips(recipe):  # the one whose samples come along
        save_samples(recipe)
        save_clips()
    return results


def save_samples(recipe: VlmRecipe) -> None:
    """The first held-out scenes of a stream of their own, as small PNGs."""
    zoo.samples().mkdir(exist_ok=True)
    for number, scene in enumerate(held_out(recipe, SAMPLES, stream=2), 1):
        scenes.render(scene).save(zoo.samples() / f"scene-{number:02d}.png", optimize=True)


def save_clips() -> None:
    """Held-out clips in which something happens, as MP4; enlarged, so that their codec does not blur small patterns."""
    import av

    zoo.samples().mkdir(exist_ok=True)
    lively = (clip for clip in clips.held_out(100, seed=2**31 + 1) if any(m.kind != "still" for m in clip.motions))
    for number, clip in enumerate(islice(lively, CLIP_SAMPLES), 1):
        with av.open(str(zoo.samples() / f"clip-{number}.mp4"), "w", options={"movflags": "faststart"}) as file:
            stream = file.add_stream("libx264", rate=CLIP_RATE, options={"crf": "20", "preset": "veryslow"})
            stream.width = stream.height = scenes.SIDE * CLIP_SCALE
            stream.pix_fmt = "yuv420p"
            for picture in clips.frames(clip, CLIP_FRAMES):
                large = picture.resize((stream.width, stream.height), Image.Resampling.NEAREST)
                file.mux(stream.encode(av.VideoFrame.from_image(large)))
            file.mux(stream.encode())
