"""A diffusers pipeline that draws token by token, accelerated without changing the picture.

python examples/draw_pipeline.py [PROMPT] [FILE]
"""

import sys

import diffusers
import torch
import transformers

import mmspec
from mmspec import zoo

prompt = sys.argv[1] if len(sys.argv) > 1 else "a small red striped circle left of a large blue square"
file = sys.argv[2] if len(sys.argv) > 2 else "picture.png"

for library in (diffusers, transformers):
    library.logging.disable_progress_bar()  # of loading weights
pipe = mmspec.LlamaGenPipeline.from_pretrained(zoo.path("scenes-llamagen"))
pipe.set_progress_bar_config(disable=True)
plain = pipe(prompt, generator=torch.Generator().manual_seed(0))

# reproducible=True: the very picture of this seed. Without it the picture is another one drawn from the same
# distribution.
with mmspec.enable(pipe, drafter="jacobi", window=16, reproducible=True):
    fast = pipe(prompt, generator=torch.Generator().manual_seed(0))

fast.images[0].save(file)
same = bool((fast.tokens == plain.tokens).all())
print(
    f"{file}: {fast.stats.rounds + 1} forwards of the model instead of {plain.stats.rounds + 1}; same picture: {same}"
)
