"""Compiles a piece with inductor, the back end of torch.compile."""

from __future__ import annotations

import re
import time
import warnings
from pathlib import Path

from torch import Tensor, fx

from mmspec.compile.recording import Function

_LIBRARIES = 32  # the most libraries of one piece that are built again
_WRITTEN = 3.0  # seconds within which a library is written, once its file is there


def inductor(piece: fx.GraphModule, examples: list[Tensor]) -> Function:
    """Compile a graph with torch.compile's back end; it needs no guards, since its shapes never change."""
    import torch._inductor as backend

    options = {
        "triton.cudagraphs": False,  # mmspec records its own
        "cpp.min_chunk_size": 4096,  # numbers per thread: the short loops of a few nodes are not worth a second thread
        "size_asserts": False,  # the shapes are those of the trace; checking them takes as long as a small operation
        "alignment_asserts": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # remarks on speed: float32 without TF32, an online softmax
        for _ in range(_LIBRARIES):
            try:
                return backend.compile(piece, list(examples), options)
            except Exception as error:
                if not _removed(error):
                    raise
        return backend.compile(piece, list(examples), options)


def _removed(error: Exception) -> bool:
    """Whether a library in torch's cache could not be loaded, since a process was killed before it wrote the file. The
    empty file is removed: torch itself would try to load it for ever."""
    found = re.search(r"(/\S+\.so): file too short", str(error))
    if found is None:
        return False
    library = Path(found[1])
    time.sleep(_WRITTEN)  # another process may be writing it now
    if library.exists() and library.stat().st_size:
        return False
    library.unlink(missing_ok=True)
    return True
