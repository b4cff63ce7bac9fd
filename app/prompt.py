"""What a model is asked about one item, and the caption that its answer gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptChoice:
    """What the model is asked about one item, with all variables filled in."""

    text: str
    system: str = ""
    start: str = ""  # the model's answer is made to begin with this
    prepend: str = ""  # these two are set around the answer afterwards, unseen by the model
    append: str = ""
    further: tuple[str, ...] = ()  # what is asked about the same item, too

    @property
    def texts(self) -> tuple[str, ...]:
        return self.text, *self.further

    def caption(self, answer: str) -> str:
        """The caption that a model's answer gives; `start` is put before it unless it is there already."""
        answer = answer.strip()
        if not answer.startswith(self.start.strip()):
            answer = _joined(self.start.strip(), answer)
        return f"{self.prepend}{answer}{self.append}"


def _joined(start: str, answer: str) -> str:
    """Both with a space between, but none before punctuation that goes on with the last word."""
    return f"{start}{answer}" if not start or not answer or answer[0] in ",.;:!?'’)" else f"{start} {answer}"
