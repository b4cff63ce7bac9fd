"""What stands in a package's source files, read by `ast` without importing it: definitions, parameters, calls.

Of a file only the top-level statement that is looked at is parsed, which keeps the whole contract under a second.
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
_BEGIN = re.compile(r"^(?=[A-Za-z_@])(?!else\b|elif\b|except\b|finally\b)", re.MULTILINE)  # of a top-level statement
_NAMED = re.compile(r"^(?:async def|def|class)\s+(\w+)|^(\w+)\s*[:=]", re.MULTILINE)


@cache
def package(name: str, where: Path | None = None) -> Path | None:
    """The folder of an installed package, or of one in the folder `where`; None: it is not there."""
    if where is not None:
        return where / name if (where / name).is_dir() else None
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


@cache
def version(name: str, where: Path | None = None) -> str:
    """What `__version__` says in a package's own file; "" where it says nothing."""
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
        """The file's top-level statements, decorators apart from what they decorate."""
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
        """Names that the file defines or imports at its top level, conditions included."""
        others = "".join(part for part in self._parts if part.startswith(("import ", "from ", "if ", "try:")))
        try:
            return set(self._by_name) | set(_bound(ast.parse(others).body))
        except SyntaxError:
            return set(_bound(self.whole.body))

    @cache  # noqa: B019 as long as the module, which is kept
    def find(self, name: str) -> ast.AST | None:
        """The statement that defines a name: a class, a function, an assignment; an import counts as one."""
        try:
            body: list[ast.stmt] = ast.parse(self._by_name.get(name, "")).body
        except SyntaxError:  # text at a line's beginning within the statement
            body = []
        return _defined(body or self.whole.body, name)


@lru_cache(maxsize=256)
def module(path: Path) -> Module:
    return Module(path)


def look(dotted: str, where: Path | None = None) -> tuple[ast.AST, Module] | str:
    """What a dotted name stands for, with its file; or the first part of it that is not there, as a sentence.

    A part may be `a|b`, either.
    """
    name, *parts = dotted.split(".")
    here = package(name, where)
    if here is None:
        return f"there is no package {name}"
    while parts:
        some = parts[0].split("|")
        inner = next((here / one for one in some if (here / one).is_dir()), None)
        file = next((here / f"{one}.py" for one in some if (here / f"{one}.py").is_file()), None)
        if inner is None and file is None:
            return _inside(module(here / "__init__.py"), parts, f"{here.name}/")
        parts = parts[1:]
        if file is not None:
            return _inside(module(file), parts, file.name)
        assert inner is not None
        here = inner
    return _inside(module(here / "__init__.py"), [], here.name)


def _inside(file: Module, parts: list[str], said: str) -> tuple[ast.AST, Module] | str:
    node: ast.AST | None = None
    for n, part in enumerate(parts):
        body = getattr(node, "body", [])
        some = ((file.find(one) if n == 0 else _defined(body, one)) for one in part.split("|"))
        node = next((one for one in some if one is not None), None)
        if node is None:
            return f"there is no {part.replace('|', ' or ')} in {said}"
        said = part
    return (file.whole if node is None else node), file


def _defined(body: list[ast.stmt], name: str) -> ast.AST | None:
    for one in _flat(body):
        if isinstance(one, _DEFINING) and one.name == name:
            return one
        if name in _bound([one]):
            return one
    return None


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, those under a condition too."""
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
    """The names of a function's parameters in their order, self left out, and of those that have a default.

    Raises:
        TypeError: it is no function.
    """
    if not isinstance(function, Function):
        raise TypeError("it is no function")
    args = function.args
    names = [one.arg for one in (*args.posonlyargs, *args.args)]
    optional = set(names[len(names) - len(args.defaults) :] if args.defaults else [])
    optional |= {a.arg for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d is not None}
    names += [one.arg for one in args.kwonlyargs]
    return (names[1:] if names[:1] in (["self"], ["cls"]) else names), optional


def members(cls: ast.AST) -> set[str]:
    """What a class defines, and what its methods set on self.

    Raises:
        TypeError: it is no class.
    """
    if not isinstance(cls, ast.ClassDef):
        raise TypeError("it is no class")
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
    """What a piece of source calls, `f` or as a method `.f`, and the keywords of these calls."""
    made: dict[str, set[str]] = {}
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and isinstance(one.func, (ast.Name, ast.Attribute)):
            name = one.func.id if isinstance(one.func, ast.Name) else f".{one.func.attr}"
            made.setdefault(name, set()).update(k.arg for k in one.keywords if k.arg is not None)
    return made


# keywords by which stock may call a function that ours stands for: another one would be left out unseen
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


def _lacking(names: str, there: Collection[str]) -> list[str]:
    return [each.replace("|", " or ") for each in names.split() if not set(each.split("|")) & set(there)]


def _knows(node: ast.AST, names: str, file: Module) -> str:
    there, _ = parameters(node)
    lack = _lacking(names, there)
    return f"it has no parameter {', '.join(lack)}; it has {', '.join(there) or 'none'}" if lack else ""


def _takes(node: ast.AST, names: str, file: Module) -> str:
    there, optional = parameters(node)
    known = {one for each in names.split() for one in each.split("|")}
    more = [each for each in there if each not in known | optional]
    return _knows(node, names, file) or (f"it wants {', '.join(more)} besides" if more else "")


def _order(node: ast.AST, names: str, file: Module) -> str:
    there, wanted = parameters(node)[0], names.split()
    first = there[: len(wanted)]
    if len(first) < len(wanted) or any(one not in each.split("|") for one, each in zip(first, wanted, strict=True)):
        expected = ", ".join(wanted).replace("|", " or ")
        return f"its parameters are {', '.join(there) or 'none'}; expected {expected} first"
    return _takes(node, names, file)


def _holds(node: ast.AST, names: str, file: Module) -> str:
    lack = _lacking(names, members(node))
    return f"it has no {', '.join(lack)}" if lack else ""


def _says(node: ast.AST, names: str, file: Module) -> str:
    lack = _lacking(names, words(node))
    return f"its source does not name {', '.join(lack)}" if lack else ""


def _calls(node: ast.AST, names: str, file: Module) -> str:
    made = calls(node)
    lack = _lacking(names, made)
    loose = [name for name in names.split() if not name.startswith(".") and name not in file.bound]
    more = {
        name: made[name] - set(ARGUMENTS[name].split()) for name in names.split() if name in ARGUMENTS and name in made
    }
    strange = [f"{name}({word}=)" for name, words in more.items() for word in sorted(words)]
    if lack:
        return f"it does not call {', '.join(lack)}"
    if loose:
        return f"its file does not bind {', '.join(loose)}"
    return f"it calls {', '.join(strange)}, an argument that is not known" if strange else ""


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
