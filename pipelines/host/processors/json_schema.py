"""JSON schemas as grammars of llguidance, checked without a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an optional dependency
    from llguidance import LLTokenizer


def grammar_of(schema: dict[str, object] | str, tokenizer: LLTokenizer | None = None) -> str:
    """The grammar, in llguidance's form, of JSON that matches a schema and has no white space between its parts.

    Args:
        schema: JSON Schema.
        tokenizer: llguidance's; None: the grammar is checked for any.

    Raises:
        ImportError: llguidance is not installed.
        ValueError: an invalid schema, or one that llguidance does not support.
    """
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise ImportError("grammars need llguidance: pip install llguidance (the extra json of mmspec)") from error
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
    except (TypeError, ValueError) as error:
        raise ValueError(f"the JSON schema cannot be read: {error}") from error
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
    if wrong:
        raise ValueError(f"the JSON schema is not supported: {'; '.join(messages)}")
    return grammar
