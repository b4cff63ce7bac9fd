"""MAR's diffusion head: an MLP that denoises a token by its conditioning, and a faster form that caches modulations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.continuous.denoising import Chain, Output
from mmspec.modes import uncast

SHAPES: dict[str, dict[str, int]] = {  # the published sizes, of the transformer too
    "base": {"dim": 768, "layers": 12, "heads": 12, "head_layers": 6, "head_width": 1024},
    "large": {"dim": 1024, "layers": 16, "heads": 16, "head_layers": 8, "head_width": 1280},
    "huge": {"dim": 1280, "layers": 20, "heads": 16, "head_layers": 12, "head_width": 1536},
}
EPS = 1e-6  # of every layer norm
CLOCK = 256  # width of the sinusoidal time embedding
BUDGET = 2**28  # limit on the bytes of a denoiser's tables


class _Clock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(CLOCK, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        half = CLOCK // 2
        frequency = torch.exp(torch.arange(half, device=t.device) * (-math.log(10000) / half))
        angle = t.float()[..., None] * frequency
        return self.mlp(torch.cat([angle.cos(), angle.sin()], -1).to(next(self.parameters()).dtype))


class _HeadBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=EPS)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        shift, scale, gate = self.adaLN_modulation(y).chunk(3, -1)
        return h + gate * self.mlp(self.in_ln(h) * (1 + scale) + shift)


class _Last(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(y).float().chunk(2, -1)
        return self.out(F.layer_norm(h.float(), h.shape[-1:], eps=EPS) * (1 + scale) + shift)

    def out(self, h: Tensor) -> Tensor:
        """The layer itself, in float32, under autocast too."""
        with uncast(h.device):
            return F.linear(h, self.linear.weight.float(), self.linear.bias.float())


class _Network(nn.Module):
    def __init__(self, channels: int, dim: int, width: int, layers: int) -> None:
        super().__init__()
        self.time_embed, self.cond_embed = _Clock(width), nn.Linear(dim, width)
        self.input_proj = nn.Linear(channels, width)
        self.res_blocks = nn.ModuleList(_HeadBlock(width) for _ in range(layers))
        self.final_layer = _Last(width, 2 * channels)

    @property
    def blocks(self) -> list[_HeadBlock]:
        return cast("list[_HeadBlock]", [*self.res_blocks])


class MARHead(nn.Module):
    """The denoising MLP of MAR (Li et al. 2024, arXiv 2406.11838, §3.2); parameter names are the authors'."""

    def __init__(self, channels: int, dim: int, width: int, layers: int) -> None:
        super().__init__()
        self.net = _Network(channels, dim, width, layers)
        last = self.net.final_layer
        for part in (*(b.adaLN_modulation for b in self.net.blocks), last.adaLN_modulation, last.linear):
            for weight in part.parameters():
                nn.init.zeros_(weight)

    def forward(self, x: Tensor, t: Tensor, z: Tensor) -> Tensor:
        """fp32 [..., 2·C]: ε, then v, of states x [..., C] at training times t [...] under conditioning z [..., D]."""
        net, dtype = self.net, self.net.input_proj.weight.dtype
        y = net.time_embed(t) + net.cond_embed(z.to(dtype))
        h = net.input_proj(x.to(dtype))
        for block in net.res_blocks:
            h = block(h, y)
        return net.final_layer(h, y)

    def modulated(self, x: Tensor, table: Tensor) -> Tensor:
        """The same for states x [..., C] by the modulation [..., parts·w] that `Bound` computes from t and z."""
        net = self.net
        h = net.input_proj(x.to(table.dtype))
        width = h.shape[-1:]
        *parts, by, on = table.chunk(3 * len(net.res_blocks) + 2, -1)
        for block, scale, shift, gate in zip(net.blocks, parts[::3], parts[1::3], parts[2::3], strict=True):
            u = torch.addcmul(shift, F.layer_norm(h, width, eps=EPS), scale)
            h = torch.addcmul(h, gate, block.mlp[2](F.silu(block.mlp[0](u))))
        h = torch.addcmul(on.float(), F.layer_norm(h.float(), width, eps=EPS), by.float())
        return net.final_layer.out(h)

    @torch.no_grad()
    def folded(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the modulation of all layers, see `Bound`; three fifths of the head's weights."""
        net = self.net
        rows, biases = [], []
        for block in net.blocks:
            weight, bias = (t.float() for t in block.adaLN_modulation[1].parameters())
            (w_shift, w_scale, w_gate), (b_shift, b_scale, b_gate) = weight.chunk(3), bias.chunk(3)
            by, on = block.in_ln.weight.float(), block.in_ln.bias.float()
            rows += [by[:, None] * w_scale, w_shift + on[:, None] * w_scale, w_gate]
            biases += [by * (1 + b_scale), b_shift + on * (1 + b_scale), b_gate]
        weight, bias = net.final_layer.adaLN_modulation[1].parameters()
        rows += [*weight.float().chunk(2)[::-1]]
        shift, scale = bias.float().chunk(2)
        return torch.cat(rows).to(weight.dtype), torch.cat([*biases, 1 + scale, shift]).to(weight.dtype)

    @torch.no_grad()
    def bind(self, chain: Chain, folded: tuple[Tensor, Tensor] | None = None) -> Bound:
        """Precompute the parts of the head's outputs at the steps of a chain that do not depend on the token.

        `folded` is the result of `self.folded`, if it serves several chains.
        """
        weight, bias = self.folded() if folded is None else folded
        return Bound(self, chain, self.net.time_embed(chain.timesteps), weight, bias)


class PlainHead:
    """The head without any caching, as a `Net`."""

    def __init__(
        self, head: MARHead, chain: Chain, z: Tensor, null: Tensor | None = None, guidance: Tensor | None = None
    ) -> None:
        self.head, self.chain, self.z, self.null, self.guidance = head, chain, z, null, guidance

    def at(self, x: Tensor, k: int) -> Output:
        return self._run(x, self.chain.timesteps[k].expand(len(x)), self.z, self.null)

    def along(self, x: Tensor) -> Output:
        K = x.shape[1]
        null = None if self.null is None else self.null[:, None].expand(-1, K, -1)
        return self._run(x, self.chain.timesteps.expand(x.shape[:2]), self.z[:, None].expand(-1, K, -1), null)

    def _run(self, x: Tensor, t: Tensor, z: Tensor, null: Tensor | None) -> Output:
        if null is None:
            return self.head(x, t, z), None
        both = self.head(torch.cat([x, x]), torch.cat([t, t]), torch.cat([z, null]))
        return both[: len(x)], both[len(x) :]

    def take(self, rows: Tensor) -> PlainHead:
        null, guidance = (None if t is None else t[rows] for t in (self.null, self.guidance))
        return PlainHead(self.head, self.chain, self.z[rows], null, guidance)


@dataclass(frozen=True)
class Bound:
    """A head bound to a chain: the embedded times, and one matrix for the modulation of all layers.

    A layer norm's own weights are folded into the modulation that follows it: LN(h)·a + c with one a and one c.
    """

    head: MARHead
    chain: Chain
    clock: Tensor  # [K, w]
    weight: Tensor  # [(3·layers + 2)·w, w]
    bias: Tensor

    def on(self, z: Tensor, null: Tensor | None = None, guidance: Tensor | None = None) -> Denoiser:
        """The network of tokens with conditioning z [R, D], and with `null` [R, D] guided by `guidance` [R]."""
        cond = self.head.net.cond_embed
        every = z if null is None else torch.cat([z, null])
        return Denoiser(self, cond(every.to(cond.weight.dtype)), guidance if null is not None else None)


@dataclass
class Denoiser:
    """The head bound to tokens and steps: the modulation, which depends only on these, is computed for many steps at
    once. Equal to `PlainHead` up to rounding.
    """

    bound: Bound
    cond: Tensor  # [N, w]: N = R tokens, or 2·R followed by those without the condition
    guidance: Tensor | None  # [R'], of the states
    of: Tensor | None = None  # int64 [R' or 2·R'], index of each state into the N; None: they are the N
    table: tuple[int, Tensor] | None = None  # index of a chunk of steps, and its modulation [steps, N, parts·w]

    def at(self, x: Tensor, k: int) -> Output:
        return self.out(x, self.modulation(k))

    def along(self, x: Tensor) -> Output:
        """In chunks of steps, so that the tables stay within the budget."""
        room, every = self._room(), self._every(x.transpose(0, 1))
        parts = [self.bound.head.modulated(part, self._tables(i)) for i, part in enumerate(every.split(room))]
        out, null = self._apart(parts[0] if len(parts) == 1 else torch.cat(parts))
        return out.transpose(0, 1), None if null is None else null.transpose(0, 1)

    def take(self, rows: Tensor) -> Denoiser:
        every, guidance = rows, None
        if self.guidance is not None:
            every, guidance = torch.cat([rows, rows + len(self.guidance)]), self.guidance[rows]
        taken = Denoiser(self.bound, self.cond, guidance, every if self.of is None else self.of[every])
        if self._room() == taken._room() == len(self.bound.chain):
            self._modulation(0)  # shared by all selections
            taken.table = self.table
        return taken

    def modulation(self, k: int) -> Tensor:
        """[R' or 2·R', parts·w] of step k."""
        room = self._room()
        table = self._modulation(k // room)[k % room]
        return table if self.of is None else table[self.of]

    def out(self, x: Tensor, table: Tensor) -> Output:
        """fp32 outputs for states x [R', C] under a modulation."""
        return self._apart(self.bound.head.modulated(self._every(x), table))

    def _every(self, x: Tensor) -> Tensor:
        """The states; with guidance they are repeated, for the outputs without the condition."""
        return x if self.guidance is None else torch.cat([x, x], -2)

    def _apart(self, out: Tensor) -> Output:
        """Split outputs for the states of `_every`: with the condition and, under guidance, without."""
        if self.guidance is None:
            return out, None
        both = out.chunk(2, -2)
        return both[0], both[1]

    def _room(self) -> int:
        """The number of steps whose tables fit into the budget."""
        each = max(len(self.cond), 0 if self.of is None else len(self.of)) * len(self.bound.bias)
        each *= self.cond.element_size()
        return max(1, min(len(self.bound.chain), BUDGET // max(1, each)))

    def _modulation(self, chunk: int) -> Tensor:
        if self.table is None or self.table[0] != chunk:
            first = chunk * self._room()
            y = F.silu(self.bound.clock[first : first + self._room(), None] + self.cond)
            self.table = chunk, F.linear(y, self.bound.weight, self.bound.bias)
        return self.table[1]

    def _tables(self, chunk: int) -> Tensor:
        """[steps, R' or 2·R', parts·w] of a chunk of steps."""
        table = self._modulation(chunk)
        return table if self.of is None else table[:, self.of]
