"""Feature drafters by the letter: one text, row after row, head after head, nothing kept between rounds, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mmspec.protocols import TargetInfo
from mmspec.types import Categorical, Prompt

H, V, HEADS, KV = 16, 40, 4, 2
SHAPE = {"hidden": H, "intermediate": 24, "heads": HEADS, "kv_heads": KV, "vocab": V}
SWITCHES: dict[str, dict[str, Any]] = {
    "published": {},
    "biases": {"qkv_bias": True, "input_norm": True, "rope_theta": 1e6, "kv_heads": HEADS},
    "zoo": {"input_norm": True, "embed_norm": True, "out_norm": True, "fc_bias": False},
}
TEXTS = {  # k ≥ 1: a token of the k-th image or frame
    "text only": [0] * 7,
    "image first": [1, 1, 1, 0, 0, 0],
    "image last": [0, 0, 1, 1, 1],
    "two images": [0, 1, 1, 1, 0, 0, 2, 2, 0, 0, 0],
    "touching": [0, 0, 1, 1, 1, 2, 2, 2, 2, 0, 0],
    "video": [0, 1, 1, 2, 2, 3, 3, 0, 4, 4, 0, 0, 0],
    "tiny image": [0, 0, 0, 0, 1, 0, 0, 0],
    "one token": [0],
}

Row = tuple[Tensor, float]  # the residual that enters the layer, and its rotary position
More = Callable[[Tensor, Tensor], Tensor]  # the residual of a row to come, from its embedding and feature
Enter = Callable[[Any, Tensor, Tensor, list[int]], tuple[list[Row], More]]  # drafter, e_{j+1}, h_j, visual of e_{j+1}


def weights(drafter: Any) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in drafter.state_dict().items()}


def dense(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = w[f"{name}.weight"] @ x
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def rms(w: dict[str, Tensor], name: str, x: Tensor, eps: float) -> Tensor:
    """As it is where the drafter has no such norm."""
    return x * (x.square().mean() + eps).rsqrt() * w[f"{name}.weight"] if f"{name}.weight" in w else x


def turned(x: Tensor, position: float, theta: float) -> Tensor:
    """Rotary position of one head: dimension i turns with i + D/2, by position·θ^(−2i/D)."""
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = position * theta ** (-i / half)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def looked(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One head of softmax attention."""
    scores = torch.stack([q @ k for k in keys]) / math.sqrt(len(q))
    return sum(p * v for p, v in zip(scores.softmax(0), values, strict=True))  # type: ignore[return-value]


def layer(drafter: Any, rows: list[Row]) -> Tensor:
    """The last row's output, as the feature it stands for; every row sees itself and the ones before."""
    w, c = weights(drafter), drafter.config
    D = c.hidden // c.heads
    heads = [dense(w, "block.qkv", rms(w, "input_norm", x, c.norm_eps)).split(D) for x, _ in rows]
    (x, position), out = rows[-1], []
    for head in range(c.heads):
        at = c.heads + head * c.kv_heads // c.heads
        keys = [turned(h[at], place, c.rope_theta) for h, (_, place) in zip(heads, rows, strict=True)]
        out.append(looked(turned(heads[-1][head], position, c.rope_theta), keys, [h[at + c.kv_heads] for h in heads]))
    x = x + dense(w, "block.out", torch.cat(out))
    gate, up = dense(w, "block.gate_up", rms(w, "block.mlp_norm", x, c.norm_eps)).chunk(2)
    return rms(w, "out_norm", x + dense(w, "block.down", gate * up * torch.sigmoid(gate)), c.norm_eps)


def lively(kind: Any, seed: int = 0, **options: Any) -> Any:
    """A drafter with random weights, such that every input matters, in float64."""
    torch.manual_seed(seed)
    made = kind(kind.Config(**{**SHAPE, **options})).double().eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            scale = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 1.0
            weight.copy_(torch.randn_like(weight) * scale + ("norm" in name))
    return made.fit(TargetInfo("toy", V, H, H, 2, torch.device("cpu"), torch.float64), {"depth": 3, "width": 1})


@dataclass
class Text:
    """A prompt: per token an embedding, a feature and the medium it belongs to."""

    embeds: Tensor  # [L, H]
    features: Tensor  # [L, H]
    visual: list[int]


def texts(seed: int = 0) -> list[Text]:
    g = torch.Generator().manual_seed(seed)
    return [Text(*torch.randn(2, len(v), H, generator=g, dtype=torch.float64), v) for v in TEXTS.values()]


class Target:
    """A table of embeddings and a head that keeps what it is shown."""

    streams, guidance, weighs = 1, None, False

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(5)
        self.table, self.out = torch.randn(V, H, generator=g).double(), torch.randn(H, V, generator=g).double()
        self.shown: list[Tensor] = []

    def embed(self, ids: Tensor) -> Tensor:
        return self.table[ids]

    def head(self, hidden: Tensor) -> Tensor:
        self.shown.append(hidden)
        return hidden @ self.out


def prompt(many: list[Text]) -> Prompt:
    L = max(len(t.visual) for t in many)
    embeds, hidden = (torch.stack([torch.cat([torch.full((L - len(t.visual), H), 7.0).double(), getattr(t, name)])
                                   for t in many]) for name in ("embeds", "features"))  # fmt: skip
    visual = torch.tensor([[0] * (L - len(t.visual)) + t.visual for t in many])
    valid = torch.tensor([[False] * (L - len(t.visual)) + [True] * len(t.visual) for t in many])
    return Prompt(torch.zeros_like(visual), embeds, hidden, visual, valid)


def session_of(pending: list[int]) -> Any:
    """As a drafter sees it behind the prefill: of each row the token that the target drew."""
    B = len(pending)
    one = torch.ones(B, dtype=torch.long)
    return SimpleNamespace(pending=torch.tensor(pending), emitted=one, seeds=torch.arange(B))


def round_of(tokens: Tensor, hidden: Tensor, counts: tuple[int, ...], root: Tensor) -> Any:
    """A round as a drafter reads it: so many of a row's tokens stood, `hidden` is after all, `root` was drawn."""
    acceptance = SimpleNamespace(count=torch.tensor(counts), next_token=root)
    scores = SimpleNamespace(hidden=hidden, p=Categorical(ids=tokens))
    kept = torch.arange(max(counts)).expand(len(counts), -1)
    drafted = SimpleNamespace(tokens=tokens)
    return SimpleNamespace(draft=drafted, scores=scores, acceptance=acceptance, kept=kept, counts=counts)


def drafts_as_written(drafter: Any, many: list[Text], enter: Enter, apart: bool = False) -> None:
    """Two rounds of chains, the second after ragged acceptance: every feature shown to the head is the letter's.

    Args:
        apart: prompts are read one by one, and their memories joined, then put in another order.
    """
    target, B = Target(), len(many)
    session = session_of([0] * B)
    if apart:
        memories = [drafter.start(session, target, prompt([text])) for text in many]
        joined = memories[0]
        for other in memories[1:]:
            joined = joined.join(other)
        order = list(range(B))[::-1]
        session.memory, many = joined.select(torch.tensor(order)), [many[b] for b in order]
    else:
        session.memory = drafter.start(session, target, prompt(many))
    g = torch.Generator().manual_seed(9)
    root, tokens = torch.randint(V, (B,), generator=g), torch.zeros(B, 1, dtype=torch.long)
    hidden = torch.stack([text.features[-1:] for text in many])
    read: list[list[tuple[int, Tensor]]] = [[] for _ in many]  # (token, feature before it) since the prompt
    for counts in ((1,) * B, tuple(1 + b % 4 for b in range(B))):
        session.pending, session.last = root, round_of(tokens, hidden, counts, root)
        for b, count in enumerate(counts):
            follow = [*tokens[b, 1:count].tolist(), int(root[b])]
            read[b] += [(token, hidden[b, i]) for i, token in enumerate(follow)]
        target.shown.clear()
        tokens = drafter.propose(session, target).tokens
        for b, text in enumerate(many):
            _follows(drafter, target, text, read[b], tokens[b].tolist(), b, enter)
        root, hidden = torch.randint(V, (B,), generator=g), torch.randn(B, tokens.shape[1], H, generator=g).double()


def _follows(
    drafter: Any, target: Target, text: Text, read: list[tuple[int, Tensor]], drafted: list[int], b: int, enter: Enter
) -> None:
    rows, more = enter(drafter, text.embeds[1:], text.features[:-1], text.visual[1:])
    place = len(text.visual) - 1
    for token, feature in read:
        rows.append((more(target.table[token], feature), place))
        place += 1
    for shown, token in zip(target.shown, drafted[1:], strict=True):
        feature = layer(drafter, rows)
        torch.testing.assert_close(shown[b, 0], feature, rtol=1e-5, atol=1e-5)
        assert token == (feature @ target.out).argmax()
        rows.append((more(target.table[token], feature), place))
        place += 1


def unrolls_as_written(drafter: Any, many: list[Text], enter: Enter, compressed: bool, steps: int = 3) -> int:
    """Training rows are those of decoding that has read up to there; returns how many were looked at."""
    many = [text for text in many if len(text.visual) > 1]
    T, looked_at = max(len(t.visual) for t in many) - 1, 0
    embeds, features = (torch.full((len(many), T, H), 7.0).double() for _ in range(2))
    visual, valid = torch.zeros(len(many), T, dtype=torch.long), torch.zeros(len(many), T, dtype=torch.bool)
    for b, text in enumerate(many):
        n = len(text.visual) - 1
        embeds[b, :n], features[b, :n] = text.embeds[1:], text.features[:-1]
        visual[b, :n], valid[b, :n] = torch.tensor(text.visual[1:]), True
    with torch.no_grad():
        out = torch.stack(drafter(embeds, features, visual, valid, steps))
    if compressed:
        assert not out[:, visual > 0].any()
    for b, text in enumerate(many):
        seen = text.visual[1:]
        for j in (j for j in range(len(seen) - steps + 1) if not any(seen[j : j + steps])):
            rows, more = enter(drafter, text.embeds[1 : j + 2], text.features[: j + 1], seen[: j + 1])
            for step in range(steps):
                feature = layer(drafter, rows)
                torch.testing.assert_close(out[step, b, j], feature, rtol=1e-5, atol=1e-5)
                if step + 1 < steps:
                    rows.append((more(embeds[b, j + step + 1], feature), j + step + 1))
            looked_at += 1
    return looked_at
