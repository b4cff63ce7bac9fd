"""Online distillation: the drafter learns the frozen target's features and distribution along the target's own text."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from reprlib import repr as briefly
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from mmspec.config import option_names
from mmspec.drafters.draft_vocab import DraftVocab
from mmspec.drafters.growth import TargetHead
from mmspec.drafters.shape import USUAL
from mmspec.progress import bar
from mmspec.replacing import replaced
from mmspec.train import gate
from mmspec.train.data import TrainingSample, UnreadableError, batches, hold_out, lengths_sorted
from mmspec.train.muon import Muon
from mmspec.train.objective import expected_tokens, losses
from mmspec.train.recipes import Recipe
from mmspec.train.stop import Stop
from mmspec.train.trace import Lesson, Teaches, Trace


def optimizers(network: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW, and with the recipe's `muon` Muon for matrices."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    matrices = [p for p in parameters if recipe.muon and p.ndim == 2]
    others = [p for p in parameters if not (recipe.muon and p.ndim == 2)]
    found: list[torch.optim.Optimizer] = []
    if matrices:
        found.append(Muon(matrices, recipe.lr, recipe.weight_decay))
    if others:
        found.append(torch.optim.AdamW(others, lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay))
    return found


def finite(loss: float, step: int) -> float:
    """The loss of a step. ValueError if it is nan or inf: the weights are lost, and must not be saved."""
    if not math.isfinite(loss):
        raise ValueError(
            f"the loss of step {step} is {loss}, so training has diverged; begin anew in another --out with a lower "
            "rate (--set lr=…)"
        )
    return loss


def _opened(samples: dict[int, TrainingSample], broken: dict[int, str]) -> dict[int, TrainingSample]:
    """The samples with their pictures in memory; errors of those that cannot be read are added to `broken`."""
    found = {}
    for index, sample in samples.items():
        try:
            pictures = sample.load()
        except UnreadableError as error:
            broken[index] = str(error)
        else:
            found[index] = replace(sample, load=partial(list, pictures))
    return found


def _stored(path: Path) -> dict[str, list[int]]:
    """The answers in a file, by key; without those of an incomplete or damaged line, which are generated again."""
    found: dict[str, list[int]] = {}
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            found |= {key: [int(token) for token in answer] for key, answer in json.loads(line).items()}
    return found


def _keyed(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The samples with the keys of their answers: hashes of name and prompt, so that others may be added; of pictures
    drawn at random, of their place instead of a name; without pictures, of the prompt alone. Where several are the
    same, they are numbered."""
    found, seen = [], Counter[str]()
    for index, sample in enumerate(samples):
        what = json.dumps([(sample.name or index) if sample.images else "", sample.prompt])
        key = hashlib.sha256(what.encode()).hexdigest()[:16]
        found.append(replace(sample, key=f"{key}-{seen[what]}"))
        seen[what] += 1
    return found


def most_frequent(seen: Tensor, count: int) -> Tensor:
    """Ids of the `count` most frequent tokens, ascending, by their counts `seen` [V].

    Ties go to the smaller id, also among tokens that never occurred (as in EAGLE-3's code).
    """
    return seen.sort(descending=True, stable=True).indices[:count].sort().values


def cut_head(drafter: Any, teacher: Teaches, seen: Tensor) -> None:
    """Initialise a drafter's own head with the target's rows of the most frequent tokens, by their counts [V]."""
    ids = most_frequent(seen, drafter.config.draft_vocab).to(drafter.head.ids.device)
    drafter.head.ids.copy_(ids)
    weight = drafter.head.weight
    for columns in torch.arange(weight.shape[1], device=weight.device).split(256):
        one_hot = torch.zeros(len(columns), weight.shape[1], device=weight.device, dtype=weight.dtype)
        one_hot.scatter_(1, columns[:, None], 1)
        with torch.no_grad():
            weight[:, columns] = teacher.head(one_hot)[:, ids].T.to(weight.dtype)


def narrow(drafter: Any, ids: Tensor) -> None:
    """Restrict a drafter with the target's head to these tokens."""
    drafter.config = replace(drafter.config, proposes=tuple(ids.tolist()))
    drafter.head = TargetHead(DraftVocab(ids))


class Distillation:
    """One training run: answers first, then steps; everything needed to resume is in `out`.

    Args:
        samples: prompts with pictures (or for image generation); `recipe.held_out` of them are used to measure τ.
        texts: prompts without pictures, for recipes whose stages need them.
        answers: folder of the answers, shared by runs with the same target, data and answer settings; default: `out`.
        about: identifies the target and the data, on which the answers depend besides the prompts and the recipe.
        accelerator: accelerate's, of this process; the drafter is on the target's device, which is its own if there are
            several.
        room: bytes for cached traces of all lessons together, so that a sample is not read again.
        trained: the drafter is one to continue from, and keeps its head's tokens.
    """

    def __init__(
        self, drafter: Any, teacher: Teaches, samples: Sequence[TrainingSample], recipe: Recipe, out: Path,
        texts: Sequence[TrainingSample] = (), answers: Path | None = None, about: str = "", room: int = 0,
        *, accelerator: Any, trained: bool = False,
    ) -> None:  # fmt: skip
        self.accelerator = accelerator
        self.drafter, self.teacher, self.recipe, self.out = drafter, teacher, recipe, out
        self.written, self.about, self.room, self.trained = answers or out, about, room, trained
        if recipe.texts and not texts:
            raise ValueError(
                "this recipe has stages of text only; give prompts without pictures (--text), or train without them "
                "(--text none)"
            )
        if recipe.vocabulary and (drafter.head.own or not hasattr(drafter.config, "proposes")):
            raise ValueError(
                f"vocabulary={recipe.vocabulary} is for drafters with EAGLE's layer and the target's head; this "
                f"{drafter.method!r} drafter is different, so leave it out"
            )
        self.kept = getattr(drafter.config, "proposes", ()) if trained else ()  # the tokens that it goes on with
        if self.kept and recipe.vocabulary not in (0, len(self.kept)):
            warnings.warn(
                f"the drafter goes on proposing from its {len(self.kept)} tokens; "
                f"vocabulary={recipe.vocabulary} is for new drafters",
                stacklevel=3,
            )
        self.built = {"method": drafter.method, **getattr(drafter.config, "to_dict", dict)()}
        asked = [replace(s, prompt=f"{s.prompt} {recipe.suffix}") if recipe.suffix else s for s in samples]
        prompted = _keyed(asked)
        state = self.stored("cpu", mmap=True)  # raises before the target answers; the tensors are not read
        self.named = state is None or "named" in state  # older runs held out the first samples, and go on so
        held = hold_out(samples, recipe.held_out, recipe.seed) if self.named else [*range(recipe.held_out)]
        left = sorted({*range(len(samples))} - {*held})
        if not left:
            few = max(1, len(samples) // 3)
            fewer = f", or hold fewer out: --set held_out={few}" if few < min(recipe.held_out, len(samples)) else ""
            raise ValueError(
                f"{len(samples)} samples are too few: this recipe holds {recipe.held_out} out to measure τ, with all "
                f"others that show the same pictures, and learns from the rest; give more pictures or prompts{fewer}"
            )
        self.held_out, self.samples = [prompted[i] for i in held], [prompted[i] for i in left]
        self.texts = _keyed(texts)
        self.device = next(drafter.parameters()).device
        self.optimizers = optimizers(drafter, recipe)
        self.network, *prepared = self.accelerator.prepare(drafter, *self.optimizers)
        self.optimizers = prepared
        self.step, self.seconds = 0, 0.0  # and the processor time of the steps
        self.began = time.monotonic()  # if all processes of the run had followed each other at once
        self.curve: list[dict[str, float]] = []  # measurements of the loss and the held-out τ
        out.mkdir(parents=True, exist_ok=True)

    # -- answers -----------------------------------------------------------------------------------------------------

    def answers(self, samples: list[TrainingSample], name: str) -> list[list[int]]:
        """The target's answers to all samples; stored as token ids in a file, so that they are generated only once.

        A sample whose pictures cannot be read has an empty answer, and there is a warning.

        Raises:
            UnreadableError: no sample can be read.
        """
        process, processes = self.accelerator.process_index, self.accelerator.num_processes
        shared = f"answers-{name}-{self._way()}"
        path = self.written / f"{shared}-{process}of{processes}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        done: dict[str, list[int]] = {}
        for other in sorted(self.written.glob(f"{shared}-*.jsonl")):  # also of other numbers of processes
            done.update(_stored(other))
        keys = [f"{sample.key} {sample.stamp()}".strip() for sample in samples]
        mine = sorted(range(process, len(samples), processes), key=lambda i: (samples[i].images, samples[i].prompt))
        groups = [mine[at : at + self.recipe.writing] for at in range(0, len(mine), self.recipe.writing)]
        todo = [left for group in groups if (left := [i for i in group if keys[i] not in done])]
        broken: dict[int, str] = {}
        with path.open("a") as file:
            if todo and file.tell():
                file.write("\n")  # after an incomplete line
            for group in tqdm(todo, desc=f"answers ({name})", unit="batch", **bar(bool(todo))):
                seed = self.recipe.seed * 100003 + group[0]
                sampled = name != "held-out" and np.random.default_rng(seed).random() < self.recipe.sampled
                torch.manual_seed(seed)
                opened = _opened({i: samples[i] for i in group}, broken)
                if opened:
                    temperature = self.recipe.temperature if sampled else 0.0
                    texts = self.teacher.answers(list(opened.values()), self.recipe.max_new_tokens, temperature)
                    new = {keys[i]: text for i, text in zip(opened, texts, strict=True)}
                    done.update(new)
                    file.write(json.dumps(new) + "\n")
                    file.flush()
        counts = torch.tensor([len(broken), len(mine)], device=self.device)
        unread, count = self.accelerator.reduce(counts, "sum").tolist()  # of all processes, so that all stop together
        why = f"{unread} of {count} samples ({name}) cannot be read"
        why += f"; the first: {broken[min(broken)]}" if broken else ""
        if unread and unread == count:
            raise UnreadableError(why)
        if broken:
            warnings.warn(f"left out: {why}", stacklevel=2)
        return [done.get(key, []) if i % processes == process else [] for i, key in enumerate(keys)]

    def _way(self) -> str:
        """A hash of everything that the answers depend on besides their samples."""
        r = self.recipe
        how = [self.about, r.seed, r.temperature, r.sampled, r.max_new_tokens, r.writing]
        return hashlib.sha256(json.dumps(how).encode()).hexdigest()[:10]

    def lesson(self, samples: list[TrainingSample], name: str) -> Lesson:
        """The samples with long enough answers of the target, and as many of their traces as there is room for."""
        answers = self.answers(samples, name)
        usable = [(s, a) for s, a in zip(samples, answers, strict=True) if len(a) > self.recipe.unroll + 1]
        if not usable:
            raise ValueError(
                "all answers of the target are too short to learn from; raise max_new_tokens or change the data"
            )
        found = Lesson(self.teacher, [s for s, _ in usable], [a for _, a in usable])
        with self.computing():
            self.room = found.read(self.recipe.batch, self.room)
        return found

    # -- steps -------------------------------------------------------------------------------------------------------

    def run(self, save_every: float = 300.0, measure_every: int = 250) -> float:
        """Train to the recipe's end, from the last checkpoint if there is one; returns the held-out τ.

        Raises KeyboardInterrupt: it was asked to stop; after a step the checkpoint is that of this step.
        """
        held_out, shown = self.lesson(self.held_out, "held-out"), self.lesson(self.samples, "train")
        text = self.lesson(self.texts, "text") if self.recipe.texts else None
        if self.drafter.head.own and not self.trained:
            with self.computing():
                cut_head(self.drafter, self.teacher, self._seen(self.answers(self.samples, "train")))
        elif self.kept:
            narrow(self.drafter, torch.tensor(self.kept, device=self.device))
        elif self.recipe.vocabulary:
            seen = self._seen(self.answers(self.samples, "train"))
            narrow(self.drafter, most_frequent(seen, self.recipe.vocabulary))
        self.resume()
        wanted = self.accelerator.is_main_process
        steps = tqdm(total=self.recipe.steps, initial=self.step, desc="train", **bar(wanted))
        saved = time.monotonic()
        tau = self.measure(held_out) if self.step else 1.0
        with Stop(self.accelerator, self.device) as stop, steps:
            for trace in self._traces(shown, text):
                began = time.process_time()
                loss, agree = self.update(trace)
                self.seconds += time.process_time() - began
                self.step += 1
                finite(loss, self.step)
                if self.step % measure_every == 0 or self.step == self.recipe.steps:
                    tau = self.measure(held_out)
                    self.curve.append({"step": self.step, "loss": loss, "held_out_tau": tau})
                    what = f"held-out tau {tau:.2f} (chain of {self.recipe.unroll})"
                    tqdm.write(f"step {self.step}: loss {loss:.3f}, {what}")
                taus = {"tau": f"{expected_tokens(agree):.2f}", "held_out_tau": f"{tau:.2f}"}
                steps.set_postfix(loss=f"{loss:.3f}", **taus, refresh=False)
                steps.update()
                ends = stop.asked()
                if ends or time.monotonic() - saved > save_every or self.step == self.recipe.steps:
                    self.save()
                    saved = time.monotonic()
                if ends:
                    raise self.stopped()
        if gate.learns_after(self.drafter, self.recipe):
            traces = (shown.trace([i]) for i in range(min(len(shown.samples), self.recipe.gate_samples)))
            with self.computing():
                choice = gate.learn(self.drafter, self.teacher, traces, self.recipe)
            tqdm.write("the gate chooses " + ", ".join(f"{name} {share:.0%}" for name, share in choice.items()))
            tau = self.measure(held_out)
        return tau

    def _seen(self, answers: list[list[int]]) -> Tensor:
        """How often each token [V] occurs in the answers of all processes."""
        tokens, vocab = torch.tensor([*chain.from_iterable(answers)], dtype=torch.long), self.drafter.config.vocab
        counts = torch.bincount(tokens, minlength=vocab)[:vocab]
        return self.accelerator.reduce(counts.to(self.device), "sum")

    def _traces(self, shown: Lesson, text: Lesson | None) -> Iterator[Trace]:
        """The batches of the steps from `self.step` on, each with pictures or, in some stages, of text only."""
        r, process, processes = self.recipe, self.accelerator.process_index, self.accelerator.num_processes
        lessons = [lesson for lesson in (shown, text) if lesson]
        orders = [batches(lesson.lengths, r.batch, r.seed, self.step, process, processes) for lesson in lessons]
        for step in range(self.step, r.steps):
            chosen = [next(order) for order in orders]
            alone = text is not None and np.random.default_rng([r.seed, 5, step]).random() >= r.pictures(step)
            with self.computing():
                trace = lessons[int(alone)].trace(chosen[int(alone)])
            yield trace

    def computing(self) -> torch.autocast:
        """Autocast for traces and losses, by the recipe's `bf16`."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.bf16)

    def update(self, trace: Trace) -> tuple[float, Tensor]:
        """One optimizer step on one batch."""
        recipe, frozen = self.recipe.at(self.step), self.recipe.stage(self.step)[0].frozen
        torch.manual_seed(self.recipe.seed * 100003 + self.step)  # so that a resumed run draws the same
        if getattr(self.drafter, "gate", None) is not None:
            self.drafter.gate.heat = recipe.heat(self.step)
        self.network.train()
        with self.computing():
            loss, agree = losses(self.drafter, self.network, self.teacher, trace, recipe)
        return self.stepped(loss, recipe, frozen), agree

    def stepped(self, loss: Tensor, recipe: Recipe, frozen: tuple[str, ...] = ()) -> float:
        """Step the optimizers by the gradient of a loss, without parameters whose names begin so; returns the loss."""
        self.accelerator.backward(loss)
        for name, parameter in self.drafter.named_parameters():
            if name.startswith(frozen):
                parameter.grad = None
        clip = self.accelerator.clip_grad_value_ if recipe.clip_by == "value" else self.accelerator.clip_grad_norm_
        clip(self.network.parameters(), recipe.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.recipe.rate(self.step)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def measure(self, held_out: Lesson) -> float:
        """Held-out τ (see expected_tokens), over the answers of this process."""
        self.network.eval()
        plain = replace(self.recipe.at(self.step), rollouts=0, noise=0.0)
        groups = lengths_sorted(held_out.lengths, self.recipe.batch)
        with self.computing():
            agree = [losses(self.drafter, self.network, self.teacher, held_out.trace(g), plain)[1] for g in groups]
        return expected_tokens(torch.cat(agree, 1))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    def save(self) -> None:
        if not self.accelerator.is_main_process:
            return
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "lasted": time.monotonic() - self.began,
            "curve": self.curve,
            "recipe": json.dumps(asdict(self.recipe)),
            "about": self.about,
            "built": json.dumps(self.built),
            **({"named": True} if self.named else {}),
            "drafter": self.accelerator.unwrap_model(self.network).state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
        }
        with replaced(self.checkpoint, self.checkpoint.with_suffix(".part")) as path:  # no second one after a kill
            torch.save(state, path)

    def stopped(self) -> KeyboardInterrupt:
        """What ends a run that was asked to stop, and has saved its last step."""
        return KeyboardInterrupt(f"step {self.step} of {self.recipe.steps} is saved")

    def stored(self, device: str | torch.device, mmap: bool = False) -> dict[str, Any] | None:
        """The checkpoint in `out`, if there is one.

        Args:
            mmap: leave the tensors in the file.

        Raises:
            ValueError: it is damaged, or belongs to another recipe, drafter, target or source of data.
        """
        if not self.checkpoint.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(self.checkpoint, device, weights_only=True, mmap=mmap)
            recipe, built = json.loads(state["recipe"]), json.loads(state.get("built", "{}"))
        except Exception as error:  # on other bytes torch may raise any error
            raise ValueError(
                f"{self.checkpoint} cannot be read ({type(error).__name__}: {error}); if it is damaged, delete it: the "
                "answers are kept, and the steps begin anew"
            ) from error
        defaults, now = (json.loads(json.dumps(asdict(recipe))) for recipe in (Recipe(), self.recipe))
        then = defaults | recipe  # values newer than the checkpoint had their defaults
        if other := next((name for name in now if then[name] != now[name]), None):
            raise ValueError(
                f"{self.checkpoint} was made with another recipe ({other} is {briefly(then[other])} there, and "
                f"{briefly(now[other])} here); choose another --out (--answers {self.written} keeps the answers), or "
                "delete it"
            )
        here = json.loads(json.dumps(self.built))
        recommended = option_names(USUAL)  # these may change
        for name in sorted((built.keys() & here.keys()) - {*recommended}):
            if built[name] != here[name]:
                raise ValueError(
                    f"{self.checkpoint} was made for a drafter with {name} {built[name]!r}, and this run's has "
                    f"{here[name]!r}; choose another --out, or delete it"
                )
        if state.get("about", self.about) != self.about:
            raise ValueError(
                f"{self.checkpoint} was made for {state['about']!r}, and this run is for {self.about!r}; choose "
                "another --out, or delete it"
            )
        return state

    def resume(self) -> None:
        """Resume from the checkpoint in `out`, if there is one; raises the errors of `stored`."""
        if (state := self.stored(self.device)) is None:
            return
        self.step, self.seconds, self.curve = state["step"], state["seconds"], state.get("curve", [])
        self.began -= state.get("lasted", 0.0)
        self.accelerator.unwrap_model(self.network).load_state_dict(state["drafter"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if self.accelerator.is_main_process:
            tqdm.write(f"resumes at step {self.step} of {self.recipe.steps}")
