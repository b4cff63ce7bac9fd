"""Prompts for `real.py`: chats, and texts whose answers repeat parts of the prompt."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import NamedTuple


class RealPrompt(NamedTuple):
    """A prompt; with `chat` it is a user's turn, otherwise the beginning of a text to continue."""

    text: str
    chat: bool = True


_QUESTIONS = (
    "Why is the sky blue?",
    "Give me three tips for learning a new language.",
    "Explain recursion to a ten-year-old.",
    "What should I see in Rome in two days?",
    "Write a short poem about the sea.",
    "How do I make a good cup of coffee?",
    "Who was Ada Lovelace, and what is she known for?",
    "What are the pros and cons of working from home?",
    "How does a bicycle stay upright?",
    "Write an e-mail that asks my landlord to mend the heating.",
    "What is the capital of Australia, and why is it not Sydney?",
    "Tell me a story about a lost key.",
)
_MORE_QUESTIONS = (  # for calls of several rows
    "Why do we have seasons?",
    "How is glass made?",
    "What is the best way to clean a window?",
    "Explain what a compiler does.",
    "What happened at the Boston Tea Party?",
    "Write a limerick about a lazy frog.",
    "How do whales breathe?",
    "What is the difference between a debit card and a loan?",
    "Give me five names for a bakery.",
    "How long does it take to boil an egg?",
    "What causes tides?",
    "Write a thank-you note to a nurse.",
    "Who wrote Don Quixote, and what is it about?",
    "What should I pack for a week in Iceland?",
    "Explain the rules of tennis.",
    "How do magnets attract each other?",
    "What is a healthy breakfast?",
    "Tell me a joke about penguins.",
    "Why did the Roman Empire fall?",
    "How can I stop biting my nails?",
    "What does a lawyer do all day?",
    "Describe the taste of a mango.",
    "What is blockchain?",
    "Write a slogan for a shop that repairs shoes.",
    "How do airplanes fly?",
    "What is the longest river of Africa, and where does it end?",
    "How do I apologize to a friend?",
    "What are the stages of a butterfly's life?",
    "Explain opportunity cost with an example.",
    "Which instruments are in a string quartet?",
    "What can I do on a rainy Sunday with children?",
    "How does a microwave oven heat food?",
    "What is the meaning of the word serendipity?",
    "Write a dialogue between a baker and a thief.",
    "How old is the universe, and how do we know?",
    "What makes a good leader?",
)

_PASSAGES = (
    """The town council of Harwick Bay met on Tuesday to discuss the repair of the old lighthouse. The old lighthouse,
    built in 1871, has been closed to visitors since a storm damaged its staircase. The council voted to spend 240,000
    pounds on the repair of the staircase and of the lamp room. Work will begin in March, and the old lighthouse will
    open to visitors again in September.""",
    """Dr. Elena Marquez and her team at the University of Porto studied 412 honeybee colonies over five years. They
    found that colonies near wildflower meadows survived the winter more often than colonies near fields of maize. Of
    the colonies near wildflower meadows, 91 percent survived; of the colonies near fields of maize, 68 percent. Dr.
    Marquez said that farmers could help by leaving a strip of wildflower meadow beside each field.""",
)


def _record(number: int) -> str:
    place = ("Berlin", "Madrid", "Oslo", "Rome", "Paris", "Vienna")[number % 6]
    return (
        f'  {{"id": {number}, "name": "sensor-{number}", "location": "{place}", "status": "active", '
        f'"unit": "celsius", "interval_seconds": 60, "tags": ["indoor", "temperature"]}}'
    )


def _json(first: int, count: int) -> RealPrompt:
    """A list of JSON records to continue."""
    return RealPrompt("[\n" + ",\n".join(_record(first + i) for i in range(count)) + ",\n", chat=False)


def _edit(function: Callable[..., object], what: str) -> RealPrompt:
    source = textwrap.dedent(inspect.getsource(function)).strip()
    return RealPrompt(f"{what} Answer with the whole function and nothing else.\n\n```python\n{source}\n```")


def _copy(passage: str) -> RealPrompt:
    text = " ".join(passage.split())
    return RealPrompt(f"Correct the spelling mistakes in this text, and repeat the whole of it:\n\n{text}")


def _summary(passage: str) -> RealPrompt:
    return RealPrompt(f"Summarize this text in its own words and phrases:\n\n{' '.join(passage.split())}")


def _tests(count: int) -> RealPrompt:
    """A file of tests to continue."""
    tests = (f"def test_add_{n}():\n    assert add({n}, {n + 1}) == {2 * n + 1}\n\n\n" for n in range(count))
    return RealPrompt("".join(tests), chat=False)


def repeating() -> list[RealPrompt]:
    """Summaries, corrections, edits of functions of the standard library, and JSON and tables to continue."""
    rename = "Add type annotations to this function."
    comment = "Add a comment to this function."
    return [
        _json(1, 5),
        _copy(_PASSAGES[0]),
        _edit(textwrap.shorten, comment),
        _summary(_PASSAGES[0]),
        _edit(inspect.cleandoc, rename),
        _copy(_PASSAGES[1]),
        _json(12, 4),
        _summary(_PASSAGES[1]),
        _edit(textwrap.indent, rename),
        _edit(inspect.getmodulename, comment),
        _tests(4),
        RealPrompt("".join(f"| {n} | {n * n} | {n**3} |\n" for n in range(1, 9)), False),
    ]


def chats() -> list[RealPrompt]:
    """Questions, whose answers repeat little."""
    return [RealPrompt(text) for text in _QUESTIONS + _MORE_QUESTIONS]


# Padded to the longest one, so that one static cache fits all.
WARM_UP = RealPrompt(inspect.getsource(textwrap.TextWrapper._handle_long_word), chat=False)
KINDS: dict[str, Callable[[], list[RealPrompt]]] = {"chats": chats, "repeating": repeating}
