"""The training loop of the zoo: Muon and AdamW on a step-based schedule, resumed exactly from its checkpoints."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.zoo.recipes.schedule import Schedule
from mmspec.replacing import replaced
from mmspec.train.muon import Muon

CHECKPOINT_SECONDS = 300.0
HIDDEN = (".layers.", "_blocks.", ".tower.blocks.")  # in the names of a hidden layer's weights
Loss = Callable[[int], tuple[torch.Tensor, int]]  # step -> the loss and the number of tokens it cost
Say = Callable[[str], None]


def autocast() -> torch.autocast:
    """bfloat16 where the CPU multiplies it natively; elsewhere float32 is faster."""
    return torch.autocast("cpu", torch.bfloat16, enabled=torch.cpu._is_avx512_bf16_supported())


def optimizers(module: nn.Module, plan: Schedule) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of hidden layers (if any), AdamW for embeddings, heads, norms, biases and convolutions.

    With `plan.kernels` Muon takes the kernels of convolutions, too.
    """
    hidden: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, weight in module.named_parameters():
        if weight.requires_grad:
            matrix = weight.ndim == 2 and any(mark in f".{name}" for mark in HIDDEN)
            (hidden if matrix or (plan.kernels and weight.ndim == 4) else rest).append(weight)
    adamw = torch.optim.AdamW(rest, lr=plan.lr, weight_decay=0.0, betas=(0.9, 0.95), fused=True)
    return [*([Muon(hidden, plan.lr, plan.weight_decay, plan.newton_schulz)] if hidden else []), adamw]


def rate(plan: Schedule, step: int) -> float:
    """Learning rate of one step: warm-up, plateau, linear fall to zero at the end."""
    done = (step + 1) / plan.steps
    return plan.lr * min(1.0, done / plan.warmup, (1.0 - done) / plan.decay + 1e-3)


def fit(
    module: nn.Module,
    plan: Schedule,
    loss_of: Loss,
    checkpoint: Path,
    say: Say = print,
    stop: int | None = None,
) -> None:
    """Train `module` in place up to `plan.steps` (or `stop`), resuming from `checkpoint` if that file exists.

    The loss of a step depends on nothing but the weights and the step's number, so a resumed run equals an
    uninterrupted one.
    """
    tools = optimizers(module, plan)
    weights = [p for p in module.parameters() if p.requires_grad]
    first, spent = resume(checkpoint, module, tools)
    begun = saved = told = time.monotonic()
    tokens, last = 0, min(plan.steps, stop or plan.steps)
    for step in range(first, last):
        for tool in tools:
            for group in tool.param_groups:
                group["lr"] = rate(plan, step)
        loss, count = loss_of(step)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(weights, plan.clip)
        for tool in tools:
            tool.step()
            tool.zero_grad(set_to_none=True)
        tokens += count
        now = time.monotonic()
        if now - told > 20 or step + 1 == last:
            pace = (now - begun) / (step + 1 - first)
            say(
                f"step {step + 1}/{plan.steps} loss {loss.item():.4f} norm {norm:.2f} lr {rate(plan, step):.2e} "
                f"{tokens / (now - begun):.0f} tokens/s {pace:.2f} s/step ETA {pace * (last - step - 1) / 60:.1f} min"
            )
            told = now
        if now - saved > CHECKPOINT_SECONDS or step + 1 == last:
            save(checkpoint, module, tools, step + 1, spent + time.monotonic() - begun)
            saved = time.monotonic()


def seconds(checkpoint: Path) -> float:
    """Wall time of the run up to this checkpoint, over all its resumptions."""
    return torch.load(checkpoint, weights_only=True)["seconds"] if checkpoint.exists() else 0.0


def save(path: Path, module: nn.Module, tools: list[torch.optim.Optimizer], step: int, spent: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"module": module.state_dict(), "tools": [tool.state_dict() for tool in tools]}
    with replaced(path) as partial:
        torch.save({**state, "step": step, "seconds": spent}, partial)


def resume(path: Path, module: nn.Module, tools: list[torch.optim.Optimizer]) -> tuple[int, float]:
    if not path.exists():
        return 0, 0.0
    state = torch.load(path, weights_only=True)
    module.load_state_dict(state["module"])
    for tool, kept in zip(tools, state["tools"], strict=True):
        tool.load_state_dict(kept)
    return state["step"], state["seconds"]
