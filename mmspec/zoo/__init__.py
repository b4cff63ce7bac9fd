"""The embedded models and sample pictures that come with the package; `benchmarks/zoo` trains and draws them."""

from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).resolve().parent
_SIGNS = ("config.json", "model_index.json")  # files that identify a model, a pipeline
PROMPTS = {"short": "Describe this image.", "long": "Describe this image in detail."}  # that the models were trained on


class EmbeddedDrafter(NamedTuple):
    """The embedded model that a drafter was trained for, and its method."""

    target: str
    method: str


_METHODS = ("eagle", "msd", "vispec", "flash", "specvlm", "block")
DRAFTERS = {"scenes-llamagen-heads": EmbeddedDrafter("scenes-llamagen", "heads")}
DRAFTERS |= {f"scenes-video-{method}": EmbeddedDrafter("scenes-video", method) for method in _METHODS}


def weights() -> Path:
    """The folder with one subfolder per embedded model."""
    return _HERE / "weights"


def path(name: str) -> Path:
    """The folder of an embedded model, for `from_pretrained`; a FileNotFoundError lists the available models."""
    folder = weights() / name
    if not any((folder / name).is_file() for name in _SIGNS):
        names = sorted(p.parent.name for name in _SIGNS for p in weights().glob(f"*/{name}"))
        raise FileNotFoundError(
            f"no embedded model {name!r}; choose from {', '.join(names) or '(none is installed)'}, "
            f"or train it in a clone of mmspec with `make zoo ARGS={name}`"
        )
    return folder


def samples() -> Path:
    """The folder of the sample pictures: drawn scenes that no embedded model was trained on."""
    return _HERE / "samples"
