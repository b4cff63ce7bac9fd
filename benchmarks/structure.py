"""Reports the structure of the source: sizes, imports between folders, and import cycles.

python benchmarks/structure.py
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

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


if __name__ == "__main__":
    shape()
