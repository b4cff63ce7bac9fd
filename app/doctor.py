"""`mmspec doctor`: checks installed versions, what mmspec assumes of them, and whether drafting works here."""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import mmspec
from mmspec.app import embedded
from mmspec.app.extras import cores, version
from mmspec.pipelines.host import contract

PACKAGES = ("torch", "torchvision", "transformers", "diffusers", "accelerate")
TOKENS = 8
GOOD, NOTE, BAD = "ok", "--", "NO"  # fine; may matter; must be fixed
_FOLDERS = re.compile(r"(?<![\w:/\\.])(?:~|[A-Za-z]:)?(?:[/\\][\w.+@-]+)+[/\\]")  # the folders of an absolute path


class Finding(NamedTuple):
    """One line of the report."""

    mark: str
    about: str
    text: str

    def __str__(self) -> str:
        return f"{self.mark}  {self.about:<14} {_FOLDERS.sub('…/', self.text)}"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check the installed versions, the device, the compiler, what mmspec assumes of transformers, diffusers and "
        f"accelerate, and {TOKENS} tokens of the embedded models, with and without drafts. The output shows no paths "
        "of yours and can be pasted into a bug report. Exit code: 0 all is well, 1 something must be fixed."
    )
    parser.add_argument("--supported", action="store_true", help="only list model families, drafters and rules")
    parser.add_argument("--device", default="auto", help="where the embedded models run (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print the findings line by line; returns 1 if something must be fixed."""
    if args.supported:
        mmspec.supported()
        return 0
    wrong = 0
    for finding in findings(args.device):
        print(finding, flush=True)
        wrong += finding.mark == BAD
    print("all is well" if not wrong else f"to be fixed: {wrong}, marked {BAD}")
    return 1 if wrong else 0


def findings(device: str) -> Iterator[Finding]:
    """All findings, cheap checks first; an error in a check becomes its finding."""
    yield from _guarded("software", _software)
    yield from _guarded("contract", _assumptions)
    yield from _guarded("device", lambda: _device(device))
    yield from _guarded("compiler", _compiler)
    for model in filter(embedded.speaks, embedded.DRAFTERS):
        yield from _guarded(model, partial(_tokens, model, device))


def _guarded(about: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except Exception as error:  # any error is a finding
        yield Finding(BAD, about, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")


def _software() -> Iterator[Finding]:
    yield Finding(GOOD, "mmspec", mmspec.__version__)
    yield Finding(GOOD, "python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    yield from map(_package, PACKAGES)
    for name in ("peft", "triton"):
        yield Finding(GOOD, name, version(name) or "not installed")
    from mmspec.app import provenance

    commit, changed = provenance.checkout()
    if commit is not None:  # in a clone
        yield Finding(GOOD, "commit", f"{commit[:12]}{', changed' if changed else ''}")


def _package(name: str) -> Finding:
    from packaging.specifiers import SpecifierSet

    range_, here = contract.TESTED.get(name, ""), version(name)
    advice = f'pip install "{name}{range_}"'
    if here is None:
        return Finding(BAD, name, f"not installed; {advice}")
    if not SpecifierSet(range_).contains(here, prereleases=True):
        return Finding(NOTE, name, f"{here}, untested: mmspec is tested with {range_}; {advice}")
    return Finding(GOOD, name, f"{here} (tested: {range_ or 'any'})")


def _assumptions() -> Iterator[Finding]:
    """Check what mmspec assumes of the packages that it is built on."""
    broken, count = contract.broken(), len(contract.judged())
    for row in broken:
        yield Finding(NOTE if row.models else BAD, "contract", str(row))
    advice = f'{len(broken)} of {count} rows are broken; pip install "transformers{contract.TESTED["transformers"]}"'
    yield Finding(NOTE, "contract", advice) if broken else Finding(GOOD, "contract", f"{count} rows hold")


def _device(name: str) -> Iterator[Finding]:
    import torch

    from mmspec.app import devices, provenance

    place = devices.find_device(name)
    built = f"; torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else ""
    yield Finding(GOOD, "device", f"{place.type}: {provenance.device_name(place)}; {cores()} cores{built}")


def _compiler() -> Iterator[Finding]:
    """The C++ compiler, which `compile=True` needs on a CPU, and Triton on a GPU."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        command = get_cpp_compiler()
        output = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=20).stdout
        yield Finding(GOOD, "compiler", output.partition("\n")[0] or command)
    except Exception as error:  # torch has several errors for this
        why = f"{type(error).__name__}; install g++ or clang, or name one in CXX"
        yield Finding(NOTE, "compiler", f"no C++ compiler, which compile=True needs ({why})")
    from mmspec.kernels import few_rows

    if why := few_rows.built()[1]:
        yield Finding(NOTE, "few rows", f"on a CPU torch's own products are used, which are slower: {why}")


def _tokens(model: str, device: str) -> Iterator[Finding]:
    """Generate a few tokens with an embedded model, with drafts and on the stock path, and compare them."""
    from mmspec import media, zoo
    from mmspec.app import engine
    from mmspec.pipelines.prompts import chat_inputs
    from mmspec.registry import name_of

    drafter = embedded.drafter(model)
    loaded = engine.load(model, drafter, device, "float32", TOKENS, 0.0)
    if loaded.drafter is None:
        yield Finding(BAD, model, f"not accelerated: {'; '.join(loaded.notes) or 'no drafter'}")
        return
    picture = media.load_image(zoo.samples() / "scene-01.png")
    inputs = chat_inputs(loaded.processor, [embedded.prompt()], [[picture]])
    report = mmspec.verify(loaded.model, inputs.to(loaded.model.device), TOKENS)
    if not mmspec.stats(loaded.model).rounds:
        yield Finding(BAD, model, "the stock path ran, and nothing was drafted")
    else:
        name = name_of(loaded.drafter) if drafter == embedded.SHIPPED else drafter
        yield Finding(GOOD if report.ok else BAD, model, f"{report.tokens} tokens, {name}: {report}")
