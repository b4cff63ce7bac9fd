"""Online distillation: the drafter learns the frozen target's features and law along the target's own text."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from mmspec.train.data import Sample, batches, lengths_sorted
from mmspec.train.muon import Muon
from mmspec.train.recipes import EagleRecipe


@dataclass(frozen=True)
class Trace:
    """What the target saw and thought along one batch of right-padded sequences; S streams side by side."""

    ids: Tensor  # [B, T]
    embeds: Tensor  # [B, T, S·H], visual features in their places
    features: Tensor  # [B, T, S·F], what the drafter reads
    final: Tensor  # [B, T, S·H], final hidden states, what the target's head reads
    valid: Tensor  # bool [B, T]
    answered: Tensor  # bool [B, T], the target's own tokens
    start: int = 0  # the drafter's rotary position of row 0; on a grid, behind P rows of prompt, 1 − P


class Teaches(Protocol):
    def answers(self, samples: Sequence[Sample], max_new_tokens: int, temperature: float) -> list[list[int]]: ...

    def trace(self, samples: Sequence[Sample], answers: Sequence[Sequence[int]]) -> Trace: ...

    def head(self, hidden: Tensor) -> Tensor: ...


def losses(drafter: Any, network: Any, teacher: Teaches, trace: Trace, recipe: EagleRecipe) -> tuple[Tensor, Tensor]:
    """The weighted loss of all unrolled steps, and the chance that each step's token is the target's.

    Row j pairs the embedding at j + 1 with the features at j and predicts the feature at j + 1, hence token j + 2.

    Returns:
        The loss (a scalar), and agreement [steps, rows] over the rows that predict the target's own tokens: whether the
        likeliest tokens are the same (bool), or, if the recipe asks for `overlap`, Σ min(p, q).
    """
    features = trace.features[:, :-1]
    if recipe.noise:
        features = features + (torch.rand_like(features) * 2 - 1) * recipe.noise
    outputs = network(trace.embeds[:, 1:], features, trace.valid[:, :-1], recipe.unroll, trace.start)
    wanted = trace.final[:, 1:]
    T = wanted.shape[1]
    # A row counts if the token after the predicted feature is the target's own, for every step alike.
    token_after = F.pad(trace.answered[:, 2:], (0, 1))
    rows = torch.stack([F.pad(token_after[:, i:], (0, i)) for i in range(recipe.unroll)]).all(0)
    total = wanted.new_zeros(())
    agree = []
    for step, predicted in enumerate(outputs):
        ahead = torch.cat([wanted[:, step:], wanted[:, :step]], 1)  # wraps only where `rows` is false
        h, z = ahead[rows], predicted[rows]
        with torch.no_grad():
            p = drafter.to_draft(teacher.head(h).float())
        logits = drafter.logits(z, teacher).float()
        log_q, weights = logits.log_softmax(-1), p.softmax(-1)
        loss = recipe.token_weight * -(weights * log_q).sum(-1).mean()
        if recipe.feature_weight and z.shape == h.shape:
            loss = loss + recipe.feature_weight * F.smooth_l1_loss(z, h)
        total = total + recipe.step_decay**step * loss
        same = logits.argmax(-1) == p.argmax(-1)
        agree.append(torch.minimum(weights, log_q.detach().exp()).sum(-1) if recipe.overlap else same)
    assert recipe.unroll <= T, "a sequence shorter than the unrolled steps"
    return total, torch.stack(agree)


def expected_tokens(agree: Tensor) -> float:
    """τ of a greedy or drawn chain as deep as the unroll, bonus included: 1 + Σ_d P(the first d tokens stand)."""
    return 1.0 + agree.float().cumprod(0).mean(1).sum().item() if agree.numel() else 1.0


def optimizers(network: Any, recipe: EagleRecipe) -> list[torch.optim.Optimizer]:
    """AdamW, with the matrices given to Muon where the recipe says so."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    matrices = [p for p in parameters if recipe.muon and p.ndim == 2]
    others = [p for p in parameters if not (recipe.muon and p.ndim == 2)]
    found: list[torch.optim.Optimizer] = []
    if matrices:
        found.append(Muon(matrices, recipe.lr, recipe.weight_decay))
    if others:
        found.append(torch.optim.AdamW(others, lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay))
    return found


def rate(recipe: EagleRecipe, step: int) -> float:
    """Linear warm-up, then linear decay to 1 %."""
    done = (step + 1) / recipe.steps
    return recipe.lr * min(1.0, done / max(recipe.warmup, 1e-9)) * max(1.0 - done, 0.01)


def quiet(wanted: bool) -> bool | None:
    """tqdm's `disable`: a bar is shown if it is wanted and somebody looks at a terminal."""
    return None if wanted else True


class Distillation:
    """One run: answers first, then steps; everything needed to go on is in `out`."""

    def __init__(
        self, drafter: Any, teacher: Teaches, samples: Sequence[Sample], recipe: EagleRecipe, out: Path
    ) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator()
        self.drafter, self.teacher, self.recipe, self.out = drafter, teacher, recipe, out
        if len(samples) <= recipe.held_out:
            raise ValueError(f"{len(samples)} samples are too few; {recipe.held_out} of them are held out to measure τ")
        self.held_out, self.samples = list(samples[: recipe.held_out]), list(samples[recipe.held_out :])
        self.optimizers = optimizers(drafter, recipe)
        self.network, *prepared = self.accelerator.prepare(drafter, *self.optimizers)
        self.optimizers = prepared
        self.step = 0
        out.mkdir(parents=True, exist_ok=True)

    # -- answers -----------------------------------------------------------------------------------------------------

    def answers(self, samples: list[Sample], name: str) -> list[list[int]]:
        """The target's answers to all samples; kept as token ids in a file, so that they are written only once."""
        path = self.out / f"answers-{name}-{self.accelerator.process_index}of{self.accelerator.num_processes}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        done: dict[int, list[int]] = {}
        for line in lines:
            try:
                done.update({int(k): v for k, v in json.loads(line).items()})
            except json.JSONDecodeError:
                continue  # a torn last line: those answers are written again
        mine = range(self.accelerator.process_index, len(samples), self.accelerator.num_processes)
        todo = [i for i in mine if i not in done]
        size = 2 * self.recipe.batch
        with path.open("a") as file:
            starts = range(0, len(todo), size)
            for at in tqdm(starts, desc=f"answers ({name})", unit="batch", disable=quiet(bool(todo))):
                group = todo[at : at + size]
                sampled = name == "train" and (at // size) % 100 < 100 * self.recipe.sampled
                temperature = self.recipe.temperature if sampled else 0.0
                torch.manual_seed(self.recipe.seed * 100003 + group[0])
                texts = self.teacher.answers([samples[i] for i in group], self.recipe.max_new_tokens, temperature)
                new = dict(zip(group, texts, strict=True))
                done.update(new)
                file.write(json.dumps(new) + "\n")
                file.flush()
        return [done.get(i, []) for i in range(len(samples))]

    # -- steps -------------------------------------------------------------------------------------------------------

    def run(self, save_every: float = 300.0, measure_every: int = 250) -> float:
        """Train to the recipe's end, from the last checkpoint if there is one; returns the held-out τ."""
        held = self.answers(self.held_out, "held-out")
        answers = self.answers(self.samples, "train")
        usable = [i for i, a in enumerate(answers) if len(a) > self.recipe.unroll + 1]
        if not usable:
            raise ValueError(
                "the target's answers are all too short to learn from; raise max_new_tokens or change the data"
            )
        self.resume()
        process, processes = self.accelerator.process_index, self.accelerator.num_processes
        order = batches(len(usable), self.recipe.batch, self.recipe.seed, self.step, process, processes)
        bar = tqdm(
            total=self.recipe.steps, initial=self.step, desc="train", disable=quiet(self.accelerator.is_main_process)
        )
        saved = time.monotonic()
        tau = self.measure(held) if self.step else 1.0
        while self.step < self.recipe.steps:
            chosen = [usable[i] for i in next(order)]
            loss, agree = self.update(
                self.teacher.trace([self.samples[i] for i in chosen], [answers[i] for i in chosen])
            )
            self.step += 1
            if self.step % measure_every == 0 or self.step == self.recipe.steps:
                tau = self.measure(held)
                tqdm.write(f"step {self.step}: loss {loss:.3f}, held-out tau {tau:.2f} (chain of {self.recipe.unroll})")
            bar.set_postfix(loss=f"{loss:.3f}", tau=f"{expected_tokens(agree):.2f}", held_out_tau=f"{tau:.2f}")
            bar.update()
            if time.monotonic() - saved > save_every or self.step == self.recipe.steps:
                self.save()
                saved = time.monotonic()
        bar.close()
        return tau

    def update(self, trace: Trace) -> tuple[float, Tensor]:
        """One optimizer step on one batch."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate(self.recipe, self.step)
        loss, agree = losses(self.drafter, self.network, self.teacher, trace, self.recipe)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.network.parameters(), self.recipe.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item(), agree

    @torch.no_grad()
    def measure(self, answers: list[list[int]]) -> float:
        """Held-out τ (see expected_tokens), over the answers of this process."""
        long_enough = [i for i, a in enumerate(answers) if len(a) > self.recipe.unroll + 1]
        groups = lengths_sorted([answers[i] for i in long_enough], self.recipe.batch)
        found = []
        for group in groups:
            chosen = [long_enough[i] for i in group]
            trace = self.teacher.trace([self.held_out[i] for i in chosen], [answers[i] for i in chosen])
            found.append(losses(self.drafter, self.network, self.teacher, trace, self.recipe)[1])
        return expected_tokens(torch.cat(found, 1)) if found else 1.0

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    def save(self) -> None:
        if not self.accelerator.is_main_process:
            return
        state = {
            "step": self.step,
            "recipe": json.dumps(asdict(self.recipe)),
            "drafter": self.accelerator.unwrap_model(self.network).state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
        }
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, self.checkpoint)

    def resume(self) -> None:
        """Go on from the checkpoint in `out`.

        Raises:
            ValueError: the checkpoint belongs to another recipe.
        """
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, map_location=self.accelerator.device, weights_only=True)
        if json.loads(state["recipe"]) != json.loads(json.dumps(asdict(self.recipe))):
            raise ValueError(f"{self.checkpoint} was made with another recipe; choose another --out, or delete it")
        self.step = state["step"]
        self.accelerator.unwrap_model(self.network).load_state_dict(state["drafter"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
