"""constraints.txt: exact releases of all that pyproject.toml names, inside its ranges, and nothing of one machine."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINES = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
LOCKED = [Requirement(line) for line in LINES]
PLATFORMS = [
    {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "sys_platform": system,
        "platform_machine": machine,
    }
    for python in ("3.11", "3.12", "3.13", "3.14")
    for system, machine in (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))
]


def named(extra: str) -> list[Requirement]:
    """What pyproject.toml asks for, the extras of an extra too."""
    found = [Requirement(line) for line in PROJECT["optional-dependencies"][extra]]
    inner = [named(name) for each in found if each.name == "mmspec" for name in each.extras]
    return [each for each in found if each.name != "mmspec"] + [each for part in inner for each in part]


ASKED = {
    each.name: each for each in [Requirement(line) for line in PROJECT["dependencies"]] + named("dev") + named("docs")
}


def test_pip_takes_every_line_as_a_constraint():
    other = [line for line in LINES if not re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]*( ; .+)?", line)]
    assert other == [], "not name==version; run `make lock`"


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda each: "-".join(list(each.values())[::2]))
def test_each_platform_has_one_release_of_each_package(platform: dict):
    environment = {**default_environment(), **platform}
    names = [each.name for each in LOCKED if each.marker is None or each.marker.evaluate(environment)]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})
    missing = {canonicalize_name(name) for name in ASKED} - set(names)
    assert not missing, f"{sorted(missing)} are in pyproject.toml, not in constraints.txt; run `make lock`"


def test_the_lock_lies_in_the_ranges_of_the_metadata():
    ranges = {canonicalize_name(name): each.specifier for name, each in ASKED.items()}
    versions = [(each.name, str(each.specifier).removeprefix("==")) for each in LOCKED if each.name in ranges]
    outside = [f"{name} {version}: not {ranges[name]}" for name, version in versions if version not in ranges[name]]
    assert outside == [], "run `make lock`"


def test_transformers_has_an_upper_bound():
    assert "<" in str(ASKED["transformers"].specifier), (
        "it is built on unstable names: a new minor release is tested first"
    )
