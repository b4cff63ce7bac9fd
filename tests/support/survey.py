"""What becomes of every image-text-to-text class of transformers; `tests/support/survey.py` writes the table anew.

It goes to `pipelines/families/surveyed.py`, which `mmspec.supported()` prints, and to `docs/models.md`.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

import tiny_vlms
import torch
import transformers
import vlm_classes as zoo
from hostile_drafters import DRAFTERS, Oracle

import mmspec

ROOT = Path(__file__).parents[2]
FOUND = ROOT / "pipelines" / "families" / "surveyed.py"
PAGE = ROOT / "docs" / "models.md"
SAME, STOCK = "identical", "stock generate fails"
_INDEXER = "where its indexer's scores tie, proved on a CPU alone"
UNDER = {  # what an identical class is identical under
    "Dots3NoteForConditionalGeneration": _INDEXER,
    "Glm5NextForConditionalGeneration": f"{_INDEXER}; calls with padding in all rows are refused",
    "Llama4ForConditionalGeneration": "calls that may reach past `floor_scale` − 128 positions are refused",
    "MiniMaxM3SparseForConditionalGeneration": "calls with a block of padding or more in a row are refused",
    "MistralLarge4ForConditionalGeneration": _INDEXER,
}


def name_of(case: str) -> str:
    return zoo.class_of(case).__name__


def acceptance(case: str) -> str:
    """SAME, why the class is refused, or what went wrong: greedy, float32, batch 1 and ragged 3, n-grams and trees."""
    model = zoo.model(case)
    try:
        mmspec.enable(model, drafter="ngram").disable()
    except mmspec.UnsupportedError as refused:
        return str(refused).split(": ", 1)[1]
    if (failed := zoo.stock_error(case)) is not None:
        return failed
    prompts = [zoo.prompt(case, rows) for rows in zoo.ROWS]
    stock = [zoo.generate(model, inputs) for inputs in prompts]
    for drafter in ("ngram", "random tree", "right within"):
        for inputs, full in zip(prompts, stock, strict=True):
            made = DRAFTERS[drafter](model, Oracle.of(inputs["input_ids"], full))
            with mmspec.enable(model, drafter=made) as handle:
                if not torch.equal(zoo.generate(model, inputs), full):
                    return f"wrong with {drafter} and {len(full)} rows"
                if handle.stats.rounds == 0:
                    return f"the stock path ran with {drafter} and {len(full)} rows"
    return SAME


def families() -> list[str]:
    """The classes that `test_families.py` proves more closely."""
    return [type(tiny_vlms.model(name)).__name__ for name in tiny_vlms.FAMILIES]


def survey() -> dict[str, str]:
    found = dict.fromkeys(families(), SAME)
    for case in zoo.CASES:
        found[name_of(case)] = acceptance(case)
        print(f"{name_of(case)}: {found[name_of(case)]}", file=sys.stderr)
    return dict(sorted(found.items()))


def table(found: dict[str, str], version: str) -> str:
    same = [name for name, what in found.items() if what == SAME]
    lines = [
        '"""What `tests/support/survey.py` found of image-text-to-text classes; written by it, so do not edit."""',
        "",
        f'VERSION = "{version}"  # of transformers',
        "",
        "# classes that are token-identical to stock `generate`",
        '_SAME = """',
        *wrap(" ".join(same), 120),
        '"""',
        "",
        "# class -> why `enable` refuses it, or how stock fails",
        "_OTHERS = {",
    ]
    for name, what in found.items():
        line = f'    "{name}": "{what}",'
        lines += [] if what == SAME else [line if len(line) <= 120 else f'    "{name}": (\n        "{what}"\n    ),']
    every = "dict(sorted({**dict.fromkeys(_SAME.split()), **_OTHERS}.items()))"
    lines += ["}", "", "# class -> why `enable` refuses it, or None", f"FOUND: dict[str, str | None] = {every}", ""]
    return "\n".join(lines)


WRITERS = {  # pipelines of diffusers and their component
    "ErnieImagePipeline": "pe",
    "Flux2Pipeline": "text_encoder",
    "GlmImagePipeline": "vision_language_encoder",
    "Kandinsky6TI2VAPipeline": "text_encoder",
    "LTX2Pipeline": "text_encoder",
    "LTX2ConditionPipeline": "text_encoder",
    "LTX2DFRPipeline": "text_encoder",
    "LTX2ImageToVideoPipeline": "text_encoder",
    "LTX2InContextPipeline": "text_encoder",
    "LongCatImagePipeline": "text_encoder",
    "QwenImageLayeredPipeline": "text_encoder",
}


def reasons(found: dict[str, str]) -> str:
    return "\n".join(["| class | why |", "|---|---|", *(f"| `{name}` | {why} |" for name, why in found.items())])


def page(found: dict[str, str | None], version: str) -> str:
    same = [f"- `{name}`" + (f": {UNDER[name]}" if name in UNDER else "") for name, why in found.items() if why is None]
    failing = {name: why for name, why in found.items() if why and why.startswith(STOCK)}
    refused = {name: why for name, why in found.items() if why is not None and name not in failing}
    identical = "\n".join(fill(line, 120, subsequent_indent="  ") for line in same)
    writers = "\n".join(f"- `{name}`: `{part}`" for name, part in WRITERS.items())
    return f"""\
# Models

Every image-text-to-text class of transformers {version}, tried with tiny random models of these very
classes, greedy, float32, one row and three rows of unequal length, with pictures, drafts of n-grams and
random trees; twelve families also with sdpa and eager attention, one row and four, and every kind of
draft. Published weights were not tried here. The tests keep this page true; `mmspec doctor --supported`
prints the same, and names as untested what a newer transformers brings. A class that is not listed is
judged when it is enabled.

## Token-identical to stock `generate` ({len(same)})

{identical}

## Refused by `enable`, with this reason ({len(refused)})

{reasons(refused)}

## Failing in transformers {version} itself, without mmspec ({len(failing)})

{reasons(failing)}

## diffusers pipelines whose text model writes ({len(WRITERS)})

`enable(pipe)` finds the component that writes, as to lengthen a prompt, in any pipeline of diffusers whose own code
calls a `generate`; the picture's own steps are not tokens, and stay as they are. In 0.42.1 these are, with the
components that can write:

{writers}

Two of them, Flux2 and Ernie-Image, were run with tiny random models; GLM-Image is proved identical. Where several can
write, as an LTX2 with a `prompt_enhancer`, enable one of them: `enable(pipe.prompt_enhancer)`.
"""


def main(argv: list[str]) -> Any:
    warnings.simplefilter("ignore")
    found = survey()
    bad = {name: what for name, what in found.items() if what.startswith(("wrong", "the stock path"))}
    if bad:
        return f"not written: {bad}"
    FOUND.write_text(table(found, transformers.__version__))
    listed = {name: None if what == SAME else what for name, what in found.items()}
    PAGE.write_text(page(listed, transformers.__version__))
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv))
