"""Loads an image model from the user's own Python file, for models that mmspec does not know how to call."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from mmspec.app.devices import EngineError, find_device, find_dtype, first_line
from mmspec.pipelines.families.table import unwrap
from mmspec.pipelines.host import image_models
from mmspec.pipelines.host.image_models import ImageModel

OWN_FILE = (
    "name a Python file with `load(device, dtype)`, which returns what mmspec.enable takes, and `draw(model, prompts, "
    "**settings)`, which returns a picture for each prompt"
)


def of_file(path: Path, device: str, dtype: str) -> ImageModel:
    """The model that the file's `load` returns, called by its `draw`.

    Raises EngineError: there is no such file, it fails, or it lacks `load` or `draw`.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise EngineError(f"no file {str(path)!r}; {OWN_FILE}")
    module, place = importlib.util.module_from_spec(spec), find_device(device)
    try:
        spec.loader.exec_module(module)
        target = module.load(place, find_dtype(dtype, place))
        draw = module.draw
    except Exception as error:  # in the user's code
        raise EngineError(f"cannot load {str(path)!r} ({first_line(error)}); {OWN_FILE}") from error
    about = f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()[:10]}"

    def drawn(prompts: Sequence[str], **settings: object) -> Sequence[Image.Image]:
        try:
            return draw(target, prompts, **settings)  # type: ignore[no-any-return]
        except Exception as error:  # in the user's code
            raise EngineError(f"{str(path)!r} cannot draw: {first_line(error)}") from error

    return ImageModel(target, drawn, image_models.codes_of(unwrap(target)), about)
