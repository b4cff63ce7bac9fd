"""Reads definitions, parameters and calls from a package's source files by `ast`, without importing it.

Only the top-level statement that is needed is parsed, so that checking the whole contract takes less than a second.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Collection, Iterator
from functools import cache, cached_property, lru_cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
_DEFINING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_BEGIN = re.compile(r"^(?=[A-Za-z_@])(?!else\b|elif\b|except\b|finally\b)", re.MULTILINE)  # a top-level statement
_NAMED = re.compile(r"^(?:async def|def|class)\s+(\w+)|^(\w+)\s*[:=]", re.MULTILINE)


@cache
def package(name: str, where: Path | None = None) -> Path | None:
    """The folder of an installed package, or of a package in the folder `where`; None: there is none."""
    if where is not None:
        return where / name if (where / name).is_dir() else None
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


@cache
def version(name: str, where: Path | None = None) -> str:
    """`__version__` in a package's `__init__.py`; "" if it is not there."""
    folder = package(name, where)
    match = folder and re.search(r"^__version__ = [\"'](.+?)[\"']", _text(folder / "__init__.py"), re.MULTILINE)
    return match[1] if match else ""


@lru_cache(maxsize=256)
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


class Module:
    """One source file."""

    def __init__(self, path: Path) -> None:
        self.text = _text(path)

    @cached_property
    def _parts(self) -> list[str]:
        """The file's top-level statements; decorators are separate from what they decorate."""
        begins = [match.start() for match in _BEGIN.finditer(self.text)]
        return [self.text[a:b] for a, b in zip(begins, [*begins[1:], len(self.text)], strict=True)]

    @cached_property
    def _by_name(self) -> dict[str, str]:
        named = [(_NAMED.match(part), part) for part in self._parts]
        return {match[1] or match[2]: part for match, part in named if match is not None}

    @cached_property
    def whole(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def bound(self) -> set[str]:
        """Names that the file defines or imports at its top level, also inside of `if` and `try`."""
        others = "".join(part for part in self._parts if part.startswith(("import ", "from ", "if ", "try:")))
        try:
            return set(self._by_name) | set(_bound(ast.parse(others).body))
        except SyntaxError:
            return set(_bound(self.whole.body))

    @cache  # noqa: B019 module objects are cached anyway
    def find(self, name: str) -> ast.AST | None:
        """The statement that defines a name: a class, a function, an assignment or an import."""
        try:
            body: list[ast.stmt] = ast.parse(self._by_name.get(name, "")).body
        except SyntaxError:  # the statement has text at the beginning of a line, such as in a string
            body = []
        return _defined(body or self.whole.body, name)


@lru_cache(maxsize=256)
def module(path: Path) -> Module:
    return Module(path)


def look(dotted: str, where: Path | None = None) -> tuple[ast.AST, Module] | str:
    """The node of a dotted name and its file; or a sentence that names the first part that is not there.

    A part may be `a|b`, which means one of the two.
    """
    name, *parts = dotted.split(".")
    here = package(name, where)
    if here is None:
        return f"there is no package {name}"
    while parts:
        names = parts[0].split("|")
        inner = next((here / one for one in names if (here / one).is_dir()), None)
        file = next((here / f"{one}.py" for one in names if (here / f"{one}.py").is_file()), None)
        if inner is None and file is None:
            return _inside(module(here / "__init__.py"), parts, f"{here.name}/")
        parts = parts[1:]
        if file is not None:
            return _inside(module(file), parts, file.name)
        assert inner is not None
        here = inner
    return _inside(module(here / "__init__.py"), [], here.name)


def _inside(file: Module, parts: list[str], where: str) -> tuple[ast.AST, Module] | str:
    node: ast.AST | None = None
    for n, part in enumerate(parts):
        body = getattr(node, "body", [])
        some = ((file.find(one) if n == 0 else _defined(body, one)) for one in part.split("|"))
        node = next((one for one in some if one is not None), None)
        if node is None:
            return f"there is no {part.replace('|', ' or ')} in {where}"
        where = part
    return (file.whole if node is None else node), file


def _defined(body: list[ast.stmt], name: str) -> ast.AST | None:
    for one in _flat(body):
        if isinstance(one, _DEFINING) and one.name == name:
            return one
        if name in _bound([one]):
            return one
    return None


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, including those inside of `if` and `try`."""
    for one in body:
        yield one
        if isinstance(one, (ast.If, ast.Try)):
            more = [*one.body, *one.orelse, *(s for h in getattr(one, "handlers", ()) for s in h.body)]
            yield from _flat(more)


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    for one in _flat(body):
        if isinstance(one, _DEFINING):
            yield one.name
        elif isinstance(one, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.split(".")[0] for alias in one.names)
        elif isinstance(one, (ast.Assign, ast.AnnAssign)):
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            yield from (t.id for t in targets if isinstance(t, ast.Name))


def parameters(function: ast.AST) -> tuple[list[str], set[str]]:
    """The names of a function's parameters in order, without self, and of those that have a default.

    Raises:
        TypeError: it is not a function.
    """
    if not isinstance(function, Function):
        raise TypeError("it is not a function")
    args = function.args
    names = [one.arg for one in (*args.posonlyargs, *args.args)]
    optional = set(names[len(names) - len(args.defaults) :] if args.defaults else [])
    optional |= {a.arg for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d is not None}
    names += [one.arg for one in args.kwonlyargs]
    return (names[1:] if names[:1] in (["self"], ["cls"]) else names), optional


def members(cls: ast.AST) -> set[str]:
    """The names that a class defines, and that its methods set on self.

    Raises:
        TypeError: it is not a class.
    """
    if not isinstance(cls, ast.ClassDef):
        raise TypeError("it is not a class")
    stored = (n for n in ast.walk(cls) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return set(_bound(cls.body)) | {n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self"}


def words(node: ast.AST) -> set[str]:
    """Every name in a piece of source: variables, attributes, definitions, keywords, and strings."""
    names: set[str] = set()
    for one in ast.walk(node):
        for field in ("id", "attr", "arg", "name"):
            if isinstance(word := getattr(one, field, None), str):
                names.add(word)
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            names.add(one.value)
    return names


def calls(node: ast.AST) -> dict[str, set[str]]:
    """The functions `f` and methods `.f` that a piece of source calls, and the keywords of these calls."""
    found: dict[str, set[str]] = {}
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and isinstance(one.func, (ast.Name, ast.Attribute)):
            name = one.func.id if isinstance(one.func, ast.Name) else f".{one.func.attr}"
            found.setdefault(name, set()).update(k.arg for k in one.keywords if k.arg is not None)
    return found


# keywords that stock may pass to a function that we replace: our replacement would silently ignore any other
ARGUMENTS = {
    "causal_conv1d_fn": "x weight bias activation seq_idx",
    **dict.fromkeys(
        ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
        "g beta initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens",
    ),
    **dict.fromkeys(
        ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
        "g beta initial_state output_final_state use_qk_l2norm_in_kernel",
    ),
    "mamba2_chunk_scan": "chunk_size D z return_final_states dt_bias dt_softplus initial_states dt_limit",
    "mamba2_selective_state_update": "z dt_bias dt_softplus",
}


def _missing(names: str, found: Collection[str]) -> list[str]:
    return [each.replace("|", " or ") for each in names.split() if not set(each.split("|")) & set(found)]


def _knows(node: ast.AST, names: str, file: Module) -> str:
    found, _ = parameters(node)
    missing = _missing(names, found)
    return f"it has no parameter {', '.join(missing)}; it has {', '.join(found) or 'none'}" if missing else ""


def _takes(node: ast.AST, names: str, file: Module) -> str:
    found, optional = parameters(node)
    expected = {one for each in names.split() for one in each.split("|")}
    more = [each for each in found if each not in expected | optional]
    return _knows(node, names, file) or (f"it also requires {', '.join(more)}" if more else "")


def _order(node: ast.AST, names: str, file: Module) -> str:
    found, wanted = parameters(node)[0], names.split()
    first = found[: len(wanted)]
    if len(first) < len(wanted) or any(one not in each.split("|") for one, each in zip(first, wanted, strict=True)):
        expected = ", ".join(wanted).replace("|", " or ")
        return f"its parameters are {', '.join(found) or 'none'}; expected {expected} first"
    return _takes(node, names, file)


def _holds(node: ast.AST, names: str, file: Module) -> str:
    missing = _missing(names, members(node))
    return f"it has no {', '.join(missing)}" if missing else ""


def _says(node: ast.AST, names: str, file: Module) -> str:
    missing = _missing(names, words(node))
    return f"its source does not contain {', '.join(missing)}" if missing else ""


def _calls(node: ast.AST, names: str, file: Module) -> str:
    found = calls(node)
    missing = _missing(names, found)
    unbound = [name for name in names.split() if not name.startswith(".") and name not in file.bound]
    both = [name for name in names.split() if name in ARGUMENTS and name in found]
    more = {name: found[name] - set(ARGUMENTS[name].split()) for name in both}
    unknown = [f"{name}({word}=)" for name, words in more.items() for word in sorted(words)]
    if missing:
        return f"it does not call {', '.join(missing)}"
    if unbound:
        return f"its file does not bind {', '.join(unbound)}"
    return f"it calls {', '.join(unknown)}, with an unknown argument" if unknown else ""


def _line(node: ast.AST, piece: str, file: Module) -> str:
    return "" if piece in " ".join(ast.unparse(node).split()) else f"its source has no `{piece}`"


CHECKS: dict[str, Callable[[ast.AST, str, Module], str]] = {
    "is": lambda node, names, file: "",
    "knows": _knows,
    "takes": _takes,
    "order": _order,
    "holds": _holds,
    "says": _says,
    "calls": _calls,
    "line": _line,
}
