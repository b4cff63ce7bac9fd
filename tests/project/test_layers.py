"""The house rules of ARCHITECTURE.md that a program can check: who imports whom, and what a file looks like."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mmspec
from mmspec.pipelines.host import names
from mmspec.pipelines.host.contract import ROWS

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "app", "pipelines", "mmspec", "kernels")  # each imports itself and what stands to its right
INSIDE = {  # the order inside mmspec/: each part imports only its own rank and lower ones
    "modes": 0,
    "media": 0,
    "types": 0,
    "protocols": 0,
    "rules": 0,
    "statistics": 0,
    "progress": 0,
    "replacing": 0,
    "session": 0,
    "config": 0,
    "registry": 0,
    "ragged_cache": 0,
    "prefix_store": 0,
    "functional": 0,
    "steady": 0,
    "compile": 3,  # of a drafter's pass and of MAR's head, too
    "loop": 1,
    "switch": 1,
    "accept": 1,
    "continuous": 1,
    "tree": 1,
    "models": 2,
    "drafters": 3,
    "zoo": 3,  # scenes and prompts, which train reads
    "checkpoints": 4,
    "train": 4,
}
FACE = "mmspec/__init__.py"  # imports upwards, but lazily and by name
DIFFUSERS = ("mmspec/models/", "pipelines/")
HOST = "pipelines/host/"
ONE_PLACE = ("/names.py", "/contract.py")  # where a name that a release may change stands
HOSTS = {"transformers", "peft", "accelerate"}
# names that releases change, besides the private ones in the contract
CHANGED = """
    past_key_values past_key_values_length cache_params cache_length logits_to_keep next_sequence_length
    model_kwargs is_first_iteration mm_encoder_outputs mm_token_type_ids moe_mm_token_type_ids block_sequence_ids
    prefill_chunk_size last_hidden_state is_encoder_decoder layer_types sliding_window use_sliding_window
    attention_chunk_size cross_attention_layers num_kv_shared_layers is_kv_shared_layer shared_kv_states hc_mult
    hc_count index_kpool index_block_size indexer_compress_ratio gradient_checkpointing original_max_seq_len
    get_rope_index get_decoder get_input_embeddings get_output_embeddings get_text_config num_assistant_tokens
    use_mtp prompt_lookup_num_tokens max_matching_ngram_size speculation_type assistant_early_exit
    assistant_tokenizer is_assistant active_peft_config peft_config is_prompt_learning get_base_model base_layer
    adapter_names
"""
ASSUMED = (f"{row.what.rpartition('.')[2]} {row.names}" for row in ROWS if not row.what.startswith("diffusers."))
PRIVATE = {word for each in ASSUMED for word in re.findall(r"\w+", each) if re.match("_[^_]", word)}
UNSTABLE = {*CHANGED.split(), *PRIVATE}
CACHED = "cache_length" if names.CACHE == "cache" else "past_key_values_length"  # Kosmos-2.5's number of cached tokens
RENAMED = {*names._CACHES[1:], CACHED, names.FEATURES, names.LOGITS}  # "cache" means much else
SPELLED_BELOW = {  # by the core, of modules that accelerate or transformers have hooked
    "mmspec/modes.py": {"transformers.utils.output_capturing"},
    "mmspec/compile/version.py": {"_hf_hook", "accelerate.hooks"},
}
FORMATS = "mmspec/checkpoints/"  # reads and writes files whose fields are called so
SAYS_NOTHING = {"utils.py", "helpers.py", "common.py", "misc.py"}
SOURCES = sorted(path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.py"))


PAGES = sorted(path.relative_to(ROOT).as_posix() for glob in ("*.md", "docs/*.md") for path in ROOT.glob(glob))


def parse(source: str) -> ast.Module:
    return ast.parse((ROOT / source).read_text(encoding="utf-8"))


def dotted(source: str) -> str:
    """Name under which a file is imported."""
    name = source.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name.startswith(("mmspec", "benchmarks")) else f"mmspec.{name}"


def imports(source: str) -> set[str]:
    """All modules (and names in them) that a file imports, wherever in the file it does so."""
    found: set[str] = set()
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = dotted(source).split(".")
            if not source.endswith("__init__.py"):
                package = package[:-1]
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def folder_of(module: str) -> str | None:
    """Which of these folders a module of ours lies in; None for everybody else's."""
    parts = module.split(".")
    if parts[0] != "mmspec":
        return parts[0] if parts[0] == "benchmarks" else None
    return parts[1] if len(parts) > 1 and parts[1] in FOLDERS else "mmspec"


def test_there_is_something_to_check():
    assert FACE in SOURCES and "app/cli.py" in SOURCES and len(SOURCES) > 10


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.every(2)
def test_imports_go_down(source: str):
    home = folder_of(dotted(source))
    below = FOLDERS[FOLDERS.index(home) :]
    for module in imports(source) if source != FACE else ():
        target = folder_of(module)
        assert target is None or target in below, f"{source} imports {module}, which stands above it"


@pytest.mark.parametrize("source", [source for source in SOURCES if source.startswith("mmspec/") and source != FACE])
def test_imports_inside_mmspec_go_down(source: str):
    part = dotted(source).split(".")[1]
    assert part in INSIDE, f"{source}: give {part!r} a rank in tests/project/test_layers.py (design: layers)"
    for module in imports(source):
        assert module != "mmspec", f"{source} imports the face; name the module that is meant"
        if folder_of(module) == "mmspec":
            target = module.split(".")[1]
            rank = INSIDE.get(target, -1)  # mmspec.__version__ and the like
            assert rank <= INSIDE[part], f"{source} imports {module}, which stands above it"


@pytest.mark.parametrize("source", [s for s in SOURCES if not s.startswith(("app/", "benchmarks/")) and s != FACE])
def test_only_the_app_uses_the_face(source: str):
    """Whose names lead to all floors: `from mmspec import enable` is an import of pipelines, wherever it stands."""
    for module in imports(source):
        parts = module.split(".")
        assert parts[0] != "mmspec" or (len(parts) > 1 and parts[1] not in mmspec._FACE), f"{source} imports {module}"


def test_no_file_and_no_folder_reaches_itself_by_imports():
    """Imports inside functions, and those for type checkers alone, count as well. A folder includes those inside it."""
    where = importlib.util.spec_from_file_location("structure", ROOT / "benchmarks" / "structure.py")
    structure = importlib.util.module_from_spec(where)
    where.loader.exec_module(structure)
    paths = {structure.dotted(path): path.relative_to(ROOT) for path in structure.sources()}
    graph = {
        module: {name for name, _ in structure.imported(ROOT / path, paths.keys())} - {"mmspec"}
        for module, path in paths.items()
    }
    assert len(graph) > 100 and structure.circles(graph) == []
    folders: dict[str, set[str]] = {}
    for module, others in graph.items():
        if str(paths[module]).startswith(("pipelines", "benchmarks")):
            within = {"/".join(paths[other].parent.parts[:2]) for other in others}
            folders.setdefault("/".join(paths[module].parent.parts[:2]), set()).update(within)
    assert {"pipelines/host", "pipelines/target", "pipelines/patching"} <= folders.keys()
    assert structure.circles(folders) == []


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.every(2)
def test_imports_from_outside(source: str):
    tops = {module.split(".")[0] for module in imports(source)}
    for bare in ("kernels", "pipelines", "app"):
        assert bare not in tops, f"{source}: write mmspec.{bare}; the bare name would load the module twice"
    assert "random" not in tops, f"{source}: draw from the session's generator"
    assert "diffusers" not in tops or source.startswith(DIFFUSERS), f"{source}: diffusers belongs in {DIFFUSERS}"
    if source.startswith("mmspec/"):
        outside = [module for module in imports(source) if module.startswith("transformers.")]
        targets = [module for module in outside if module.endswith(("ForConditionalGeneration", "ForCausalLM"))]
        assert not targets, f"{source} knows a target's class: {targets}"


OUTSIDE = [source for source in SOURCES if not source.startswith((HOST, "benchmarks/"))]
CORE = [source for source in OUTSIDE if not source.startswith(("app/", FORMATS))]


@pytest.mark.parametrize("source", OUTSIDE)
@pytest.mark.every(2)
def test_only_the_host_imports_transformers(source: str):
    found = {module for module in imports(source) if module.split(".")[0] in HOSTS}
    assert not found, f"{source} imports {min(found)}; what is known of it belongs in {HOST}"


def spelled(source: str) -> set[tuple[str, int]]:
    """Strings, attributes, keywords, parameters and definitions of a file, with their lines."""
    found = set()
    for node in ast.walk(parse(source)):
        each = (getattr(node, field, None) for field in ("value", "attr", "arg", "name"))
        found |= {(word, getattr(node, "lineno", 0)) for word in each if isinstance(word, str)}
    return found


@pytest.mark.parametrize("source", CORE)
def test_only_the_host_spells_what_releases_rename(source: str):
    for word, line in spelled(source):
        theirs = word in UNSTABLE or (word.split(".")[0] in HOSTS and re.fullmatch(r"\w+(\.\w+)+", word))
        known = word in SPELLED_BELOW.get(source, ())
        assert known or not theirs, f"{source}:{line} spells {word!r}; ask HostModel, or add to {HOST}"


@pytest.mark.parametrize("source", [s for s in CORE if s.startswith("pipelines/") and "/mar/" not in s])
def test_only_the_host_looks_into_configs(source: str):
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            of = ast.unparse(node.args[0])
            assert not of.endswith("config"), f"{source}:{node.lineno} looks into {of}; ask HostModel"


@pytest.mark.parametrize("source", [s for s in SOURCES if s.startswith(HOST) and not s.endswith(ONE_PLACE)])
def test_a_name_of_the_cache_or_the_logits_stands_in_one_file(source: str):
    """What 5.24 renamed, and what the next release may: a rename is mended in names.py, and its row in contract.py."""
    for word, line in spelled(source):
        assert word not in RENAMED, f"{source}:{line} spells {word!r}; import it from host/names.py"


def test_the_host_has_names_of_its_own_to_keep():
    assert {"_sample", "_prefill", "_attn_implementation", "past_key_values", "_hf_hook"} <= UNSTABLE
    assert any(word in UNSTABLE for source in SOURCES if source.startswith(HOST) for word, _ in spelled(source))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.every(2)
def test_a_file_says_what_it_is_for(source: str):
    assert Path(source).name not in SAYS_NOTHING, f"{source}: the name says nothing of what is in it"
    if not (ROOT / source).read_text(encoding="utf-8").strip():
        return
    said = ast.get_docstring(parse(source)) or ""
    first = said.split("\n")[0]
    assert first.endswith((".", "`", ")")), f"{source}: the first line is one sentence on what the file is for"


def test_a_class_name_stands_for_one_thing():
    defined: dict[str, list[str]] = {}
    for source in SOURCES:
        for node in ast.walk(parse(source)):
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, []).append(source)
    assert {name: places for name, places in defined.items() if len(places) > 1} == {}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.every(2)
def test_no_except_swallows_everything(source: str):
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.ExceptHandler):
            silent = all(isinstance(step, ast.Pass | ast.Continue) for step in node.body)
            broad = node.type is None or (silent and getattr(node.type, "id", "") in ("Exception", "BaseException"))
            assert not broad, f"{source}:{node.lineno}: name the errors, or say what happens"


@pytest.mark.parametrize("page", PAGES)
def test_prose_has_short_lines(page: str):
    """Tables, pictures, headings and commands may be longer."""
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    prose = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "![", "#"))]
    assert [line for line in prose if len(line) > 120] == []


def test_four_folders_are_no_packages_of_their_own():
    for folder in ("app", "pipelines", "kernels", "tests"):
        assert not list((ROOT / folder).rglob("__init__.py")), f"{folder}/__init__.py would shadow a PyPI package"


def test_the_wheel_holds_every_folder_but_the_workshop():
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    holding = {dotted(source).rsplit(".", 1)[0] for source in SOURCES if not source.endswith("__init__.py")}
    assert {name for name in holding if not name.startswith("benchmarks")} <= declared
    assert not any(name.startswith("benchmarks") for name in declared), "the workshop is for developers"


def test_importing_the_face_is_light():
    code = "import sys, mmspec; print(sorted({'torch', 'transformers', 'diffusers'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_the_checkout_stays_small() -> None:
    """Tools that send a working tree take 64 MiB; pictures and results are no reason to come near that."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    sizes = {
        name: (ROOT / name).stat().st_size for name in listed.stdout.split("\0") if name and (ROOT / name).exists()
    }
    assert sum(sizes.values()) < 56 * 2**20 and max(sizes.values()) < 25 * 10**6
    large = {n: s for n, s in sizes.items() if s > 512 * 2**10 and not n.startswith("mmspec/zoo/weights/")}
    assert not large, "compress pictures, and keep of a result what the pages say"
