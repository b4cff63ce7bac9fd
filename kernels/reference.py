"""The definitions: every piece of arithmetic that decides what is kept or drawn, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_BELOW_ONE = 1 - 2.0**-53
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB

# A row's streams of noise. Each draft token must be independent of the coins that will test it.
COINS, GUMBEL, FRESH, COUPLE = range(4)  # tests of drafts; seed-exact draws; new drafts; drafts carried over


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of a signed 64-bit integer."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _hash(seed: Tensor, counter: Tensor) -> Tensor:
    """SplitMix64: the counter-th number, int64, of the generator that starts at `seed`."""
    x = seed + (counter + 1) * _GOLDEN
    x.bitwise_xor_(_shift(x, 30)).mul_(_MIX_1)
    x.bitwise_xor_(_shift(x, 27)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift(x, 31))


def uniform(seed: Tensor, counter: Tensor) -> Tensor:
    """Counter-based noise: the SplitMix64 hash of (seed, counter) as a number in [0, 1).

    The same pair gives the same number on every device and in every batch, so a row's noise depends on nothing but
    its own seed and its own position.

    Args:
        seed: int64, any shape that broadcasts with `counter`.
        counter: int64.

    Returns:
        float64 of the broadcast shape, with 53 random bits.
    """
    return _shift(_hash(seed, counter), 11).to(torch.float64) * 2.0**-53


def stream(seed: Tensor, tag: int) -> Tensor:
    """The seed of one of a row's independent streams of noise: COINS (the seed itself), GUMBEL, FRESH or COUPLE."""
    return seed if tag == COINS else _hash(seed, torch.full_like(seed, -1 - tag))


def gumbel(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Gumbel noise of every token at absolute positions, from the row's GUMBEL stream; finite.

    argmax(log p + gumbel) is a draw from p, and the same draw whatever else is computed beside it.

    Args:
        seed: int64 [B].
        position: int64 [B, N].
        vocab: V.

    Returns:
        float64 [B, N, V].
    """
    cell = _hash(stream(seed, GUMBEL)[:, None], position)[..., None]
    u = uniform(cell, torch.arange(vocab, device=position.device)).clamp_(min=2.0**-54)
    return u.log_().neg_().log_().neg_()


def categorical(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF draw: the first index whose cumulated weight exceeds u times the total.

    Args:
        weights: [..., V], non-negative, not all zero; need not sum to one.
        u: [...], in [0, 1).

    Returns:
        int64 [...]; an index of weight zero is never drawn.
    """
    cumulated = weights.to(torch.float64).cumsum(-1)
    threshold = (u * cumulated[..., -1])[..., None]
    index = torch.searchsorted(cumulated, threshold, right=True)[..., 0]
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1)
    return torch.minimum(index, last)  # rounding may carry u * total up to the total itself


def remaining(u: Tensor, taken: Tensor) -> Tensor:
    """A uniform number u ≥ taken, stretched to [0, 1) again: it is as good as new for the draw after a refusal."""
    return ((u - taken) / (1 - taken)).clamp(0, _BELOW_ONE)


def exact_ratio(p_x: Tensor, q_x: Tensor) -> Tensor:
    """Chance to keep x under rejection sampling: min(1, p(x)/q(x)), 0 where p(x) = 0 (Leviathan et al. 2023, §2.3)."""
    return torch.where(p_x > 0, (p_x / q_x).clamp(max=1.0), torch.zeros_like(p_x))


def positive_residual(p: Tensor, q: Tensor) -> Tensor:
    """Weights of (p − q)+, the law once a draft was refused; falls back to p where rounding leaves nothing."""
    rest = (p - q).clamp(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def scaled_ratio(p_x: Tensor, q_x: Tensor, omega: Tensor | float) -> Tensor:
    """min(1, ω·p(x)/q(x)), 0 where p(x) = 0; at least `exact_ratio` for every ω ≥ 1."""
    return torch.where(p_x > 0, (omega * p_x / q_x).clamp(max=1.0), torch.zeros_like(p_x))


def typical_bound(p: Tensor, epsilon: float, delta: float) -> Tensor:
    """Least probability of a typical token of the laws p [..., V]: min(ε, δ·exp(−H(p))) (Cai et al. 2024, Medusa)."""
    return (delta * torch.exp(torch.special.entr(p).sum(-1).neg())).clamp(max=epsilon)


def nearest(codebook: Tensor, k: int, chunk: int = 2048) -> Tensor:
    """The k codes nearest to each code, nearest first, itself left out: int32 [V, k] from a codebook [V, c].

    Distances are between normalised codes, which is all that a model with an L2-normalised codebook ever sees.
    """
    codes = torch.nn.functional.normalize(codebook.float(), dim=-1)
    found = []
    for start in range(0, len(codes), chunk):
        likeness = codes[start : start + chunk] @ codes.T
        likeness.diagonal(start).fill_(-torch.inf)
        found.append(likeness.topk(k, -1).indices.to(torch.int32))
    return torch.cat(found)


def partition(codebook: Tensor, radius: float | None = None, cells: int | None = None) -> Tensor:
    """Cells of near codes, int64 [V]: farthest-point centres (Gonzalez 1985), each code with its nearest one.

    Centres are added until every code lies within `radius` of its own, or until there are `cells` of them, so two
    codes of a cell are at most 2·radius apart. Distances are between normalised codes.
    """
    codes = torch.nn.functional.normalize(codebook.double().cpu(), dim=-1)
    cell, distance = torch.zeros(len(codes), dtype=torch.long), (codes - codes[0]).norm(dim=-1)
    for centre in range(1, cells if cells is not None else len(codes)):
        if float(distance.max()) <= (radius or 0.0):
            break
        away = (codes - codes[distance.argmax()]).norm(dim=-1)
        cell = torch.where(away < distance, centre, cell)
        distance = torch.minimum(away, distance)
    return cell.to(codebook.device)


def borrowed(masses: Tensor, bound: Tensor | float) -> Tensor:
    """The largest prefix sum within the bound: what x may borrow of its neighbours (Jang et al. 2024, §4).

    Args:
        masses: [..., k], p of the neighbours, nearest first.
        bound: a number or [...].

    Returns:
        [...], c(m*) with m* = max{j : c(j) ≤ bound} and c(0) = 0.
    """
    sums = masses.cumsum(-1)
    limit = bound[..., None] if isinstance(bound, Tensor) else bound
    return torch.where(sums <= limit, sums, 0.0).amax(-1)


def rank_window(p: Tensor, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The `size` tokens around x [...] in the order of p [..., V]: x, ⌊size/2⌋ less likely ones, the rest more likely.

    Returns:
        Token ids [..., size], and bool of the same shape: false where the window hangs over an end of the order, and
        for tokens that p excludes, which have no order.
    """
    x, ids = x[..., None], torch.arange(p.shape[-1], device=p.device)
    p_x = p.gather(-1, x)
    below = (p < p_x) | ((p == p_x) & (ids < x))
    above = ~below & (ids != x)
    less = torch.where(below, p, -torch.inf).topk(min(size // 2, len(ids)), -1)
    more = torch.where(above, -p, -torch.inf).topk(min(size - size // 2 - 1, len(ids)), -1)
    window = torch.cat([less.indices, x, more.indices], -1)
    found = torch.cat([less.values, p_x, more.values], -1) > -torch.inf
    return window, found & (p.gather(-1, window) > 0)


def cell_sums(weights: Tensor, cell: Tensor) -> Tensor:
    """The mass of each token's whole cell, [..., V], from weights [..., V] and the partition [V]."""
    index = cell.to(weights.device).expand_as(weights)
    return torch.zeros_like(weights).scatter_add_(-1, index, weights).gather(-1, index)


def cell_residual(p: Tensor, q: Tensor, cell: Tensor) -> Tensor:
    """Weights after a refusal at cell level: a cell by (p(C) − q(C))+, then a token of it by p; p if nothing is left.

    q counts only where p does, so that cells are cut down to what p can draw.
    """
    p_cell, q_cell = cell_sums(p, cell), cell_sums(torch.where(p > 0, q, 0.0), cell)
    rest = torch.where(p > 0, p * (p_cell - q_cell).clamp(min=0) / p_cell, 0.0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def sibling_mass(mass: Tensor, siblings: Tensor) -> Tensor:
    """For each node, the mass of its earlier siblings: the lower end of its slice of [0, 1) at its parent.

    Args:
        mass: [B, N], the probability of each node's token at its parent.
        siblings: bool [B, N, N], entry (n, k) true where k is an earlier sibling of n.

    Returns:
        [B, N].
    """
    return torch.where(siblings, mass[:, None, :], 0.0).sum(-1)  # a product would let a NaN through


def move_rows(buffer: Tensor, source: Tensor, start: Tensor) -> None:
    """Move kept cache entries down, in place: slot start + j of a row takes what stood in slot source[:, j].

    Args:
        buffer: [B, heads, slots, width], changed in place.
        source: int64 [B, K], slots to keep, ascending within a row.
        start: int64 [B], the first slot to write in each row.
    """
    rows = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
    target = start[:, None] + torch.arange(source.shape[1], device=buffer.device)
    buffer[rows, :, target] = buffer[rows, :, source]


def compact_rows(buffers: Sequence[Tensor], source: Tensor, start: Tensor, count: Tensor | None = None) -> None:
    """`move_rows` for many buffers, as all keys and values of a cache; heads and width may differ between them.

    Args:
        buffers: each [B, heads, slots, width], changed in place.
        source: int64 [B, K], slots to keep, in any order.
        start: int64 [B], the first slot to write in each row.
        count: int64 [B], move only so many in each row; None: all K.
    """
    rows = torch.arange(len(source), device=source.device)[:, None]
    entry = torch.arange(source.shape[1], device=source.device)
    target = start[:, None] + entry
    for buffer in buffers:
        moved = buffer[rows, :, source]  # [B, K, heads, width]
        if count is not None:
            moved = torch.where((entry < count[:, None])[..., None, None], moved, buffer[rows, :, target])
        buffer[rows, :, target] = moved


def bit_rows(visible: Tensor) -> Tensor:
    """Bool [..., N] as 64 bits a word, int64 [..., ⌈N/64⌉]: bit k of word w is entry 64·w + k."""
    words = -(-visible.shape[-1] // 64)
    spread = torch.nn.functional.pad(visible, (0, 64 * words - visible.shape[-1])).unflatten(-1, (words, 64))
    return (spread.long() << torch.arange(64, device=visible.device)).sum(-1)


def tree_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    bits: Tensor,
    open_slots: Tensor | None = None,
    first: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of draft nodes to [their row's cached prefix | the nodes that they may see].

    Row b holds a prefix in slots 0 … lengths[b] − 1, and node k in slot lengths[b] + k. What lies in slots that no
    query of the row sees does not matter, not even NaN. A query that sees nothing gives 0.

    Args:
        q: [B, heads, n, D].
        keys: [B, kv_heads, T, D]; query head h reads kv head h // (heads / kv_heads).
        values: [B, kv_heads, T, E].
        lengths: int64 [B].
        bits: int64 [B, n, W], which nodes each query sees (see `bit_rows`).
        open_slots: bool [B, L], false at prefix slots that hold padding; slots past L are all real.
        first: int64 [B, n], the first prefix slot that a query sees, as a sliding window has it; None: 0.
        scale: of the scores; None: 1/√D.

    Returns:
        [B, heads, n, E], in q's dtype; the arithmetic is float32.
    """
    B, heads, n, D = q.shape
    groups, T = keys.shape[1], keys.shape[2]
    slot = torch.arange(T, device=q.device)
    node = slot - lengths[:, None]  # [B, T], negative in the prefix
    word = (node.clamp(min=0) // 64).clamp(max=bits.shape[2] - 1)[:, None].expand(B, n, T)
    tree = ((bits.gather(2, word) >> (node & 63)[:, None]) & 1).bool() & (node < 64 * bits.shape[2])[:, None]
    past = (node < 0)[:, None].expand(B, n, T)
    if open_slots is not None:
        past = past & torch.nn.functional.pad(open_slots, (0, max(0, T - open_slots.shape[1])), value=True)[:, None, :T]
    if first is not None:
        past = past & (slot >= first[:, :, None])
    visible = torch.where((node < 0)[:, None], past, tree)  # [B, n, T]
    used = visible.any(1)[:, None, :, None]
    k, v = (torch.where(used, t, 0.0).float() for t in (keys, values))
    scores = q.float().unflatten(1, (groups, -1)).flatten(2, 3) @ k.mT * (D**-0.5 if scale is None else scale)
    hidden = ~visible[:, None, None].expand(B, groups, heads // groups, n, T).flatten(2, 3)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0)
    return (weights @ v).unflatten(2, (heads // groups, n)).flatten(1, 2).to(q.dtype)


class Verified(NamedTuple):
    """The path that point-mass drafts leave standing, and what comes after it."""

    stands: Tensor  # [B, N] bool
    count: Tensor  # [B], nodes that stand
    last: Tensor  # [B], the deepest of them
    token: Tensor  # [B], the next token
    log_z: Tensor  # float32 [B, N], logsumexp of each node's logits


Noise = tuple[Tensor, Tensor]  # seed and counter (or position), both int64


def draw(logits: Tensor, noise: Noise | None = None) -> Tensor:
    """One token per node, int64 [B, N]: the likeliest, or with Gumbel noise of (seed [B], position [B, N]) a sample."""
    if noise is not None:
        logits = logits + gumbel(*noise, logits.shape[-1])
    return logits.argmax(-1)


def verify_point_mass(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    ancestors: Tensor | None = None,
    noise: Tensor | Noise | None = None,
) -> Verified:
    """Draw a token after every node and descend while it is a child; the path and the next token have the law p.

    Args:
        logits: [B, N, V], log-weights of p after each node.
        tokens: int64 [B, N], negative where nothing is proposed; of siblings with one token only the first can stand.
        parents: int64 [B, N], parents before their children, the root its own.
        ancestors: bool [B, N, N], a node counts among its own; None: the draft is a chain.
        noise: None, the likeliest token; (seed [B], position [B, N]), Gumbel noise; uniform numbers float64 [B, N], the
            inverse CDF in the order "children first, then the vocabulary".
    """
    N, log_z = tokens.shape[1], logits.float().logsumexp(-1)
    index = torch.arange(N, device=tokens.device)
    siblings = (parents[:, :, None] == parents[:, None, :]) & (index < index[:, None]) & (index > 0)
    repeated = (siblings & (tokens[:, :, None] == tokens[:, None, :])).any(-1)
    if not isinstance(noise, Tensor):
        drawn = draw(logits, noise)
        stands = _standing((drawn.gather(1, parents) == tokens) & ~repeated, ancestors)
        last = torch.where(stands, index, 0).amax(-1)
        return Verified(stands, stands.sum(-1), last, drawn.gather(1, last[:, None])[:, 0], log_z)
    mass = token_mass(logits, log_z, parents, tokens) * ~repeated
    low, u = sibling_mass(mass, siblings), noise.gather(1, parents)
    stands = _standing((low <= u) & (u < low + mass), ancestors)
    last = torch.where(stands, index, 0).amax(-1)
    refused = torch.where((parents == last[:, None]) & (index > 0), tokens, -1)
    taken = torch.where(refused >= 0, mass, 0.0).sum(-1)
    rest = remaining(noise.gather(1, last[:, None])[:, 0], taken)
    token = residual_sample(logits[torch.arange(len(last), device=last.device), last], rest, refused=refused)
    return Verified(stands, stands.sum(-1), last, token, log_z)


def _standing(match: Tensor, ancestors: Tensor | None) -> Tensor:
    """Nodes whose whole line of ancestors matched; the root always does."""
    match[:, 0] = True
    if ancestors is None:
        return match.cumprod(1).bool()
    return (match[:, None, :] | ~ancestors).all(-1)


def token_mass(logits: Tensor, log_z: Tensor, nodes: Tensor, tokens: Tensor) -> Tensor:
    """Probability, float64, of tokens [B, K] or [B, K, M] after nodes [B, K]; 0 for a negative token."""
    rows = torch.arange(len(nodes), device=nodes.device)[:, None]
    if tokens.dim() > nodes.dim():
        rows, nodes = rows[..., None], nodes[..., None]
    log_p = logits[rows, nodes, tokens.clamp(min=0)].float() - log_z[rows, nodes]
    return log_p.double().exp() * (tokens >= 0)


def residual_sample(
    p: Tensor,
    u: Tensor | Noise,
    q: Tensor | None = None,
    refused: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """A draw from what p has left over once drafts were refused: (p − q)+, or p without them; p if that is nothing.

    Args:
        p: logits [B, V].
        u: float64 [B] in [0, 1), or (seed, counter), int64 [B] each, that `uniform` makes them of.
        q: logits [B, V] of the law that the refused draft was drawn from.
        refused: int64 [B, K], tokens that were refused, negative for none; instead of q.
        rows: bool [B], where false nothing was refused and the draw is from p; None: everywhere true.

    Returns:
        int64 [B], by inverse CDF in float64.
    """
    weights = p.double().softmax(-1)
    left = weights
    if refused is not None:
        gone = torch.zeros_like(weights).scatter_add_(1, refused.clamp(min=0), (refused >= 0).to(weights.dtype))
        left = torch.where(gone > 0, 0.0, weights)
        left = torch.where(left.sum(-1, keepdim=True) > 0, left, weights)
    elif q is not None:
        left = positive_residual(weights, q.double().softmax(-1))
    if rows is not None:
        left = torch.where(rows[:, None], left, weights)
    return categorical(left, uniform(*u) if isinstance(u, tuple) else u)


def lantern_accept(
    logits: Tensor,
    log_z: Tensor,
    nodes: Tensor,
    x: Tensor,
    q_x: Tensor,
    near: Tensor,
    delta: float | None = None,
    lam: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The chance to keep x [B, K], strictly and with the mass that x may borrow of its neighbours (`borrowed`).

    Args:
        logits: [B, N, V] of p, with their logsumexp `log_z` [B, N].
        nodes: int64 [B, K], the node after which each x was drafted.
        x: int64 [B, K], negative where nothing was drafted.
        q_x: float64 [B, K], its probability in the draft's law.
        near: int32 [V, k], the nearest codes of each, nearest first.
        delta, lam: bound of what is borrowed: delta, or (lam − 1)·p(x); exactly one of them.

    Returns:
        float64 [B, K] twice.
    """
    p_x = token_mass(logits, log_z, nodes, x)
    masses = token_mass(logits, log_z, nodes, near[x.clamp(min=0)].long())
    more = borrowed(masses, delta if lam is None else (lam - 1) * p_x)
    return exact_ratio(p_x, q_x), torch.where(p_x > 0, exact_ratio(p_x + more, q_x), 0.0)


def logit_window(logits: Tensor, nodes: Tensor, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """`rank_window` of x [B, K] in the order of the logits [B, N, V] at nodes [B, K]; the ids come in any order."""
    rows = torch.arange(len(nodes), device=nodes.device)[:, None]
    return rank_window(logits[rows, nodes].double().softmax(-1), x.clamp(min=0), size)


def group_accept(
    p: tuple[Tensor, Tensor, Tensor],
    q: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    window: tuple[Tensor, Tensor],
    gap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The chance to keep x [B, K], strictly and as min(1, p(C)/q(C)) with C the tokens around x in the order of p.

    Args:
        p, q: logits [B, N, V], their logsumexp [B, N], and the node [B, K] at which each x is looked up.
        x: int64 [B, K], negative where nothing was drafted.
        window: of `logit_window`.
        gap: leave out tokens whose probability differs from p(x) by this or more.
    """
    (ids, member), p_x = window, token_mass(*p, x)
    p_c, q_c = token_mass(*p, ids), token_mass(*q, ids)
    if gap is not None:
        member = member & ((p_c - p_x[..., None]).abs() < gap)
    group = exact_ratio(*(torch.where(member, t, 0.0).sum(-1) for t in (p_c, q_c)))
    return exact_ratio(p_x, token_mass(*q, x)), torch.where(p_x > 0, group, 0.0)


def gaussian_path(
    states: Tensor,
    noise: Tensor,
    log_std_q: Tensor,
    out: Tensor,
    table: Tensor,
    out_null: Tensor | None = None,
    guidance: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """log P/Q of whole denoising paths: log-densities of the draft's own steps under the target's kernels, summed.

    Step k goes from states[:, k] to states[:, k + 1]; the draft drew it with `noise` and standard deviation
    temperature·exp(log_std_q). The target's kernel there has the mean and the learned-range variance that DDPM makes of
    the network's output: ε and v, the first guided where there are two outputs, the second always of `out`.

    Args:
        states: [R, K + 1, C], the path that the draft took, noise first.
        noise: [R, K, C], standard normal numbers.
        log_std_q: [R, K, C].
        out: [R, K, 2·C], the target's network at states[:, :-1]: ε, then v.
        table: float32 [K, 6]: √ᾱ, √(1 − ᾱ), the weights of x̂₀ and x in the mean, log β and log β̃ of each step.
        out_null: [R, K, ≥ C], the same without the condition; ε = ε₀ + guidance·(ε − ε₀).
        guidance: float32 [R].
        temperature: scales the noise of both kernels.

    Returns:
        float32 [R], summed in float32.
    """
    C = states.shape[2]
    x, after, eps = states[:, :-1].float(), states[:, 1:].float(), out[..., :C].float()
    if out_null is not None and guidance is not None:
        null = out_null[..., :C].float()
        eps = null + guidance.float()[:, None, None] * (eps - null)
    root, rest, to_clean, to_x, log_beta, log_tilde = (t[:, None] for t in table.float().unbind(1))
    mean = to_clean * (x - rest * eps) / root + to_x * x
    share = (out[..., C : 2 * C].float() + 1) / 2
    log_std = (share * log_beta + (1 - share) * log_tilde) / 2
    z = (after - mean) * torch.exp(-log_std) / temperature
    return (0.5 * (noise.float() ** 2 - z**2) + log_std_q.float() - log_std).sum((1, 2))
