"""Tells griffe, which reads the sources for the reference, where the parts of mmspec lie."""

from __future__ import annotations

import ast
from typing import Any

import griffe

import mmspec

FOLDERS = ("kernels", "pipelines", "app")  # beside mmspec/ in a checkout, below it as modules


class Face(griffe.Extension):
    """Puts the folders below the package, the names of its lazy face into it, and comments where they say a shape."""

    def on_attribute_instance(self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, **_: Any) -> None:
        """`tokens: Tensor  # [B, N], what is proposed` says it all; the reference then says it, too."""
        if attr.docstring is None and isinstance(node, ast.AnnAssign) and node.end_lineno == node.lineno and attr.lines:
            _, hash_, comment = attr.lines[-1].partition("  # ")
            if hash_ and not comment.startswith("type:"):
                attr.docstring = griffe.Docstring(comment, lineno=node.lineno, parent=attr)

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        if pkg.path != "mmspec":
            return
        for folder in FOLDERS:
            pkg.set_member(folder, loader.load(folder, try_relative_path=False))
        for name, module in mmspec._FACE.items():
            pkg.set_member(name, griffe.Alias(name, f"{module}.{name}"))
