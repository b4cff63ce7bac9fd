"""Speculative decoding in one sitting: prefill, propose, score, accept, commit, with the functions that `enable` uses.

python examples/loop.py
"""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, logging

import mmspec
from mmspec import zoo
from mmspec.accept import along_path
from mmspec.loop import start
from mmspec.pipelines.host.call import Call
from mmspec.pipelines.host.processors.table import Processors
from mmspec.pipelines.target.model import Request
from mmspec.pipelines.target.vlm import VlmTarget
from mmspec.session import Row

ROUNDS = 4
logging.disable_progress_bar()  # of loading weights
processor = AutoProcessor.from_pretrained(zoo.path("scenes-video"))
model = AutoModelForImageTextToText.from_pretrained(zoo.path("scenes-video"), dtype="float32")
handle = mmspec.enable(model, drafter=zoo.path("scenes-video-eagle"))  # taps the layers that the drafter reads


@torch.no_grad()
def decode(model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
           synced_gpus: bool = False, streamer: Any = None, **arguments: Any) -> torch.Tensor:  # fmt: skip
    """What `generate` calls in the place of its own loop, once all its arguments are prepared."""
    call = Call(input_ids, logits_processor, stopping_criteria, generation_config, arguments=arguments)
    greedy, drafter = not generation_config.do_sample, handle.drafter
    request = Request(Processors(call.processors), sample=not greedy)  # how logits become a distribution
    prompt = input_ids[0].tolist()
    row = Row(list(prompt), len(prompt), limit=call.endings.limit, seed=0, eos=call.endings.eos, request=request)
    target = VlmTarget(model, drafter.features)  # a view of the model: forwards, embeddings, head

    # Prefill: the target reads the prompt into its KV cache, the first token is drawn, the drafter reads the features.
    session, _ = start(target, drafter, [row], call)
    print("greedy:" if greedy else "sampled:", repr(processor.decode(row.tokens[len(prompt) :])), "after the prefill")

    for _ in range(ROUNDS):
        if row.done:
            break
        # Propose: a tree (here a chain) of draft tokens [1, N] below the pending token, from the drafter's distribution
        # q. A drafter that takes its likeliest tokens, as this one does, has a point mass for q.
        draft = drafter.propose(session, target)

        # Score: one forward of the target over all N nodes under a tree attention mask gives p after every node.
        scores = target.score(session, draft)

        # Accept: down the tree, child by child. Greedy, a token is accepted if it is the argmax. Sampled, it is
        # accepted with probability min(1, p/q); on rejection the residual max(p - q, 0), normalised, replaces p.
        noise = session.noise(draft, scores.p)  # uniform numbers, one per node; None if p is a point mass
        acceptance = along_path(draft, scores.p, session.rule, noise)

        # Commit: accepted tokens and the bonus token join the text; the KV cache drops the rejected nodes.
        round_ = session.commit(draft, scores, acceptance)
        target.commit(session, round_)
        print(f"  {round_.counts[0] - 1} of {round_.proposed[0]} accepted:", repr(processor.decode(round_.new[0])))
    return torch.tensor([row.tokens])


if __name__ == "__main__":
    content = [{"type": "image", "image": Image.open(zoo.samples() / "scene-01.png")},
               {"type": "text", "text": "Describe this image."}]  # fmt: skip
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True,
        return_dict=True, return_tensors="pt",
    )  # fmt: skip
    ours = model.generate(**inputs, custom_generate=decode, do_sample=False, max_new_tokens=64)
    model.generate(**inputs, custom_generate=decode, do_sample=True, temperature=3.0, max_new_tokens=64)
    handle.disable()
    stock = model.generate(**inputs, do_sample=False, max_new_tokens=64)
    print("greedy text is stock generate's:", torch.equal(ours, stock[:, : ours.shape[1]]))
