"""EAGLE on guided pictures: two streams in one memory, rows and columns, static trees drawn or ranked, training."""

from __future__ import annotations

import itertools
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import table_targets
import tiny_llamagen
import torch
from stopped import goes_on
from torch import Tensor
from transcribed_drafters import round_of, session_of
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

import mmspec
from mmspec.app import cli
from mmspec.app.prompt import read_prompts
from mmspec.drafters import static_trees
from mmspec.drafters.blocks import Rope, rotate
from mmspec.drafters.eagle import EagleConfig, EagleDrafter
from mmspec.drafters.plain import Plain
from mmspec.kernels import reference as ops
from mmspec.loop import decode, start
from mmspec.models import llamagen
from mmspec.pipelines.host.processors.guidance import Guidance
from mmspec.pipelines.host.processors.table import Processors
from mmspec.pipelines.host.training import Accelerator
from mmspec.pipelines.image_teacher import ImageTeacher
from mmspec.pipelines.target.llamagen import Condition, LlamaGenTarget
from mmspec.pipelines.target.model import Request
from mmspec.pipelines.target.noise import CounterNoise
from mmspec.pipelines.untrained import build_for_pictures
from mmspec.protocols import TargetInfo
from mmspec.session import Row, Session
from mmspec.train import data
from mmspec.train.distil import Distillation, losses
from mmspec.train.recipes import Recipe
from mmspec.types import FINAL, Categorical, Prompt, Scores

CPU = torch.device("cpu")
GRID = tiny_llamagen.SIZES["grid"]
STATIC = [name for name in static_trees.SHAPES if name != "chain"]


def drafter(seed: int = 0, **options: Any) -> EagleDrafter:
    """Random weights, lively enough that every input matters; shapes of the tiny LlamaGen."""
    torch.manual_seed(seed)
    shape = {"hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "vocab": 64}
    fixed = {"rope": "2d", "grid": GRID, "embed_norm": True, "input_norm": True, "out_norm": True}
    made = EagleDrafter(EagleConfig.of({**shape, **fixed, **options}))
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(2.0 if weight.dim() > 1 else 1.0)
    return made.eval()


def fitted(made: EagleDrafter, **options: Any) -> EagleDrafter:
    c = made.config
    where = {"grid": c.grid, "rope_theta": c.rope_theta} if c.grid else {}
    return made.fit(TargetInfo("toy", c.vocab, c.hidden, c.hidden, 2, CPU, torch.float32, **where), options)


# -- the tree shapes -------------------------------------------------------------------------------------------------

COUNTS = {  # nodes per depth, as recounted from the authors' lists
    "chain": [1, 1, 1, 1, 1],
    "mc_sim_7b_63": [4, 8, 8, 3, 2],
    "mc_sim_7b_63_balanced": [3, 8, 9, 3, 2],
    "reverse_balanced_25": [3, 4, 6, 5, 7],
    "naive_extend_57": [5, 13, 16, 14, 9],
}


@pytest.mark.parametrize("name", static_trees.SHAPES)
def test_published_shapes(name: str) -> None:
    plan = static_trees.plan(name, 5, CPU)
    assert torch.bincount(plan.tree.depth[0])[1:].tolist() == COUNTS[name]
    assert plan.tree.is_chain == (name == "chain")


@pytest.mark.parametrize("name", static_trees.SHAPES)
@pytest.mark.parametrize("draws", [False, True])
def test_each_node_has_its_rank_among_its_parents_children(name: str, draws: bool) -> None:
    """Against a literal reading: follow each path, take the child of that rank; q lacks the siblings before it."""
    V, B, plan = 30, 3, static_trees.plan(name, 5, CPU)

    def distribution(path: list[int]) -> Tensor:
        g = torch.Generator().manual_seed(hash(tuple(path)) % 2**31)
        logits = torch.randn(V, generator=g, dtype=torch.float64)
        return logits.masked_fill(torch.arange(V) > 24, -torch.inf).log_softmax(-1)

    lines: list[list[list[int]]] = [[[] for _ in range(B)]]

    def expand(tokens: Tensor, came_from: Tensor) -> Tensor:
        before = lines[-1] if len(lines) > 1 else [[[]] for _ in range(B)]
        here = [[[*before[b][c], t] for t, c in zip(tokens[b].tolist(), came_from[b].tolist(), strict=True)]
                for b in range(B)]  # fmt: skip
        lines.append(here)
        return torch.stack([torch.stack([distribution(path) for path in row]) for row in here])

    g = torch.Generator().manual_seed(5)
    gumbel = torch.randn(5, B, 1, V, generator=g, dtype=torch.float64) if draws else None
    noise = None if gumbel is None else gumbel.__getitem__
    tokens, q = static_trees.fill(distribution([]).expand(B, V), expand, plan, noise)
    assert (q is not None) == draws
    for b in range(B):
        found: dict[tuple[int, ...], list[int]] = {(): []}
        for node, path in enumerate(
            sorted(static_trees.nodes(static_trees.SHAPES[name]), key=lambda n: (len(n), n)), 1
        ):
            above = found[path[:-1]]
            order = distribution(above) + (0 if gumbel is None else gumbel[len(above), b, 0])
            ranked = order.argsort(descending=True).tolist()
            found[path] = [*above, ranked[path[-1]]]
            assert tokens[b, node - 1] == found[path][-1]
            if q is not None:
                left = distribution(above)
                left[ranked[: path[-1]]] = -torch.inf
                assert torch.allclose(q[b, node].softmax(-1), left.softmax(-1))


def test_what_the_law_excludes_is_a_hole() -> None:
    distribution = torch.tensor([0.0, -torch.inf, 0.5, -torch.inf])
    tokens, q = static_trees.fill(
        distribution.expand(2, 4),
        lambda t, _: distribution.expand(2, t.shape[1], 4),
        static_trees.plan("mc_sim_7b_63", 5, CPU),
        lambda level: torch.zeros(2, 1, 4),
    )
    assert tokens[:, :4].tolist() == [[2, 0, -1, -1]] * 2
    assert q is not None and not q.softmax(-1).isnan().any()


def test_a_tree_of_the_users_own() -> None:
    made = fitted(drafter(), tree=[[0, 0], [1], [0, 1]])  # prefixes may be left out
    assert made.options.tree == ((0,), (1,), (0, 0), (0, 1))
    assert (made.options.depth, made.options.branches, made.nodes) == (2, 2, 5)
    named = [list(path) for path in static_trees.nodes(static_trees.SHAPES["mc_sim_7b_63"])]
    theirs, mine = (static_trees.plan(fitted(drafter(), tree=t).options.tree, 5, CPU) for t in ("mc_sim_7b_63", named))
    assert torch.equal(theirs.tree.parents, mine.tree.parents) and theirs.tree.families == mine.tree.families


def test_what_is_asked_for_comes_before_what_is_recommended() -> None:
    made = drafter(tree="naive_extend_57", draws=True)
    assert (made.options.tree, made.options.draws, made.nodes) == ("naive_extend_57", True, 58)
    chosen = fitted(made, depth=3, width=2, size=6).options
    assert (chosen.tree, chosen.draws, chosen.size) == ("dynamic", False, 6)
    assert fitted(made, width=1, depth=3).options.tree == "chain" and fitted(made, width=1, depth=3).nodes == 4
    assert fitted(made, tree="chain", depth=7, draws=True).nodes == 8


# -- rotary positions ------------------------------------------------------------------------------------------------


def test_rows_and_columns_turn_as_in_llamagen() -> None:
    """The same angles as the authors' table, which pairs neighbours where ours pairs halves; zero in the prefix."""
    g, D = torch.Generator().manual_seed(0), 16
    x = torch.randn(2, 3, 7, D, generator=g)
    place = torch.tensor([[-4, -1, 0, 1, 5, 10, 15]]).expand(2, -1)
    pairs = torch.arange(D).view(D // 2, 2).T.flatten()  # even dimensions first
    theirs = llamagen.rotate(x, llamagen.turns(4, D, 10000.0)[place.clamp(min=-1) + 1])
    assert torch.allclose(rotate(x[..., pairs], place, Rope(rope="2d", grid=4)), theirs[..., pairs], atol=1e-6)
    last, beyond = (rotate(x, torch.full((2, 7), n), Rope(rope="2d", grid=4)) for n in (15, 99))
    assert torch.equal(last, beyond)
    angle = (5 // 4) * 10000.0 ** -(2 / 8)  # literally: dimension 1 of place 5 turns with its row
    turned = x[0, 0, 4, 1] * torch.tensor(angle).cos() - x[0, 0, 4, 9] * torch.tensor(angle).sin()
    assert torch.allclose(rotate(x, place, Rope(rope="2d", grid=4))[0, 0, 4, 1], turned)


# -- streams ---------------------------------------------------------------------------------------------------------


class Recorder:
    """A target of S streams that draws nothing: embeddings by table, the head keeps what it was shown."""

    features = (FINAL,)
    guidance = None
    weighs = False

    def __init__(self, streams: int, table: Tensor) -> None:
        self.streams, self.table = streams, table
        self.shown: list[Tensor] = []

    def embed(self, ids: Tensor) -> Tensor:
        return self.table[ids]

    def head(self, hidden: Tensor) -> Tensor:
        self.shown.append(hidden)
        return torch.linspace(0, 1, 64).roll(len(self.shown)).expand(*hidden.shape[:-1], 64)  # the same for anybody


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", [{"width": 1, "depth": 4}, {"depth": 3, "width": 3, "size": 9},
                                     {"tree": "reverse_balanced_25"}])  # fmt: skip
def test_two_streams_are_two_drafters_run_apart(options: dict[str, Any], padded: bool) -> None:
    """Prompt, a first round and, after a ragged one, a second: every feature that reaches the head."""
    g, B, L, H = torch.Generator().manual_seed(3), 3, 5, 32
    table = torch.randn(64, H, generator=g)
    made = fitted(drafter(), **options)
    embeds, hidden = (torch.randn(2, B, L, H, generator=g) for _ in range(2))
    after = torch.randn(2, B, 4, H, generator=g)
    valid = torch.ones(B, L, dtype=torch.bool)
    valid[1, :2] = not padded

    def run(streams: list[int]) -> list[Tensor]:
        def side(t: Tensor) -> Tensor:
            return torch.cat([t[s] for s in streams], -1)

        target = Recorder(len(streams), table)
        ids = torch.zeros(B, L, dtype=torch.long)
        session = session_of([3, 4, 5])
        session.memory = made.start(session, target, Prompt(ids, side(embeds), side(hidden), ids > 0, valid))  # type: ignore
        for counts in ((1, 1, 1), (3, 1, 4)):
            session.last = round_of(torch.arange(4).expand(B, 4) + 7, side(after), counts, session.pending)
            made.propose(session, target)  # type: ignore[arg-type]
        return target.shown

    both, cond, uncond = run([0, 1]), run([0]), run([1])
    assert len(both) == len(cond) > 4
    for ours, c, u in zip(both, cond, uncond, strict=True):
        torch.testing.assert_close(ours, torch.cat([c, u], -1), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(cond[-1], uncond[-1], atol=0.1)


def test_a_head_of_its_own_knows_no_guidance() -> None:
    own = drafter(draft_vocab=10, parallel_norm=True, fc_bias=False, features=(0, 1))
    nothing = torch.zeros(1, 2, 64)
    prompt = Prompt(torch.zeros(1, 2, dtype=torch.long), nothing, nothing, torch.zeros(1, 2) > 0, torch.ones(1, 2) > 0)
    with pytest.raises(ValueError, match="supports no guidance"):
        own.start(None, Recorder(2, torch.zeros(64, 32)), prompt)  # type: ignore[arg-type]


# -- token for token -------------------------------------------------------------------------------------------------


@torch.no_grad()
def drawn(how: str, guess: Any, rows: list[int], scale: float = 3.0) -> tuple[list[list[int]], Any]:
    """Tokens of some rows (a row's number is its seed and decides its prompt), and what happened."""
    model = tiny_llamagen.transformer("text", vocab=64)
    warpers = Processors(LogitsProcessorList([TemperatureLogitsWarper(0.9), TopKLogitsWarper(20)]))
    request = partial(Request, warpers, how != "greedy", CounterNoise() if how == "seed-exact" else None)
    target = LlamaGenTarget(model, guess.features, Guidance(scale) if scale > 1 else None)
    P = tiny_llamagen.PREFIX
    noise = [torch.Generator().manual_seed(r) for r in rows]
    condition = torch.stack([torch.randn(P, tiny_llamagen.WIDTH, generator=g) for g in noise])
    valid = torch.arange(P) >= torch.tensor(rows)[:, None] % P  # left padding of different length
    everyone = [Row([], 0, GRID**2, r, index=i, request=request()) for i, r in enumerate(rows)]
    session, _ = start(target, guess, list(everyone), Condition(condition, valid))
    for _ in decode(session, target, guess):  # type: ignore[arg-type]
        pass
    return [row.tokens for row in everyone], session.stats


GUESSES: dict[str, dict[str, Any]] = {
    "dynamic": {"depth": 4, "width": 3, "size": 14},
    "chain": {"depth": 4, "width": 1},
    "drawn chain": {"tree": "chain", "depth": 3, "draws": True},
    **{name: {"tree": name} for name in STATIC},
    "own tree": {"tree": [[0], [0, 0], [1], [2], [2, 0]]},
    "naive_extend_57, drawn": {"tree": "naive_extend_57", "draws": True},
}


@pytest.mark.parametrize("how", ["greedy", "seed-exact"])
@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.every(4)
def test_the_same_tokens_as_plain_decoding(how: str, guess: str) -> None:
    """Four ragged rows that end at different times, against each of them decoded plainly and alone."""
    rows = [3, 0, 11, 7]
    alone = [drawn(how, Plain(), [row])[0][0] for row in rows]
    together, stats = drawn(how, fitted(drafter(), **GUESSES[guess]), rows)
    assert together == alone
    if how == "seed-exact" or "chain" not in guess:  # one random guess per token meets no likeliest token
        assert stats.accepted > 0, "some drafts stand, so that their path was walked"
    assert len({tuple(tokens) for tokens in alone}) == len(rows)


def test_one_stream_where_nothing_is_guided() -> None:
    plain, _ = drawn("seed-exact", Plain(), [2, 9], scale=1.0)
    assert drawn("seed-exact", fitted(drafter(), tree="mc_sim_7b_63"), [2, 9], scale=1.0)[0] == plain


def test_knowing_the_targets_noise_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that ignores it proposes the likeliest tokens, of which the target's fixed draw is seldom one."""
    made, rows = fitted(drafter(), depth=3, width=1), list(range(16))
    _, with_noise = drawn("seed-exact", made, rows)
    monkeypatch.setattr(LlamaGenTarget, "weighs", False)
    _, without = drawn("seed-exact", made, rows)
    assert with_noise.accepted > 1.5 * without.accepted


# -- the distribution ------------------------------------------------------------------------------------------------


class Toy:
    """A guided target of two streams whose distribution depends on the token before: one table of features per
    stream."""

    device = CPU
    features = (FINAL,)
    inference = torch.inference_mode
    streams = 2
    guidance = None
    weighs = False

    def __init__(self, vocab: int, hidden: int, seed: int, scale: float = 2.0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.table = torch.randn(2, vocab, hidden, generator=g)
        self.input = torch.randn(vocab, hidden, generator=g)
        self.output = 0.1 * torch.randn(hidden, vocab, generator=g)
        self.scale = scale

    def embed(self, ids: Tensor) -> Tensor:
        return self.input[ids]

    def head(self, hidden: Tensor) -> Tensor:
        c, u = (half @ self.output for half in hidden.chunk(2, -1))
        return u + self.scale * (c - u)

    def hidden(self, tokens: Tensor) -> Tensor:
        return torch.cat([self.table[0, tokens], self.table[1, tokens]], -1)

    def prefill(self, session: Session, inputs: Tensor, nodes: int) -> tuple[Prompt, Scores]:
        session.cache, hidden = table_targets.Nothing(), self.hidden(inputs)
        embeds = torch.cat([self.embed(inputs)] * 2, -1)
        scores = Scores(Categorical(self.head(hidden[:, -1:])), hidden[:, -1:])
        return Prompt(inputs, embeds, hidden, torch.zeros_like(inputs), inputs >= 0), scores

    def score(self, session: Any, draft: Any) -> Scores:
        hidden = self.hidden(draft.tokens.clamp(min=0))
        return Scores(Categorical(self.head(hidden)), hidden)

    def commit(self, *_: Any) -> None:
        return None

    def joint(self, start: int, length: int) -> Tensor:
        """Probability of each text, by the chain rule."""
        p = self.head(self.hidden(torch.arange(len(self.input)))).double().softmax(-1)
        texts = itertools.product(range(len(p)), repeat=length)
        return torch.stack(
            [torch.stack([p[a, b] for a, b in itertools.pairwise((start, *text))]).prod() for text in texts]
        )


@torch.no_grad()
def decoded(target: Toy, guess: EagleDrafter, rows: int, length: int) -> tuple[Tensor, Any]:
    prompt = torch.tensor([[1, 0]]).expand(rows, 2)
    everyone = [Row([], 0, length, 31 * r + 7) for r in range(rows)]
    session, _ = start(target, guess, list(everyone), prompt)
    for _ in decode(session, target, guess):
        pass
    return torch.tensor([row.tokens for row in everyone]), session.stats


def toy_drafter(kind: type[EagleDrafter] = EagleDrafter, **options: Any) -> EagleDrafter:
    torch.manual_seed(2)
    made = kind(EagleConfig(8, 12, 2, 2, 4, out_norm=True, input_norm=True))
    return fitted(made, **options)


class Biased(EagleDrafter):
    """Draws, but says nothing of its distribution: taken for point masses that nobody drew, which is wrong with
    siblings."""

    def propose(self, session: Any, target: Any) -> Any:
        draft = super().propose(session, target)
        assert draft.q is not None
        flat = Categorical(torch.zeros_like(draft.q.logits))
        return replace(draft, q=flat)


@pytest.mark.parametrize(
    ("options", "kind", "sound"),
    [
        ({"tree": "mc_sim_7b_63", "draws": True}, EagleDrafter, True),
        ({"tree": "reverse_balanced_25", "draws": True}, EagleDrafter, True),
        ({"tree": "chain", "depth": 2, "draws": True}, EagleDrafter, True),
        ({"tree": "mc_sim_7b_63"}, EagleDrafter, True),
        ({"depth": 3, "width": 2, "size": 6}, EagleDrafter, True),
        ({"tree": "mc_sim_7b_63", "draws": True}, Biased, False),
    ],
)
@pytest.mark.every(4)
def test_the_joint_law_of_three_tokens(options: dict[str, Any], kind: type[EagleDrafter], sound: bool) -> None:
    """All 64 texts, decoded in rounds, against the chain rule; a draft distribution that is not the true one stands
    out."""
    target = Toy(4, 8, seed=1)
    samples, stats = decoded(target, toy_drafter(kind, **options), 6000, 3)
    assert stats.accepted > 1000
    excess = table_targets.excess(samples, target.joint(0, 3), 4)
    assert (excess < 5) if sound else (excess > 20), excess


# -- training --------------------------------------------------------------------------------------------------------

RECIPE = Recipe(
    steps=8, batch=4, lr=5e-3, clip=1.0, muon=True, token_weight=1.0, feature_weight=0.2, unroll=3, sampled=1.0,
    overlap=True, held_out=3,
)  # fmt: skip


def distilling(out: Path, recipe: Recipe = RECIPE, prompts: int = 12) -> Distillation:
    pipe = tiny_llamagen.pipeline("text")
    pipe.transformer.output.weight.data.mul_(0.2)  # distributions as broad as those of pictures
    torch.manual_seed(1)
    made = build_for_pictures("eagle", pipe, intermediate=24)
    teacher = ImageTeacher(pipe, made.features)
    teacher.__enter__()
    return Distillation(made, teacher, tiny_llamagen.samples(prompts), recipe, out, accelerator=Accelerator())


def test_the_trace_is_what_drawing_saw(tmp_path: Path) -> None:
    """Guided logits of the trace, along the pipeline's own tokens, are those it drew from; both streams are there."""
    run = distilling(tmp_path)
    samples = run.samples[:3]
    torch.manual_seed(4)
    answers = run.teacher.answers(samples, 0, 0.0)
    trace = run.teacher.trace(samples, answers)
    P = tiny_llamagen.PREFIX
    assert trace.final.shape == (3, P + GRID**2, 64) and trace.start == 1 - P
    assert not torch.allclose(*trace.final.chunk(2, -1))
    torch.manual_seed(4)
    seeds = torch.randint(2**62, (3,))
    noise = ops.gumbel(seeds, torch.arange(GRID**2).expand(3, -1), 64)
    logits = run.teacher.head(trace.final[:, P - 1 : -1])  # top-k 1000 keeps all 64
    assert (logits + noise).argmax(-1).tolist() == answers


@torch.no_grad()
def test_training_unroll_equals_decoding(tmp_path: Path) -> None:
    """Step i at row j is the feature from which the chain's token i after row j is drafted, positions included."""
    run = distilling(tmp_path)
    samples, P, depth = run.samples[:2], tiny_llamagen.PREFIX, 3
    answers = run.teacher.answers(samples, 0, 0.0)
    trace = run.teacher.trace(samples, answers)
    read = trace.embeds[:, 1:], trace.features[:, :-1], trace.visual[:, 1:], trace.valid[:, :-1]
    unrolled = run.drafter(*read, depth, trace.start)
    shown: list[Tensor] = []
    target, made = run.teacher.target, fitted(run.drafter, width=1, depth=depth)
    table, ids = target.embed, torch.tensor(answers)
    fed = SimpleNamespace(streams=2, weighs=False, embed=lambda t: table(t), head=lambda f: shown.append(f) or force())

    def force() -> Tensor:  # draft what the target drew, so that the unrolled embeddings are the drafted ones
        return 9.0 * torch.nn.functional.one_hot(ids[:, len(shown) : len(shown) + 1], 64)

    prompt = Prompt(
        trace.ids[:, :P], trace.embeds[:, :P], trace.features[:, :P], trace.ids[:, :P] < 0, trace.valid[:, :P]
    )
    session = session_of(ids[:, 0].tolist())
    session.memory = made.start(session, fed, prompt)  # type: ignore[arg-type]
    session.last = round_of(ids[:, :1], trace.features[:, P - 1 : P], (1, 1), ids[:, 0])
    made.propose(session, fed)  # type: ignore[arg-type]
    for step in range(depth):
        torch.testing.assert_close(shown[step][:, 0], unrolled[step][:, P - 1], rtol=1e-4, atol=1e-5)


def test_training_lowers_the_loss_and_raises_tau(tmp_path: Path) -> None:
    run = distilling(tmp_path, RECIPE.with_(steps=60))
    held = run.lesson(run.held_out, "held-out")
    trace = held.trace(range(len(held.samples)))
    before = losses(run.drafter, run.drafter, run.teacher, trace, RECIPE)[0].item()
    tau = run.measure(held)
    assert run.run() > tau + 0.1
    assert losses(run.drafter, run.drafter, run.teacher, trace, RECIPE)[0].item() < 0.9 * before


def test_a_stopped_run_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    goes_on(distilling, tmp_path, "update", 3, signal.SIGTERM)


def test_the_command_trains_for_a_pipelines_folder(tmp_path: Path) -> None:
    """From a saved pipeline and a file of prompts to a drafter that an enabled pipeline uses; same picture."""
    pipe = tiny_llamagen.pipeline("text")
    pipe.save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.txt").write_text(
        "a red circle\n\nblue square on the left\na large striped square\na circle\n" * 3
    )
    settings = ["steps=3", "batch=2", "held_out=2", "unroll=2"]
    paths = ["--target", str(tmp_path / "target"), "--data", f"prompts:{tmp_path / 'prompts.txt'}"]
    arguments = ["train", *paths, "--out", str(tmp_path / "run"), "--shape", "intermediate=24", "--device", "cpu"]
    assert cli.main([*arguments, "--set", *settings]) == 0
    made = mmspec.load_drafter(tmp_path / "run" / "drafter")
    assert (made.config.rope, made.config.grid, made.config.hidden) == ("2d", GRID, 32)
    asked = {"prompt": ["a red circle", "blue square"], "output_type": "latent"}
    alone = pipe(**asked, generator=torch.Generator().manual_seed(3)).images
    with mmspec.enable(pipe, drafter=made, tree="reverse_balanced_25", reproducible=True):
        assert torch.equal(pipe(**asked, generator=torch.Generator().manual_seed(3)).images, alone)


def test_prompts_are_sources(tmp_path: Path) -> None:
    drawn_prompts = [sample.prompt for sample in data.read("pictures:5", seed=2)]
    assert drawn_prompts == [sample.prompt for sample in data.read("pictures:9", seed=2)][:5]
    assert len(set(drawn_prompts)) == 5 and drawn_prompts != [s.prompt for s in data.read("pictures:5", seed=3)]
    with pytest.raises(ValueError, match="prompts:FILE"):
        data.read(f"prompts:{tmp_path / 'nowhere.txt'}")
    prompts, listed = ["a\u2028b\x0bc\x0cd\x85e", "f"], tmp_path / "list.txt"  # which str.splitlines would cut
    listed.write_bytes("\r\n\n".join(prompts).encode())
    assert [sample.prompt for sample in data.read(f"prompts:{listed}")] == read_prompts(listed) == prompts


@pytest.mark.parametrize("options", [{"rope": "2d"}, {"tree": "naive_extend_57", "draws": True}])
def test_settings_survive_a_file(options: dict[str, Any], tmp_path: Path) -> None:
    made = drafter(**options)
    mmspec.save_drafter(made, tmp_path)
    back = mmspec.load_drafter(tmp_path)
    assert back.config == made.config and back.options == made.options and back.block.rope.grid == GRID
    with pytest.raises(ValueError, match=r"cannot hold this drafter: .*rope"):
        mmspec.save_drafter(
            drafter(**{**options, "embed_norm": False, "out_norm": False}), tmp_path / "published", "eagle"
        )


def test_a_pipeline_that_cannot_be_enabled_anew_stays_as_it_was() -> None:
    pipe = tiny_llamagen.pipeline()
    first = mmspec.enable(pipe, drafter="jacobi")
    with pytest.raises(ValueError, match="prune skips visual tokens"):
        mmspec.enable(pipe, drafter=drafter(), prune=0.5)
    assert mmspec.stats(pipe) is first.stats
    pipe("red", generator=torch.Generator().manual_seed(0), output_type="latent")
    assert first.stats.rounds > 0
