"""Tests mmspec with several releases of transformers, each in its own environment, and writes docs/versions.md.

    python benchmarks/versions.py            # every minor release, the oldest allowed, and the newest
    python benchmarks/versions.py 5.24.0     # only this one; updates its line of docs/versions.md

For each release it checks the contract's rows on the unpacked wheel, and runs `mmspec doctor` and the tests. An
environment is a copy of .venv with another transformers; `floor` also has the oldest torch that pyproject.toml allows,
and `newest` is .venv-newest, as created by `make test LOCK=`.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE, WORK = ROOT / "docs" / "versions.md", ROOT / "build" / "versions"
FLOOR = ("transformers==5.23.0", "torch==2.11.0", "torchvision==0.26.0", "numpy==2.3.5")  # Triton 3.6's interpreter
RELEASES = ("5.23.0", "5.24.0", "floor", "newest")
LABELS = {"floor": " (the oldest torch)", "newest": " (newest of everything)"}
_HEAD = """# Supported versions

mmspec is tested with transformers {range}. `constraints.txt` names the releases of all packages that `make`
installs; `make test LOCK=` takes the newest that the ranges of `pyproject.toml` allow. With a release outside the range
`enable` checks all that mmspec assumes of transformers (`pipelines/host/contract.py`). Where it holds, mmspec says once
that the release is untested, and runs. Where it does not, `enable` raises UnsupportedError with the reason, or leaves
the model as it is with `on_unsupported="fallback"`. `mmspec doctor` shows the same.

Written by `python benchmarks/versions.py`. Contract: rows of assumptions that hold in the release's source. Doctor:
eight tokens of the embedded models, plain and drafted.

| transformers | torch | Python | contract | doctor | tests | minutes |
|---|---|---|---|---|---|--:|
"""


def run(*command: str | Path, **more: object) -> tuple[int, str]:
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False, **more)  # type: ignore[call-overload]
    return done.returncode, done.stdout + done.stderr


def environment(release: str) -> Path:
    """The Python interpreter of an environment with this release."""
    if release == "newest":
        run("make", "LOCK=", ".venv-newest/.mmspec-dev")
        return ROOT / ".venv-newest" / "bin" / "python"
    place = WORK / release
    if not place.exists():
        shutil.copytree(ROOT / ".venv", place, symlinks=True)
        pip = (place / "bin" / "python", "-m", "pip", "install", "-q")  # torch's dependencies change with it
        code, said = run(*pip, *(FLOOR if release == "floor" else ("--no-deps", f"transformers=={release}")))
        if code:
            raise SystemExit(said)
    return place / "bin" / "python"


def tried(release: str) -> str:
    """Test a release; returns its line of the page."""
    python, began = environment(release), time.monotonic()
    code = "import torch, transformers as T, platform as p; print(T.__version__, torch.__version__, p.python_version())"
    name, torch, own = run(python, "-c", code)[1].split()[-3:]
    rows = run(python, "-m", "mmspec.pipelines.host.contract")[1].strip().splitlines()[-1]
    doctor = run(python, "-m", "mmspec.app.cli", "doctor")[0]
    said = run(python, "-m", "pytest", "-n", "2", "--dist", "loadfile")[1]
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)\b", said) or ["no test ran"]
    minutes = (time.monotonic() - began) / 60
    label = name + LABELS.get(release, "")
    healthy = "ok" if doctor == 0 else "fails"
    cells = (label, torch, own, rows.split(" (")[0], healthy, ", ".join(counts), f"{minutes:.0f}")
    return f"| {' | '.join(cells)} |"


def main(releases: list[str]) -> None:
    page = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    lines = {line.split(" | ")[0]: line for line in page.splitlines() if re.match(r"\| \d", line)}
    for release in releases or RELEASES:
        line = tried(release)
        lines[line.split(" | ")[0]] = line
        print(line)
    asked = re.search(r'"transformers([<>=].*?)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert asked is not None
    page = _HEAD.format(range=asked[1]) + "\n".join(lines.values()) + f"\n\n{platform.system()}, CPU.\n"
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
