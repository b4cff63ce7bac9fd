"""The contract with transformers, diffusers, accelerate and peft: each row on what is installed; that each can fail."""

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from made_up_releases import link
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mmspec.pipelines.host import contract, recurrent, source
from mmspec.pipelines.host.contract import ROWS, TESTED, Assumption, broken, judged
from mmspec.pipelines.host.exotic import gemma4_assistant, path_readers
from mmspec.pipelines.host.processors import stopping
from mmspec.pipelines.host.processors import table as processors

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = source.package("transformers")
MODELS = {name for row in ROWS for name in row.models.split()}


def named(row: Assumption) -> str:
    return f"{row.what.removeprefix('transformers.').removeprefix('models.')}-{row.how}"


def changed(folder: Path, name: str, old: str, new: str) -> Path:
    """The installed transformers with something else in one file."""
    link(INSTALLED, folder / "transformers", {name: (re.escape(old), new)})
    return folder


LOCKED = re.search(r"^transformers==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
assert LOCKED is not None
OLDER = Version(source.version("transformers")) < Version(LOCKED[1])  # it may lack models that came later
HERE = judged() if OLDER else ROWS


@pytest.mark.parametrize("row", HERE, ids=named)
def test_a_row_holds(row: Assumption):
    found = source.look(row.what)
    assert not isinstance(found, str), f"DRIFT: {row._replace(found=found)}"
    assert row not in [each._replace(found="") for each in broken()], (
        f"DRIFT: {[r for r in broken() if r.what == row.what]}"
    )


@pytest.mark.parametrize("row", [row for row in ROWS if row.names], ids=named)
def test_a_row_would_not_hold_of_anything_else(row: Assumption):
    assert contract._deviation(row._replace(names="no_such_name"), None)


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_a_row_says_who_leans_on_it(row: Assumption):
    assert row.how in source.CHECKS and row.who and row.why[:1].isupper() and not row.why.endswith(".")
    missing = [name for name in row.who.split() if not (ROOT / "pipelines" / f"{name}.py").is_file()]
    assert not missing, f"{row.what}: {missing} are no modules of pipelines/"
    words = re.findall(r"\w+", f"{row.what.rpartition('.')[2]} {row.names}")
    spelt = re.compile(rf"\b({'|'.join(words)})\b")
    silent = [name for name in row.who.split() if not spelt.search((ROOT / "pipelines" / f"{name}.py").read_text())]
    assert not silent, f"{row.what}: {silent} spell none of its names"


def test_no_row_stands_twice():
    assert len({row[:3] for row in ROWS}) == len(ROWS)


# -- what a release may change: (file, what stands there, what stands there instead, what is said) ---------------------
CHANGES = {
    "a method renamed": (
        "generation/utils.py", "def _prefill(", "def _fill(",
        ["GenerationMixin._prefill: there is no _prefill in GenerationMixin. The prompt is read by"],
    ),
    "a method no longer called": (
        "generation/utils.py", "outputs = self._prefill(", "outputs = self._filled(",
        ["GenerationMixin._sample: it does not call ._prefill. Our loop makes the forwards that stock's makes"],
    ),
    "another loop for sampling": (
        "generation/utils.py", 'GenerationMode.SAMPLE: "_sample"', 'GenerationMode.SAMPLE: "_draw"',
        ["GENERATION_MODES_MAPPING: its source has no `GenerationMode.SAMPLE: '_sample'`"],
    ),
    "a parameter renamed": (
        "cache_utils.py", "torch.Tensor, layer_idx: int, *args", "torch.Tensor, layer: int, *args",
        ["Cache.update: its parameters are key_states, value_states, layer; expected key_states, value_states, layer_"],
    ),
    "an attribute renamed": (
        "generation/stopping_criteria.py", "self.maximum_token_len = ", "self.widest = ",
        ["StopStringCriteria: it has no maximum_token_len. It is called with the end of each row"],
    ),
    "a class gone": (
        "generation/streamers.py", "class BaseStreamer", "class Streamer", ["there is no BaseStreamer in streamers.py"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.every(2)
def test_one_thing_renamed_is_told(tmp_path: Path, case: str):
    name, old, new, sentences = CHANGES[case]
    found = broken(changed(tmp_path, name, old, new))
    unchanged = [row for row in found if row.found == contract._deviation(row._replace(found=""), None)]
    assert not unchanged
    for sentence in sentences:
        assert any(sentence in str(row) for row in found), [str(row) for row in found]
    assert {row.what.split(".")[1] for row in found} == {Path(name).parts[0].removesuffix(".py")}


# -- each kind of check, on source of its own: (names, source in which it holds, in which not, what is said) -----------
KINDS = {
    "is": ("", "thing = 1", "other = 1", "there is no thing in own.py"),
    "knows": ("a b|c", "def thing(c, a, d): ...", "def thing(a, d): ...", "it has no parameter b or c; it has a, d"),
    "takes": ("a b", "def thing(b, a, d=0, *, e=1, **f): ...", "def thing(a, b, *, d): ...", "it also requires d"),
    "order": ("a b", "class A:\n    def thing(self, a, b, c=0): ...", "class A:\n    def thing(self, b, a): ...",
              "its parameters are b, a; expected a, b first"),
    "holds": ("a b c", "class thing:\n    a: int\n    def b(self):\n        self.c = 1", "class thing:\n    a = b = 1",
              "it has no c"),
    "says": ("a b c|d", 'def thing(a):\n    return a.b["d"]', "def thing(a):\n    return a.b", "not contain c or d"),
    "calls": ("mamba2_chunk_scan .b", "from x import mamba2_chunk_scan\ndef thing(a):\n    a.b(mamba2_chunk_scan(D=a))",
              "from x import mamba2_chunk_scan\ndef thing(a):\n    a.b(mamba2_chunk_scan(D=a, gate=a))",
              "it calls mamba2_chunk_scan(gate=), with an unknown argument"),
    "line": ("f(a, b=1)", "def thing(a):\n    return f(\n        a,\n        b=1)", "def thing(a):\n    return f(a)",
             "its source has no `f(a, b=1)`"),
}  # fmt: skip


@pytest.mark.parametrize("kind", source.CHECKS)
def test_each_kind_of_check_can_fail(tmp_path: Path, kind: str):
    names, good, bad, said = KINDS[kind]
    what = "host.own.A.thing" if kind == "order" else "host.own.thing"
    for name, text in (("good", good), ("bad", bad)):
        (tmp_path / name / "host").mkdir(parents=True)
        (tmp_path / name / "host" / "own.py").write_text(text)
    row = Assumption(what, kind, names, "Why", "who")
    assert contract._deviation(row, tmp_path / "good") == ""
    assert said in contract._deviation(row, tmp_path / "bad")


def test_a_call_that_its_file_does_not_bind_is_told(tmp_path: Path):
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "own.py").write_text("def thing(self):\n    scan = self.scan\n    scan()\n")
    assert (
        contract._deviation(Assumption("host.own.thing", "calls", "scan", "Why", "who"), tmp_path)
        == "its file does not bind scan"
    )


def test_source_is_found_where_it_is_hard_to_find(tmp_path: Path):
    text = '''
if True:
    from x import (
        conditional as known,
    )
else:
    known = None


@decorated("with")
def thing(
    self, a
):
    """A text

at the beginning of a line: def other(b)
    """
    return 1


class Holder:
    if known:
        def inner(self): ...
    async def waiting(self, a, /, b): ...
'''
    (tmp_path / "own.py").write_text(text)
    module = source.module(tmp_path / "own.py")
    assert {"known", "thing", "Holder"} <= module.bound
    assert source.parameters(module.find("thing"))[0] == ["a"]
    assert {"inner", "waiting"} <= source.members(module.find("Holder"))
    assert module.find("other") is None and module.find("nothing") is None


# -- that nothing is left out ------------------------------------------------------------------------------------------


def imported() -> set[str]:
    """What pipelines/ imports from inside of the packages, by dotted name."""
    found = set()
    for path in (ROOT / "pipelines").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and module.split(".")[0] in ("transformers", "diffusers", "accelerate"):
                found |= {f"{module}.{alias.name}" for alias in node.names if "." in module}
    return found


def test_everything_imported_from_inside_a_package_has_a_row():
    rows = [f"{row.what}." for row in ROWS]
    lack = {name for name in imported() if not any(row.startswith(f"{name}.") for row in rows)}
    assert not lack, f"no row of host/contract.py for {sorted(lack)}"


def test_tables_of_names_have_rows():
    scans = {name for row in ROWS if row.how == "calls" for name in row.names.split() if not name.startswith(".")}
    assert scans == set(recurrent.SCANS) == set(source.ARGUMENTS)
    assert set(path_readers.READERS) <= MODELS and set(gemma4_assistant.CLASSES) <= MODELS
    ours = {*processors.HISTORY, *processors.UNSORTED, *stopping._KNOWN}
    whats = {row.what for row in ROWS}
    lack = {f"{cls.__module__}.{cls.__name__}" for cls in ours} - whats
    assert not lack


# -- what is asked, and what is printed --------------------------------------------------------------------------------


def test_only_the_rows_of_a_model_count(tmp_path: Path):
    name = "models/qwen3_5/modeling_qwen3_5.py"
    other = changed(tmp_path, name, "torch_chunk_gated_delta_rule", "chunk_rule")
    (row,) = broken(other, ["Qwen3_5ForConditionalGeneration", "Qwen3_5GatedDeltaNet"])
    assert "it does not call torch_chunk_gated_delta_rule" in str(row) and "only Qwen3_5GatedDeltaNet need" in str(row)
    assert broken(other) == [row] and broken(other, ["LlavaForConditionalGeneration", "LlamaModel"]) == []


def test_models_that_a_release_lacks_are_not_judged(tmp_path: Path):
    (tmp_path / "transformers" / "models").mkdir(parents=True)
    assert {row.what.split(".")[2] for row in judged(tmp_path) if ".models." in row.what} == {"auto"}
    assert not any(row.what.startswith("diffusers") for row in judged(tmp_path))
    with pytest.raises(ValueError, match="contains none of accelerate, diffusers, peft, transformers; pass the folder"):
        broken(tmp_path / "transformers")


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mmspec.pipelines.host.contract", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_command_imports_nothing_and_takes_a_second():
    code = (
        "import sys, time; begin = time.process_time(); from mmspec.pipelines.host import contract;"
        "code = contract.main([]); print(code, time.process_time() - begin,"
        "sorted({'torch', 'transformers', 'diffusers', 'accelerate', 'peft'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
    assert out[0] == f"{len(HERE)} rows hold (transformers {source.version('transformers')})"
    code, seconds, modules = out[1].split(" ", 2)
    assert code == "0" and modules == "[]" and float(seconds) < 3, "1 s where nothing else runs"


def test_the_command_tells_what_is_broken(tmp_path: Path):
    done = run(str(changed(tmp_path, "activations.py", "ACT2FN = ", "FUNCTIONS = ")))
    assert done.returncode == 1 and done.stdout.startswith(
        "transformers.activations.ACT2FN: there is no ACT2FN in activations.py. A convolution's activation is looked up"
    )
    assert f"(transformers {source.version('transformers')})" in done.stdout
    assert run(str(tmp_path / "nothing")).returncode == run("--help").returncode == 2


def test_a_second_look_costs_nothing():
    broken()
    begin = time.perf_counter()
    broken(models=["LlamaModel"])
    assert time.perf_counter() - begin < 0.1


def test_the_tested_range_is_that_of_the_metadata():
    assert source.version("transformers") in SpecifierSet(TESTED["transformers"])
    assert {"torch", "diffusers", "accelerate"} <= set(TESTED)
