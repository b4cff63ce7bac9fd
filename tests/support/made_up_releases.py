"""Made-up releases of transformers: a folder of links to the installed package, in which single files are edited.

As a program it tries one release after the other, each in a fork of a process that has loaded torch, and prints what
became of a call as JSON lines: `python made_up_releases.py FOLDER NAME [NAME …]`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

VERSION = "5.99.0"
_INIT, _UTILS, _CACHES = "__init__.py", "generation/utils.py", "cache_utils.py"
_QWEN, _MASKS = "models/qwen3_5/modeling_qwen3_5.py", "masking_utils.py"
HYBRID, VIDEO = "scenes-hybrid", "scenes-video"

# name → (files, what is renamed there, its new name)
RELEASES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "nothing": ((), "", ""),
    "the sampling loop": ((_UTILS,), r"\b_sample\b", "_decode"),
    "the prefill": ((_UTILS,), r"\b_prefill\b", "_read_prompt"),
    "the arguments' update": ((_UTILS,), r"\b_update_model_kwargs_for_generation\b", "_next_arguments"),
    "sizes of masks": ((_CACHES, _MASKS), r"\bget_mask_sizes\b", "mask_sizes"),
    "a layer of the cache": ((_CACHES,), r"\bDynamicLayer\b", "GrowingLayer"),
    "a list of inputs": ((_UTILS,), r"\bMULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL\b", "ONLY_FOR_PREFILL"),
    "the scan of a recurrence": ((_QWEN,), r"\btorch_chunk_gated_delta_rule\b", "chunked_delta"),
    "the logits to keep": ((_UTILS, _QWEN), r"\blogits_to_keep\b", "kept_logits"),
    "the pad token": ((_UTILS,), r"\b_pad_token_tensor\b", "_padding_token"),
    "the mark of a user's cache": ((_UTILS,), r"\b_is_user_defined\b", "_from_user"),
    "the preparation of pictures": (
        (_UTILS,), r"\b_maybe_prepare_encoder_kwargs_for_generation\b", "_prepare_encoders"
    ),
}  # fmt: skip


def made(folder: Path, name: str) -> Path:
    """A folder for `sys.path`, with the release of this name."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.submodule_search_locations
    source, files = Path(spec.submodule_search_locations[0]), RELEASES[name][0]
    edited = {_INIT: (r'__version__ = "[^"]+"', f'__version__ = "{VERSION}"')}
    edited |= dict.fromkeys(files, RELEASES[name][1:])
    link(source, folder / "transformers", edited)
    return folder


def link(source: Path, place: Path, edited: dict[str, tuple[str, str]]) -> None:
    """A folder of links, in which these files hold something else: a pattern, and what is written in its place."""
    place.mkdir(parents=True)
    for one in source.iterdir():
        below = {path.split("/", 1)[1]: what for path, what in edited.items() if path.startswith(f"{one.name}/")}
        if below:
            link(one, place / one.name, below)
        elif one.name in edited:
            old, new = edited[one.name]
            text, count = re.subn(old, new, one.read_text())
            assert count, (one, old)
            (place / one.name).write_text(text)
        elif one.name == "__pycache__":  # of what is not edited it counts here, too
            (place / one.name).mkdir()
            for code in one.iterdir():
                if f"{code.name.partition('.')[0]}.py" not in edited:
                    (place / one.name / code.name).symlink_to(code)
        else:
            (place / one.name).symlink_to(one)


def environment() -> dict[str, str]:
    """For the program: offline, one thread, this checkout first."""
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    return {**os.environ, **own, "TRANSFORMERS_VERBOSITY": "error"}


def tried(model_name: str) -> dict[str, Any]:
    """What becomes of one call on an embedded model, refused as by default, and with the stock path as the way out.

    Returns:
        `same`: whether the tokens are stock's; `rounds` that drafted; what was `refused` and `said`.
    """
    import torch
    from transformers import AutoModelForImageTextToText

    import mmspec
    from mmspec import zoo

    model = AutoModelForImageTextToText.from_pretrained(zoo.path(model_name)).eval()
    ids = torch.tensor([[5, 19, 288, 345, 411, 519, 288, 345]])
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    want, told = model.generate(**asked), {"refused": "", "rounds": 0, "said": [], "same": True}
    for way in ("error", "fallback"):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                handle = mmspec.enable(model, on_unsupported=way)
                told["rounds"] += getattr(getattr(handle, "stats", None), "rounds", 0)
            except mmspec.UnsupportedError as refused:
                told["refused"] = str(refused)
            told["same"] &= torch.equal(model.generate(**asked), want)
            told["rounds"] += 0 if told["refused"] else mmspec.stats(model).rounds
            mmspec.disable(model)
        told["said"] += [str(one.message) for one in seen if "mmspec" in str(one.message)]
    return told


def main(folder: str, *names: str) -> None:
    import accelerate  # noqa: F401 - before the forks, which then need not load them again
    import torch
    import torch._dynamo
    import torchvision  # type: ignore[import-untyped]  # noqa: F401

    torch.set_num_threads(1)
    for number, name in enumerate(names):
        model = HYBRID if name == "nothing" or _QWEN in RELEASES[name][0] else VIDEO
        reading, writing = os.pipe()
        if os.fork() == 0:
            sys.path.insert(0, str(made(Path(folder, str(number)), name)))
            try:
                result = tried(model)
            except BaseException:
                result = {"crash": traceback.format_exc(limit=-3)}
            os.write(writing, json.dumps(result).encode()[:60_000])
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:
            print(json.dumps({"release": name, "model": model, **json.loads(pipe.read() or b"{}")}), flush=True)
        os.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
