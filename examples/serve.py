"""A server that streams captions as server-sent events, while they are being written; all clients share one batch.

python examples/serve.py
curl -N -F image=@photo.png -F prompt="Describe this image." localhost:8000/caption
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Form, HTTPException, UploadFile
from fastapi.responses import StreamingResponse
from transformers import AutoModelForImageTextToText, AutoProcessor, logging

import mmspec
from mmspec import media, zoo
from mmspec.pipelines.serving.async_batcher import AsyncBatcher
from mmspec.pipelines.serving.continuous import ContinuousBatcher

logging.disable_progress_bar()  # of loading weights
processor = AutoProcessor.from_pretrained(zoo.path("scenes-video"))
model = AutoModelForImageTextToText.from_pretrained(zoo.path("scenes-video"), dtype="float32")
mmspec.enable(model, drafter=zoo.path("scenes-video-eagle"))
batcher = AsyncBatcher(ContinuousBatcher(model, processor, rows=8, do_sample=False), processor)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    with batcher:  # its thread runs the model
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/caption")
def caption(
    image: UploadFile, prompt: str = Form("Describe this image."), max_new_tokens: int = Form(96, ge=1, le=512)
):
    try:
        picture = media.decode(image.file.read(), image.filename or "image")
    except media.MediaError as error:
        raise HTTPException(422, str(error)) from error
    content = [{"type": "image", "image": picture}, {"type": "text", "text": prompt}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True,
        return_dict=True, return_tensors="pt",
    )  # fmt: skip
    return StreamingResponse(events(inputs, max_new_tokens), media_type="text/event-stream")


async def events(inputs, max_new_tokens: int) -> AsyncIterator[str]:
    """One event for each forward of the model; the row is free again when the client goes away."""
    async for part in batcher.stream(inputs, max_new_tokens=max_new_tokens):
        event = {"text": part.text, "tokens": part.tokens, "accepted": part.stats.accepted}
        yield f"data: {json.dumps(event)}\n\n"
    yield "event: done\ndata: {}\n\n"


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=8000)
