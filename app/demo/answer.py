"""A question from the page, and an answer as it was generated: its tokens, where each came from, and when."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from PIL import Image

from mmspec.app.demo.desk import MAX_SEED, RefusedError, within
from mmspec.app.demo.race import RaceSide, RaceView
from mmspec.pipelines.prompts import Turns
from mmspec.pipelines.serving.stream import Step

MAX_PROMPT = 2000  # characters
MAX_NEW_TOKENS = 512
SHAPE = {"depth": 16, "width": 12, "size": 96}  # maximum shape of a draft
MAX_FRAMES = 16
MAX_TURNS = 8  # maximum turns of a conversation
PICTURE, VIDEO = "image", "video"  # the names in app/media/items.py
NOUNS = {PICTURE: "picture", VIDEO: "video"}
PLAIN, DRAFTED, CORRECTED, OWN = "plain", "drafted", "corrected", "own"


@dataclass(frozen=True)
class Ask:
    """A question and its settings, as received from the page."""

    kind: str  # which of the next two is used
    image: str | None
    video: str | None
    prompt: str
    drafter: str = "ngram"
    depth: int = 0  # of a draft, like width and size; 0: the drafter's default
    width: int = 0
    size: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    reproducible: bool = True  # when sampling: exactly the tokens that stock generate draws with this seed
    max_new_tokens: int = 128
    frames: int = 8  # of a video
    compile: bool = False
    auto: bool = False
    before: Turns = ()  # earlier turns of the conversation

    def check(self) -> None:
        """Raise RefusedError for invalid settings, since the page's own limits can be bypassed."""
        if self.kind not in NOUNS:
            raise RefusedError(f"A question is about one of {', '.join(NOUNS)}; got {self.kind!r}.")
        if len(self.before) >= MAX_TURNS:
            raise RefusedError(f"A conversation has at most {MAX_TURNS} turns. Press Run to start a new one.")
        if not self.media:
            raise RefusedError(f"There is no {self.noun}. Upload one or choose an example.")
        if not self.prompt.strip():
            raise RefusedError(f"The prompt is empty. Write what to ask about the {self.noun}.")
        if len(self.prompt) > MAX_PROMPT:
            raise RefusedError(f"The prompt has {len(self.prompt)} characters; {MAX_PROMPT} are allowed. Shorten it.")
        within(self, {
            **{name: (0, most) for name, most in SHAPE.items()}, "temperature": (0, 2), "top_p": (0.01, 1),
            "seed": (0, MAX_SEED), "max_new_tokens": (1, MAX_NEW_TOKENS), "frames": (1, MAX_FRAMES),
        })  # fmt: skip

    @property
    def noun(self) -> str:
        return NOUNS[self.kind]

    @property
    def media(self) -> str | None:
        return self.video if self.kind == VIDEO else self.image

    @property
    def comparable(self) -> bool:
        """Whether both answers must be the same, token by token."""
        return self.temperature == 0 or self.reproducible

    @property
    def options(self) -> dict[str, object]:
        """The options for `enable`; a full shape is limited to the number of nodes that depth and width allow."""
        shape: dict[str, object] = {name: getattr(self, name) for name in SHAPE if getattr(self, name)}
        if len(shape) == len(SHAPE):
            most = 1 + self.width + (self.depth - 1) * self.width**2
            shape["size"] = max(min(self.size, most), self.depth + 1)
        flags = {"compile": self.compile, "auto": self.auto}
        return shape | flags | {"reproducible": self.temperature > 0 and self.reproducible}

    @property
    def settings(self) -> dict[str, object]:
        warmth: dict[str, object] = {"do_sample": False}
        if self.temperature > 0:
            warmth = {"do_sample": True, "temperature": float(self.temperature), "top_p": float(self.top_p)}
        return {"max_new_tokens": self.max_new_tokens, "num_beams": 1, **warmth}


@dataclass
class Token:
    """A token of an answer: its text, its origin, and the number of tokens of its forward if it is their first."""

    id: int
    kind: str
    begins: int = 0
    text: str = ""


@dataclass
class ShownAnswer(RaceSide):
    accelerated: bool = False
    tokens: list[Token] = field(default_factory=list)
    accepted: int = 0
    vision: float = 0.0  # seconds of the prefill in the vision tower; 0 if unknown
    prefill: float = 0.0
    cut: bool = False  # whether it was cut off at the maximum number of tokens

    def take(self, step: Step) -> None:
        """Record a step; the texts of its tokens are filled in later."""
        self.seconds = step.seconds
        if not step.tokens:
            self.prefill = step.seconds
            return
        if self.tokens:
            self.accepted += step.accepted
        own = PLAIN if not self.accelerated else CORRECTED if step.corrected else OWN
        new = [Token(token, DRAFTED if n < step.accepted else own) for n, token in enumerate(step.tokens)]
        new[0].begins = len(new)
        self.calls.append(len(new))
        self.tokens += new
        self.at += [step.seconds] * len(new)

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def rounds(self) -> int:
        """Forwards after the prefill."""
        return len(self.calls[1:])

    @property
    def accepted_draft_tokens_per_call(self) -> float:
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_target_call(self) -> float:
        return 1.0 + self.accepted_draft_tokens_per_call if self.rounds else 0.0


@dataclass(frozen=True)
class ChatTurn(RaceView[ShownAnswer]):
    ask: Ask
    prepared: float  # seconds to convert media and prompt to model inputs, once for both
    frames: tuple[Image.Image, ...] = ()  # the frames that the model sees, for a video
    difference: tuple[int, float | None] | None = None  # first different token; logit gap there

    @property
    def compared(self) -> int:
        """Tokens that both answers have."""
        return min(len(self.plain.tokens), len(self.fast.tokens))

    def speed_up(self, after: int = 0) -> float | None:
        """Time of the plain answer divided by that of the accelerated one, for the same number of tokens.

        after=1 leaves out the time to the first token.
        """
        n = self.compared
        if n <= after:
            return None
        plain, fast = (a.at[n - 1] - (a.first if after else 0.0) for a in (self.plain, self.fast))
        return plain / fast if fast > 0 else None


def cut(tokens: Sequence[Token], decode: Callable[[list[int]], str]) -> None:
    """Assign each token its piece of the text, such that the joined pieces are the decoded text of all tokens."""
    ids = [token.id for token in tokens]
    whole, done = decode(ids), 0
    for n, token in enumerate(tokens, 1):  # an incomplete character differs from the whole text
        end = len(whole) if n == len(ids) else len(os.path.commonprefix([decode(ids[:n]), whole]))  # noqa: RUF071
        token.text, done = whole[done : max(done, end)], max(done, end)
