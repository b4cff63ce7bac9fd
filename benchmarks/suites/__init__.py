"""The maintainers' suites, measured and told of as those of `mmspec bench`: `python -m benchmarks SUITE`."""

from pathlib import Path

import yaml

from mmspec.app.bench import command, report

SUITES = command.SUITES | {
    "vlm": ("benchmarks.suites.vlm", "as `mmspec bench vlm`, also with pairs, clips, ablations and curves"),
    "image": ("benchmarks.suites.image", "pictures, drawn plainly and with drafters, and how good they are"),
    "caption": ("benchmarks.suites.caption", "many captions: static and continuous batches, with and without drafters"),
    "round": ("benchmarks.suites.round", "where the time of a round goes, and what it is against a plain step"),
    "shapes": ("benchmarks.suites.shapes", "what a round costs at the shapes of published models, with random weights"),
    "nodes": ("benchmarks.suites.nodes", "what verifying N nodes costs against one, on a hybrid with random weights"),
    "turns": ("benchmarks.suites.turns", "the first token of a second question and a second turn, with prefix_cache"),
    "prompts": ("benchmarks.suites.prompts", "several prompts about each picture in one run, beside a run for each"),
    "kernels": ("benchmarks.suites.kernels", "kernels beside their definitions, as a share of the copy bandwidth"),
    "gpu": ("benchmarks.suites.gpu", "all that a GPU has to show, in stages; toys where there is none"),
}


def _top(record: report.Record) -> str:
    return ", ".join(f"{one['op']} {one['ms']:.2f} ms ({one['calls']:.0f})" for one in record["top"][:4])


def _shares(record: report.Record) -> str:
    held = record["shares"]
    return "-" if held is None else " ".join(f"{100 * held[part]:.0f}" for part in ("draft", "verify", "other"))


def _spent(record: report.Record) -> str:
    none = record["lossless"] or record["spent"] is None
    return "-" if none else f"{record['spent']:.2f} ({record['spent_max']:.2f})"


def _identical(record: report.Record) -> str:
    return f"{record['identical_rate']:.0%}" if record["exact_seed"] and record["identical_rate"] is not None else "-"


_OWN = Path(__file__).with_name("tables.yaml")
report.LAYOUTS |= yaml.safe_load(report.TABLES.read_text() + _OWN.read_text())
report.OWN |= {
    "top": _top,
    "way": lambda r: r["method"] + (f" ({r['way']})" if "way" in r else ""),
    "lossless": lambda r: "kept" if r["lossless"] else "bent",
    "shares": _shares,
    "spent": _spent,
    "exact_seed": _identical,
}
report.TITLES["caption"] = lambda r: (
    f"{r['captions']} {r.get('asked', 'captions')}, {r['rows']} row{'s' * (r['rows'] > 1)} at once"
)
report.TITLES["kernels"] = lambda r: (
    f"{r['kernel']}, {r['dtype']}: {' '.join(f'{n} {size}' for n, size in r['sizes'].items())}"
)
