"""The provenance that is stored with every result: commit, command, versions, machine and its load."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

import mmspec
from mmspec.app.extras import cores, version

PACKAGES = ("torch", "transformers", "diffusers")
CODE = ("mmspec", "pipelines", "kernels", "app", "pyproject.toml")


def provenance(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    """The facts as plain data; None for what is unknown."""
    commit, dirty = checkout()
    benchmarks = Path(sys.argv[0]).parts[-2:] == ("benchmarks", "__main__.py")
    return {
        "commit": commit,
        "dirty": dirty,
        "argv": [*(("python", "-m", "benchmarks") if benchmarks else ("mmspec",)), *sys.argv[1:]],
        "versions": {
            "python": platform.python_version(),
            "mmspec": mmspec.__version__,
            **{name: version(name) for name in PACKAGES},
        },
        "system": f"{platform.system()} {platform.machine()}",
        "device": device_name(device),
        "device_type": device.type,
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "niceness": os.nice(0) if hasattr(os, "nice") else None,
        "load_average": load_average(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def checkout() -> tuple[str | None, bool | None]:
    """Commit of the checkout that mmspec runs from, and whether its code has changed; (None, None) if installed."""
    root = Path(mmspec.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None, None
    try:
        commit, changes = (
            subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=20, check=True).stdout
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--", *CODE))
        )
    except (OSError, subprocess.SubprocessError):  # git is missing, or refuses another user's repository
        return None, None
    return commit.strip(), bool(changes.strip())


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu" and Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(names, platform.machine())
    return platform.processor() or platform.machine()


def load_average() -> list[float] | None:
    """Runnable processes over the last 1, 5 and 15 minutes; with more than there are cores, timings are unreliable."""
    return [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None
