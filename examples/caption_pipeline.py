"""A transformers pipeline, accelerated by one line; the embedded model makes it run offline.

python examples/caption_pipeline.py [PICTURE ...]
"""

import sys

from PIL import Image
from transformers import logging, pipeline

import mmspec
from mmspec import zoo

pictures = sys.argv[1:] or [str(zoo.samples() / "scene-01.png"), str(zoo.samples() / "scene-02.png")]

logging.disable_progress_bar()  # of loading weights
pipe = pipeline("image-text-to-text", model=str(zoo.path("scenes-video")), device="cpu")
mmspec.enable(pipe, drafter=zoo.path("scenes-video-eagle"))  # the one line; no drafter for your model? leave it out

for picture in pictures:
    content = [{"type": "image", "image": Image.open(picture)}, {"type": "text", "text": "Describe this image."}]
    answer = pipe(text=[{"role": "user", "content": content}], max_new_tokens=96, return_full_text=False)
    print(answer[0]["generated_text"])

print(mmspec.stats(pipe))  # rounds, tokens per target call, acceptance by depth, where the time went
