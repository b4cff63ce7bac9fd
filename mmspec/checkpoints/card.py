"""The model card of a drafter: the README.md that the hub shows."""

from __future__ import annotations

import json
import re

from mmspec.checkpoints.layouts import layout_named
from mmspec.drafters.heads import HeadsConfig
from mmspec.drafters.trained import TrainedConfig

_CARD = """---
{base}library_name: mmspec
tags:
- speculative-decoding
- {method}
---

# {method} drafter for {target}

Drafts tokens for {target}{revision}; the target decides, so the output is what the target alone would generate.

```python
import mmspec

mmspec.enable(model, drafter="this folder or repository")
model.generate(...)  # as before
```

{drafts}

Layout of the files: {layout}. {shapes}
"""


_TREE = """| depth | width | size |
|---|---|---|
| {c.depth} | {c.width} | {c.size} |

These are the recommended depth (longest drafted path), width (branches per node) and size (nodes sent to the target at
once): the defaults of `enable`."""
_WINDOW = "It recommends a window of {c.window} positions, the default of `enable`."


def card(name: str, method: str, c: TrainedConfig | HeadsConfig) -> str:
    """README.md of a drafter in a layout."""
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", c.target) is not None and not c.target.startswith(".")
    rows = getattr(c, "draft_vocab", 0) or "no"
    return _CARD.format(
        base=f"base_model: {json.dumps(c.target)}\n" if on_hub else "",
        method=method,
        target=c.target or "a target that was not recorded",
        revision=f" (revision {c.target_revision})" if c.target_revision else "",
        layout=f"{name} ({layout_named(name).about})",
        shapes=f"Hidden size {c.hidden}, vocabulary {c.vocab}, {rows} rows of an own output head.",
        drafts=_WINDOW.format(c=c) if isinstance(c, HeadsConfig) else _TREE.format(c=c.shape),
    )
