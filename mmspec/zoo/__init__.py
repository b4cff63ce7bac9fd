"""The embedded models and sample pictures that come with the package; `benchmarks/zoo` trains and draws them."""

from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).resolve().parent
_SIGNS = ("config.json", "model_index.json")  # of a model, of a pipeline
PROMPTS = {"short": "Describe this image.", "long": "Describe this image in detail."}  # that the models know


class EmbeddedDrafter(NamedTuple):
    """For which embedded model a drafter was trained, and by which method it drafts."""

    target: str
    method: str


_METHODS = ("eagle", "msd", "vispec", "flash", "specvlm", "block")
DRAFTERS = {"scenes-llamagen-heads": EmbeddedDrafter("scenes-llamagen", "heads")}
DRAFTERS |= {f"scenes-video-{method}": EmbeddedDrafter("scenes-video", method) for method in _METHODS}


def weights() -> Path:
    """Folder that holds one folder per embedded model."""
    return _HERE / "weights"


def path(name: str) -> Path:
    """Folder of an embedded model, ready for `from_pretrained`; FileNotFoundError naming those there are."""
    folder = weights() / name
    if not any((folder / name).is_file() for name in _SIGNS):
        known = sorted(p.parent.name for name in _SIGNS for p in weights().glob(f"*/{name}"))
        raise FileNotFoundError(
            f"no embedded model {name!r}; choose from {', '.join(known) or '(none is installed)'}, "
            f"or train it in a clone of mmspec with `make zoo ARGS={name}`"
        )
    return folder


def samples() -> Path:
    """Folder of the sample pictures: drawn scenes that no embedded model has seen."""
    return _HERE / "samples"
