"""The maintainers' benchmark suites, run by `python -m benchmarks SUITE`, with the reports of `mmspec bench`."""

from pathlib import Path

import yaml

from mmspec.app.bench import command, report

SUITES = command.SUITES | {
    "vlm": ("benchmarks.suites.vlm", "as `mmspec bench vlm`, also with pairs, clips, published benchmarks and tuning"),
    "image": ("benchmarks.suites.image", "as `mmspec bench image`, and how good the pictures are"),
    "round": ("benchmarks.suites.round", "where the time of a round goes, and what it is against a plain step"),
    "shapes": ("benchmarks.suites.shapes", "what a round costs at the shapes of published models, with random weights"),
    "turns": ("benchmarks.suites.turns", "the first token of a second question and a second turn, with prefix_cache"),
    "prompts": ("benchmarks.suites.prompts", "several prompts about each picture in one run, beside a run for each"),
    "json": ("benchmarks.suites.json_captions", "captions that a JSON schema rules: valid, identical, and how fast"),
    "kernels": ("benchmarks.suites.kernels", "kernels beside their definitions, as a share of the copy bandwidth"),
    "gpu": ("benchmarks.suites.gpu", "all that a GPU has to show, in stages; toys where there is none"),
}


def _top(record: report.Record) -> str:
    return ", ".join(f"{one['op']} {one['ms']:.2f} ms ({one['calls']:.0f})" for one in record["top"][:4])


_OWN = Path(__file__).with_name("tables.yaml")
report.LAYOUTS |= yaml.safe_load(report.TABLES.read_text() + _OWN.read_text())
report.OWN["top"] = _top
report.TITLES["kernels"] = lambda r: (
    f"{r['kernel']}, {r['dtype']}: {' '.join(f'{n} {size}' for n, size in r['sizes'].items())}"
)
