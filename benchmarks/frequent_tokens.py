"""Counts how many tokens of a text were not among the frequent ones that drafters with a large head draft from.

    python -m benchmarks.frequent_tokens qwen.tiktoken documentation=docs.txt chinese=news.txt --out PATH

The ranks of a vocabulary in tiktoken's format, such as Qwen's in the package dashscope, and text files, each read as
answers of 200 tokens to prompts of which nothing is known. Needs the package tiktoken.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch

from benchmarks.page import command, heading, page, save
from mmspec.app.provenance import provenance
from mmspec.drafters.frequent import ROWS, FrequentTokens
from mmspec.protocols import TargetInfo

PADDED = 256  # Qwen's head has so many rows more than there are ranks and special tokens, rounded
ANSWER, MOST = 200, 100_000  # tokens of an answer, and of a text
WORDS = (  # how texts are cut before pairs are merged
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def measured(ids: list[int], vocab: int) -> dict[str, float]:
    """Shares of the tokens of a text."""
    target = TargetInfo("", vocab, 1, 1, 1, torch.device("cpu"), torch.float32, (vocab - PADDED,))
    tokens, drafted, missing = FrequentTokens(target), 0, 0
    for begin in range(0, len(ids), ANSWER):
        tokens.read([])
        known = {*tokens.vocab.ids.tolist()}
        for token in ids[begin : begin + ANSWER]:
            drafted += tokens.suffice
            missing += tokens.suffice and token not in known
            tokens.decided([token])
    ranks = [count for _, count in Counter(ids).most_common(ROWS)]
    return {
        "tokens": len(ids),
        "beyond the first": sum(token >= ROWS for token in ids) / len(ids),
        "beyond the text's own": 1 - sum(ranks) / len(ids),
        "drafted from few": drafted / len(ids),
        "missing there": missing / max(1, drafted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("ranks", type=Path)
    parser.add_argument("texts", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--out", type=Path, help="writes PATH.json and PATH.md")
    args = parser.parse_args()
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    ranks = load_tiktoken_bpe(str(args.ranks))
    encoding = tiktoken.Encoding("given", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={})
    vocab = len(ranks) + PADDED
    found = {}
    for name, file in (text.split("=", 1) for text in args.texts):
        read = Path(file).read_text(encoding="utf-8", errors="replace")
        found[name] = measured(encoding.encode_ordinary(read)[:MOST], vocab)
    named = [
        args.ranks.name,
        *(f"{name}={Path(file).name}" for name, file in (one.split("=", 1) for one in args.texts)),
    ]
    facts = provenance(torch.device("cpu"), torch.float32) | {"argv": [*command()[:3], *named], "vocabulary": vocab}
    names = list(next(iter(found.values())))
    lines = heading(["text", *names])
    for name, row in found.items():
        lines.append(f"| {name} | {row['tokens']:.0f} | " + " | ".join(f"{row[n]:.2%}" for n in names[1:]) + " |")
    lines += [
        "", f"Shares of the tokens: beyond the first {ROWS} of the vocabulary; beyond as many that the text itself has",
        f"most; drafted from few: decided while the {ROWS} frequent tokens, counted as the text goes on, sufficed;",
        "missing there: of these tokens, those that were not among the frequent ones.",
    ]  # fmt: skip
    save(args.out, facts, {"shares": found}, page("How many tokens are not frequent ones", facts, lines))


if __name__ == "__main__":
    main()
