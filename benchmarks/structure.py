"""Reports the structure of the source: sizes, imports between folders, import cycles, and the files of one round.

python benchmarks/structure.py              # the tree
python benchmarks/structure.py --round      # also runs one greedy round of the embedded model, and names its files
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmspec.protocols import Drafter, Target
    from mmspec.session import Session
    from mmspec.types import Round

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "mmspec", "pipelines", "app", "benchmarks")


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def dotted(path: Path) -> str:
    """The name under which a file is imported."""
    name = path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__").replace("/", ".")
    return name if name.split(".")[0] in ("mmspec", "benchmarks") else f"mmspec.{name}"


def imported(path: Path, known: set[str]) -> Iterator[tuple[str, bool]]:
    """mmspec's modules that a file imports, and whether it imports them when it is loaded."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    late = {id(n) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.Lambda)) for n in ast.walk(f)}
    checked = {id(n) for f in ast.walk(tree) if isinstance(f, ast.If) and "TYPE_CHECKING" in ast.dump(f.test)
               for n in ast.walk(f)}  # fmt: skip
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name.startswith(("mmspec", "benchmarks")):
                yield name, id(node) not in late and id(node) not in checked


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of two or more nodes that reach each other (cycles)."""

    def reached(node: str) -> set[str]:
        seen: set[str] = set()
        ahead = [node]
        while ahead:
            new = graph.get(ahead.pop(), set()) - seen
            seen |= new
            ahead += new
        return seen

    reach = {node: reached(node) for node in list(graph)}
    groups = {tuple(sorted(other for other in there if node in reach.get(other, ()))) for node, there in reach.items()}
    return [list(group) for group in sorted(groups) if len(group) > 1]


def room(module: str, files: dict[str, Path]) -> str:
    return files[module].parent.relative_to(ROOT).as_posix()


def shape() -> None:
    files = {dotted(path): path for path in sources()}
    edges: dict[str, set[str]] = defaultdict(set)
    loaded: dict[str, set[str]] = defaultdict(set)
    for module, path in files.items():
        for other, at_load in imported(path, set(files)):
            if other != module:
                edges[module].add(other)
                if at_load:
                    loaded[module].add(other)
    rooms: dict[str, set[str]] = defaultdict(set)
    for module, others in edges.items():
        rooms[room(module, files)] |= {room(other, files) for other in others} - {room(module, files)}
    texts = {module: path.read_text(encoding="utf-8") for module, path in files.items()}
    lines, held = Counter[str](), Counter[str]()
    for module, text in texts.items():
        lines[room(module, files)] += text.count("\n")
        held[room(module, files)] += 1
    print("| folder | files | lines |\n|---|--:|--:|")
    for name in sorted(lines):
        print(f"| {name} | {held[name]} | {lines[name]} |")
    shipped = sum(n for name, n in lines.items() if not name.startswith("benchmarks"))
    outside = shipped - sum(n for name, n in lines.items() if name.startswith("app"))
    classes = Counter(
        node.name for text in texts.values() for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)
    )
    face = "mmspec"  # its table of lazy names is data, not imports
    for name, value in {
        "source lines": sum(lines.values()),
        "lines of tests": sum(path.read_text(encoding="utf-8").count("\n") for path in ROOT.glob("tests/**/*.py")),
        "shipped": shipped,
        "shipped outside app": outside,
        "folders with source": len(lines),
        "arrows between folders": sum(map(len, rooms.values())),
        "circles of folders": circles(rooms),
        "arrows between files": sum(map(len, edges.values())),
        "circles of files when loaded": circles(loaded),
        "circles of files, late imports too": circles({m: o - {face} for m, o in edges.items()}),
        "files that import the face": sorted(m for m, o in edges.items() if face in o),
        "the word Any": sum(text.count("Any") for text in texts.values()),
        "type: ignore": sum(text.count("# type: ignore") for text in texts.values()),
        "class names defined more than once": sorted(name for name, n in classes.items() if n > 1),
    }.items():
        listed = value if isinstance(value, list) else []
        said = "; ".join(" ".join(one) if isinstance(one, list) else one for one in listed)
        print(f"{name}: {len(listed) if isinstance(value, list) else value}", said)


def round_files() -> None:
    """The files of mmspec whose functions run in a greedy round of the embedded model with its EAGLE drafter."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    import mmspec
    from mmspec import loop, zoo

    folder = zoo.path("scenes-video")
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    picture = Image.open(ROOT / "mmspec/zoo/samples/scene-01.png")
    pieces = [{"type": "image", "image": picture}, {"type": "text", "text": "Describe it."}]
    inputs = processor.apply_chat_template(
        [[{"role": "user", "content": pieces}]],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    mmspec.enable(model, zoo.path("scenes-video-eagle"))
    model.generate(**inputs, max_new_tokens=12, do_sample=False)  # what is done once, such as the library's self-check
    crossed: Counter[str] = Counter()
    stock = loop.decode

    def watched(session: Session, target: Target, drafter: Drafter[object]) -> Iterator[Round | None]:
        steps = stock(session, target, drafter)
        while True:
            sys.setprofile(lambda frame, event, _: crossed.update([frame.f_code.co_filename]))
            try:
                step = next(steps, None)
            finally:
                sys.setprofile(None)
            if step is None:
                return
            yield step

    for module in [m for m in list(sys.modules.values()) if getattr(m, "decode", None) is stock]:
        module.decode = watched  # type: ignore[attr-defined]
    model.generate(**inputs, max_new_tokens=12, do_sample=False)
    calls = {Path(name).resolve(): n for name, n in crossed.items() if name != __file__}
    ours = sorted((path.relative_to(ROOT).as_posix(), calls[path]) for path in sources() if path in calls)
    print(f"files that greedy rounds run through: {len(ours)}")
    print(*(f"  {path} ({n} calls)" for path, n in ours), sep="\n")


if __name__ == "__main__":
    shape()
    if "--round" in sys.argv:
        round_files()
