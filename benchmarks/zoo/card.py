"""Writes the model cards of the embedded models: templates of `cards/`, filled from recipes and held-out results."""

from pathlib import Path
from typing import Any

from benchmarks.zoo import classes, clips
from benchmarks.zoo import fit as zoo_fit
from benchmarks.zoo.recipes.drafters import DrafterRecipe
from benchmarks.zoo.recipes.pictures import ImageRecipe, MarRecipe
from benchmarks.zoo.recipes.vlm import Hybrid, VlmRecipe
from mmspec import zoo
from mmspec.train.heads import PARTS
from mmspec.train.recipes import RECIPES as HOW
from mmspec.zoo import pictures

CARDS = Path(__file__).with_name("cards")
Score = tuple[int, int]  # right, of
Results = dict[str, Any]  # what was scored, by name; their JSON is what a card is filled with


def filled(template: str, **facts: object) -> str:
    """A template with its {fields} filled in; they may ask for attributes and entries of the facts."""
    return (CARDS / f"{template}.md").read_text().format(**facts)


def vlm_card(recipe: VlmRecipe, results: Results, minutes: float) -> str:
    """The text of README.md in the folder of a model that sees."""
    told = {f"{style} caption": results[style]["facts"] for style in ("short", "long")}
    told |= {"question": results["questions"]}
    told |= {"all": {"questions": _sum(results["questions"]), "two pictures": _sum(results["pairs"])}}
    told |= {f"clip of {seen['frames']} frames": seen["facts"] for seen in results["clips"]}
    facts = [
        (f"{fact}, all" if of == "all" else f"{of}: {fact}", score)
        for of, scores in told.items()
        for fact, score in scores.items()
    ]
    rows = "\n".join(f"| {fact} | {right} | {of} | {right / of:.1%} |" for fact, (right, of) in facts if of)
    moving, n, hybrid = bool(results["clips"]), results["short"]["scenes"], isinstance(recipe.language, Hybrid)
    return filled(
        "vlm", recipe=recipe, results=results, minutes=minutes, rows=rows, prompts=zoo.PROMPTS,
        tag="qwen3_5" if hybrid else "llava",
        model="Qwen3_5ForConditionalGeneration" if hybrid else "LlavaForConditionalGeneration",
        parameters=results["parameters"] / 1e6,
        more=", and says what happens in\nshort clips (two to eight frames, all in one message)" * moving,
        clip=f', and for the frames of a clip "{clips.PROMPTS[0]}"' * moving,
        made=_made(recipe) if recipe.start or not hybrid else _made_hybrid(recipe, results["head tau"]),
        cores="two CPU cores" if recipe.start is None and not hybrid else "one CPU core",
        explained=(
            " In clips, motion is what the caption says that each object does (an object not found\ncounts as wrong), "
            "moving only those that do not stay, all whole captions."
        ) * moving,
        limit="clips of two, four and eight frames were trained, in which nothing crosses the way of something else"
        if moving else "at most two pictures in a prompt were trained",
        n=f"{n} scenes, and as many clips," if moving else f"{n} scenes",
    )  # fmt: skip


def _made(recipe: VlmRecipe) -> str:
    stages, turns = {stage.name: stage for stage in recipe.stages}, recipe.stages[0].turns
    if recipe.start is not None:
        known = sum(turn.kind != "clip" for turn in turns) / len(turns)
        return filled("made-on", recipe=recipe, known=known, **stages)
    return filled(
        "made", recipe=recipe, steps=sum(stage.plan.stop or stage.plan.steps for stage in recipe.stages),
        pair_every=len(turns), slots=max(turn.slots for turn in turns), **stages,
    )  # fmt: skip


def _made_hybrid(recipe: VlmRecipe, tau: float) -> str:
    stage = recipe.stages[0]
    return filled(
        "made-hybrid", recipe=recipe, side=recipe.vision.patch // 2, decoder=stage, told=_made_head(recipe, tau),
        pair_every=len(stage.turns), slots=max(turn.slots for turn in stage.turns),
    )  # fmt: skip


def _made_head(recipe: VlmRecipe, tau: float) -> str:
    if recipe.head is None:
        return ""
    head = HOW[recipe.head]
    prompts = int(recipe.head_data.partition(":")[2]) - head.held_out
    return filled("made-head", head=head, tau=tau, prompts=prompts, ceiling=head.unroll + 1)


def image_card(recipe: ImageRecipe, results: Results, minutes: float) -> str:
    """The text of README.md in the folder of an image generator."""
    own, other = (results["read"][whose]["facts"] for whose in ("own", "other"))
    return filled(
        "llamagen", recipe=recipe, results=results, minutes=minutes, vq=recipe.tokenizer, shape=recipe.generator,
        millions=_millions(results), grainy=pictures.GRAINY, other=results["other"] - results["nats"],
        layers=" and ".join(str(1 + layer) for layer in recipe.generator.tell_after),
        read="\n".join(f"| {fact} | {_share(own[fact])} | {_share(other[fact])} |" for fact in own),
    )  # fmt: skip


def mar_card(recipe: MarRecipe, results: Results) -> str:
    """The text of README.md in the folder of a continuous image model."""
    vae, names = recipe.vae, classes.NAMES
    factor = 2 ** (len(vae.channels) - 1)
    return filled(
        "mar", recipe=recipe, results=results, millions=_millions(results), factor=factor, names=names,
        grid=classes.SIDE // factor, last=names[-1], classes=len(names), backgrounds=len(classes.PLAIN),
        vae_steps=sum(plan.steps for plan in (vae.plan, vae.objects, vae.colours, vae.finish)),
        more=results["other"] - results["loss"], read=_told(results["read"]), misread=_told(results["misread"]),
    )  # fmt: skip


def mar_draft_card(recipe: MarRecipe, results: Results, target: float) -> str:
    """The text of README.md in the folder of what drafts for it; `target` is the loss of its target."""
    return filled("mar-draft", recipe=recipe, results=results, millions=_millions(results), target=target)


_SEES = {  # by method, what an embedded drafter is
    "eagle": "The EAGLE-2-style drafter of `{target}`, embedded in mmspec: one decoder layer on the target's final\n"
    "features, drafting with the target's own head.",
    "msd": "The MSD drafter of `{target}`, embedded in mmspec: EAGLE's one decoder layer, into which pictures enter\n"
    "as nothing but their embeddings.",
    "vispec": "The ViSpec drafter of `{target}`, embedded in mmspec: EAGLE's one decoder layer, into which each\n"
    "picture enters as one learned summary, while one more vector of the last picture joins all text after it.",
    "flash": "The FLASH drafter of `{target}`, embedded in mmspec: one decoder layer that reads each picture as a few\n"
    "latents and foretells {tokens} tokens in one pass.",
    "specvlm": "The SpecVLM drafter of `{target}`, embedded in mmspec: EAGLE's one decoder layer behind an elastic\n"
    "compressor of pictures (prune, pool, convolution, resampler, text only) that a gate chooses by the question.",
    "block": "The block drafter of `{target}`, embedded in mmspec: DFlash's layers foretell a block in one pass\n"
    "from the features of several of the target's layers, and DSpark's Markov head makes its tokens agree.",
}
_LEARNT = {"flash": "heads", "block": "rows of a block"}  # at each position, by method; others unroll
_ABOUT = {  # by the source of its prompts, what they are
    "scenes": "about drawn scenes, half short and\n  half long; the answers are the target's own ({sampled:.0%} "
    "sampled at temperature 1, the rest greedy)",
    "zoo": "about drawn scenes, a third\n  single pictures, a sixth pairs, half clips of four to eight frames; the "
    "answers are the target's own\n  ({sampled:.0%} sampled at temperature 1, the rest greedy)",
    "pictures": "of the scene generator; the\n  pictures are the target's own, drawn at its own guidance scale, and "
    "its two streams are learnt with the\n  guided distribution that is verified",
}


def drafter_card(recipe: DrafterRecipe, report: Results) -> str:
    """The text of README.md in a drafter's folder, from the report of its training."""
    how = report["recipe"]
    source, _, samples = recipe.data.partition(":")
    if recipe.method == "heads":
        return filled("heads", recipe=recipe, report=report, how=how, train=int(samples) - how["held_out"], parts=PARTS)
    return filled(
        "drafter", recipe=recipe, report=report, how=how, train=int(samples) - how["held_out"],
        what=_SEES[recipe.method].format(target=recipe.target, tokens=recipe.shape.get("tokens")),
        about=_ABOUT[source].format(**how), kind="drawn" if how["overlap"] else "greedy", ceiling=how["unroll"] + 1,
        unrolled=_LEARNT.get(recipe.method, "unrolled steps (training-time test)"),
    )  # fmt: skip


def wall_minutes(work: Path) -> float:
    """Minutes that all stages took, from their checkpoints."""
    return sum(map(zoo_fit.seconds, work.glob("*.pt"))) / 60


def _millions(results: Results) -> dict[str, float]:
    return {name: count / 1e6 for name, count in results["parameters"].items()}


def _share(score: Score) -> str:
    return "{} of {}".format(*score)


def _told(facts: dict[str, Score]) -> str:
    return ", ".join(f"{fact} {_share(score)}" for fact, score in facts.items() if fact in ("colour", "shape"))


def _sum(scores: dict[str, Score]) -> Score:
    return sum(right for right, _ in scores.values()), sum(of for _, of in scores.values())
