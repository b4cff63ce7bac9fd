"""Drafters for comparison: trained ones with a part switched off, first layers of a model, a block drafter of stock."""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import nn

from benchmarks.suites.subject import sharing
from mmspec.app.bench import drafters, vlm
from mmspec.app.bench.command import say
from mmspec.app.compare import Method
from mmspec.checkpoints.save import save_drafter
from mmspec.config import Options
from mmspec.drafters.dflash import BlockDrafter
from mmspec.drafters.eagle import EagleDrafter
from mmspec.drafters.specvlm import BRANCHES
from mmspec.pipelines.drafters.draft_model import ModelDrafter
from mmspec.pipelines.host.decoder import decoder
from mmspec.pipelines.host.kinds import GenerativeModel
from mmspec.pipelines.host.loading import stock_class


@dataclass(frozen=True)
class Variant:
    """A change to a trained drafter at inference: other values of its config, or options of `enable`."""

    name: str
    config: Options = field(default_factory=dict)
    options: Options = field(default_factory=dict)


# By a drafter's method. FLASH's chain drafts token by token with its first head, as EAGLE does.
ABLATIONS: dict[str, tuple[Variant, ...]] = {
    "eagle": tuple(Variant(f"pruned {share:.0%}", options={"prune": share}) for share in (0.5, 0.9)),
    "vispec": (
        Variant("no summaries", {"summaries": False}),
        Variant("no global vector", {"global_vector": False}),
        Variant("nothing of the adaptor", {"summaries": False, "global_vector": False}),
        Variant("media as published", {"media": "merge"}),
    ),
    "flash": (
        Variant("chain", {"tokens": 1}),
        Variant("all rows", {"latents": 0}),
        *(Variant(f"{ratio:g} rows a latent", {"ratio": ratio}) for ratio in (4.5, 16.0)),
        Variant("64 rows a latent", {"ratio": 64.0, "least": 1}),
    ),
    "specvlm": (
        *(Variant(f"always {branch}", {"gate": branch}) for branch in BRANCHES),
        *(
            Variant(f"always {branch}, 1 in {ratio}", {"gate": branch, f"{branch}_ratio": ratio})
            for branch, ratio in (("prune", 4), ("pool", 4), ("pool", 64))
        ),
    ),
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ablate", action="store_true", help="also each drafter with one of its parts switched off "
        "while it drafts, without training again")  # fmt: skip


def methods(model: GenerativeModel, args: argparse.Namespace) -> list[Method]:
    """The methods of the vlm suite, with variants if requested."""
    return vlm.methods(model, args, variants if args.ablate else lambda whole: ())


def variants(whole: Method) -> Iterator[Method]:
    """A drafter's method with each of its changes; changes that its config does not allow are left out."""
    for variant in ABLATIONS.get(whole.drafter.method, ()):
        try:
            drafter = altered(whole.drafter, variant.config)
        except ValueError as error:
            say(f"without {whole.name}, {variant.name}: {error}")
            continue
        yield replace(
            whole, name=f"{whole.name}, {variant.name}", drafter=drafter, options={**whole.options, **variant.options},
            facts={"variant_of": whole.name,
                   "setting": " ".join(f"{k}={v}" for k, v in {**variant.config, **variant.options}.items())},
        )  # fmt: skip


def altered(drafter: EagleDrafter, changes: Options) -> EagleDrafter:
    """The same weights under a changed config; weights that it does not use are left out.

    Raises:
        ValueError: the config does not allow the values, or they need weights that the drafter does not have.
    """
    if not changes:
        return drafter
    made = type(drafter)(replace(drafter.config, **changes))
    missing = made.load_state_dict(drafter.state_dict(), strict=False).missing_keys
    if missing:
        raise ValueError(f"it was trained without {', '.join(missing)}")
    return made.eval()


EARLY = 6  # a draft model has 1/6 of its target's layers


def first_layers(model: GenerativeModel) -> ModelDrafter:
    """A draft model of the model's first layers and its head; it shares the model's weights."""
    small = sharing(model)
    own = decoder(small)
    count = max(1, len(own.layers) // EARLY)
    own.layers = nn.ModuleList(own.layers[:count])
    own.config.num_hidden_layers = count
    if getattr(own.config, "layer_types", None):
        own.config.layer_types = own.config.layer_types[:count]
    drafter = ModelDrafter.of(small)
    same = {"num_assistant_tokens": drafter.options.depth, "num_assistant_tokens_schedule": "constant"}
    small.generation_config.update(**same)
    return drafter


def dflash(drafter: BlockDrafter) -> dict[str, object]:
    """The same weights in transformers' class, which reads embeddings without a norm.

    Raises ValueError: the class does not support this network.
    """
    same = copy.copy(drafter)
    same.config = replace(drafter.config, bare_embeds=True)
    with tempfile.TemporaryDirectory() as folder:
        save_drafter(same, folder, "muse-glimmer")
        theirs = stock_class("MuseGlimmerAssistantModel").from_pretrained(folder)
    own = next(drafter.parameters())
    return {"assistant_model": theirs.to(own.device, own.dtype).eval(), "speculation_type": "dflash"}


drafters.OF_MODEL |= {"model": first_layers}
drafters.ASSISTED |= {"model": lambda drafter: {"assistant_model": drafter.model}, "block": dflash}
