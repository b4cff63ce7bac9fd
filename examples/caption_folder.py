"""Captions for a folder of pictures, as a library: a row that ends makes room for the next picture at once.

`mmspec caption` does the same, reads much more, and survives a kill.
python examples/caption_folder.py [FOLDER] > captions.jsonl
"""

import json
import sys
from pathlib import Path

from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, logging

import mmspec
from mmspec import zoo
from mmspec.pipelines.serving.continuous import ContinuousBatcher

folder = Path(sys.argv[1]) if len(sys.argv) > 1 else zoo.samples()

logging.disable_progress_bar()  # of loading weights
processor = AutoProcessor.from_pretrained(zoo.path("scenes-video"))
model = AutoModelForImageTextToText.from_pretrained(zoo.path("scenes-video"), dtype="float32")
mmspec.enable(model, drafter=zoo.path("scenes-video-eagle"))


def asked(path: Path):
    """One prompt about one picture."""
    content = [{"type": "image", "image": Image.open(path)}, {"type": "text", "text": "Describe this image."}]
    return processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True,
        return_dict=True, return_tensors="pt",
    )  # fmt: skip


flow = ContinuousBatcher(model, processor, rows=4, max_new_tokens=96, do_sample=False)
waiting = sorted(path for path in folder.iterdir() if path.suffix.lower() in Image.registered_extensions())
count = len(waiting)
while waiting or flow.busy:
    while waiting and flow.free:
        path = waiting.pop(0)
        flow.add(path.name, asked(path))
    for done in flow.step():  # one forward for all rows; some may have ended
        if done.error is not None:
            print(f"{done.ticket}: {done.error}", file=sys.stderr)
            continue
        text = processor.decode(done.tokens, skip_special_tokens=True)
        print(json.dumps({"file_name": done.ticket, "text": text.strip()}), flush=True)

print(f"{count} captions; {flow.stats.tokens_per_target_call:.1f} tokens per target call", file=sys.stderr)
