"""The recycle drafter: the tree that it gathers, what it learns of, what it remembers and forgets, who shares it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import tiny_vlms
import torch
from torch import Tensor

import mmspec
from mmspec.accept import along_path
from mmspec.drafters.likely import filled, likeliest
from mmspec.drafters.recycle import RecycleDrafter, RecycleOptions, Successors, _Place, shaped
from mmspec.pipelines.host.call import calling
from mmspec.protocols import TargetInfo
from mmspec.tree import lone
from mmspec.types import NO_TOKEN, RANKS, Categorical, Round, Scores

CPU = torch.device("cpu")
ANY = TargetInfo("any", 40, 8, 8, 1, CPU, torch.float32)


def fresh() -> Any:
    return tiny_vlms.model.__wrapped__("llava")


def forgetful() -> Any:
    """A model whose next token depends on the last one alone."""
    model = fresh()
    with torch.no_grad():
        for layer in model.get_decoder().layers:
            layer.self_attn.o_proj.weight.zero_()
    return model


def inputs(kind: str = "ragged") -> dict[str, Tensor]:
    return tiny_vlms.prompt("llava", kind)


# -- the tree --------------------------------------------------------------------------------------------------------


def test_the_tree_is_every_path_that_is_likely_enough() -> None:
    """Against enumeration: products of rates, above the least chance; a round size is filled with the next ones."""
    rates = [0.6, 0.3, 0.1]

    def after(path: tuple[int, ...]) -> list[tuple[float, tuple[int, ...]]]:
        return [(rate, (*path, rank)) for rank, rate in enumerate(rates)]

    every: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(4):
        every |= {(*path, rank): p * rate for path, p in every.items() for rank, rate in enumerate(rates)}
    for least in (0.5, 0.2, 0.1, 0.05):
        found = likeliest((), after, 4, 100, least)
        paths = [(), *(path for path, _ in found)]
        assert [(*paths[above], paths[i][-1]) for i, (_, above) in enumerate(found, 1)] == paths[1:]
        wanted = {path for path, p in every.items() if p >= least}
        assert wanted <= {*paths} and len(paths) == len({*paths}) <= filled(len(wanted))
        chances = [every[path] for path in paths]
        assert chances == sorted(chances, reverse=True) and min(chances) >= 0.3 * least
        left = [p for path, p in every.items() if path not in paths and p >= 0.3 * least]
        assert len(paths) == filled(len(wanted)) or not left
    assert [path for path, _ in likeliest((), after, 2, 100, 0.3)] == [(0,), (0, 0), (1,)]
    assert likeliest((), lambda path: [(0.2, path)], 1, 9, 0.1) == []  # promises too little


def test_round_sizes() -> None:
    assert [filled(n) for n in range(1, 18)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16, 16, 16, 16, 24]


def test_a_shape_is_filled_with_what_was_learnt() -> None:
    g = torch.Generator().manual_seed(0)
    known, table = Successors(40, CPU), torch.rand(30, 40, generator=g).topk(RANKS).indices
    known.learn(torch.arange(30).view(2, 15), table.view(2, 15, RANKS))
    paths = ((0,), (1,), (7,), (0, 0), (0, 3), (7, 2), (0, 3, 1))
    shape = shaped(paths, CPU)
    drafted = known.filled(shape, torch.tensor([4, 35]))
    for path in paths:
        node, token = 0, 4
        for rank in path:
            node = next(child for child, one in shape.below[node].items() if one == rank)
            token = int(table[token, rank]) if 0 <= token < 30 else NO_TOKEN
        assert int(drafted[0, node]) == token
    assert drafted[1].tolist() == [35, *[NO_TOKEN] * 7]  # nothing is known of 35
    assert shaped(((0,), (0, 0)), CPU).tree.is_chain and not shape.tree.is_chain


def test_the_latest_stands_and_holes_teach_nothing() -> None:
    known = Successors(40, CPU)
    for first in (0, 20):
        known.learn(torch.tensor([[5, NO_TOKEN]]), torch.arange(first, first + 2 * RANKS).view(1, 2, RANKS))
    assert known.table[5].tolist() == list(range(20, 20 + RANKS))
    assert (known.table[-1] == NO_TOKEN).all() and (known.table[:-1] != NO_TOKEN).any(1).sum() == 1
    small = Successors(3, CPU)  # fewer tokens than ranks
    small.learn(torch.tensor([[2, 7]]), torch.tensor([[[2, 1, 0], [0, 1, 2]]]))
    assert small.table.tolist() == [[NO_TOKEN] * 3, [NO_TOKEN] * 3, [2, 1, 0], [NO_TOKEN] * 3]


def test_memory_is_bounded_by_the_vocabulary() -> None:
    known, g = Successors(150_000, CPU), torch.Generator().manual_seed(0)
    for _ in range(20):
        some = torch.randint(150_000, (1, 500), generator=g)
        known.learn(some, torch.randint(150_000, (1, 500, RANKS), generator=g))
    assert known.table.numel() * known.table.element_size() == 32 * 150_001


def test_what_is_drafted_follows_from_what_came_true() -> None:
    """Drafts of rank 1 alone come true: the tree turns there; when nothing does, none is made, but for a trial."""
    known, options = Successors(40, CPU), RecycleOptions(depth=4, width=3, size=12)
    paths: tuple[Any, ...] = ()
    for _ in range(400):
        paths = known.shape(options, 0.08) or paths
        shape = shaped(paths, CPU)
        true = next((child for child, rank in shape.below[0].items() if rank == 1), None)
        known.tested(shape, (0,) if true is None else (0, true))
    assert (1, 1, 1) in paths and not any(0 in path for path in paths)
    drafted = []
    for _ in range(3000):
        paths = known.shape(options, 0.08)
        drafted.append(bool(paths))
        if paths:
            known.tested(shaped(paths, CPU), (0,))
    assert 0 < sum(drafted[1000:]) < 200


# -- on a model ------------------------------------------------------------------------------------------------------


def watched(model: Any, kind: str, **how: Any) -> tuple[Any, list[Round]]:
    """What a call gives, and its rounds."""
    seen: list[Round] = []
    with calling(watch=seen.append):
        return tiny_vlms.generate(model, inputs(kind), **how), seen


@pytest.mark.parametrize("how", [{}, {"do_sample": True, "temperature": 0.7, "top_k": 5}], ids=["greedy", "sampled"])
def test_scores_say_the_likeliest_tokens_whatever_is_drawn(how: dict[str, Any]) -> None:
    """Before processors, after every node."""
    model = fresh()
    with mmspec.enable(model, "recycle"):
        for _ in range(2):
            out, seen = watched(model, "image first", return_dict_in_generate=True, output_logits=True, **how)
    logits = torch.stack(out.logits, 1)[0]
    found = torch.cat([round_.scores.likeliest[0, list(round_.path[0])] for round_ in seen])
    assert sum(round_.proposed[0] for round_ in seen) > 0
    assert torch.equal(found[: len(logits)], logits.topk(RANKS).indices)


@pytest.mark.parametrize("options", [{}, {"width": 1, "depth": 3}, {"depth": 2, "width": 4, "size": 9}])
def test_calls_share_what_was_learnt_until_it_is_disabled(options: dict[str, Any]) -> None:
    model = forgetful()
    stock = tiny_vlms.generate(model, inputs())

    def first(handle: Any) -> tuple[int, ...]:
        """What a call proposes in its first round after the prefill."""
        out, seen = watched(model, "ragged")
        assert torch.equal(out, stock)
        assert max(round_.draft.tokens.shape[1] for round_ in seen) <= handle.drafter.options.size
        assert max(handle.stats.accepted_by_depth, default=0) <= handle.drafter.options.depth
        return seen[1].proposed

    handle = mmspec.enable(model, "recycle", **options)
    assert not all(first(handle)) and all(first(handle)) and handle.stats.accepted > 0
    mmspec.disable(model)
    with mmspec.enable(model, handle.drafter, **options) as anew:
        assert not all(first(anew))


def test_drafts_keep_the_distribution() -> None:
    """Two tokens of a Markov chain by trees out of the table, against their joint law, over even noise."""
    g = torch.Generator().manual_seed(2)
    law = torch.randn(5, 5, generator=g, dtype=torch.float64)
    drafter = RecycleDrafter().fit(TargetInfo("any", 5, 8, 8, 1, CPU, torch.float32), {})
    assert drafter.successors is not None
    drafter.successors.learn(torch.arange(5)[None], law.topk(5).indices[None])
    shape = shaped(((0,), (1,), (0, 0), (0, 1), (1, 0)), CPU)
    tokens, steps = drafter.successors.filled(shape, torch.tensor([3])), 60
    p = Categorical(law[tokens])
    seen: Counter[tuple[int, int]] = Counter()
    grid = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    from mmspec.rules import exact
    from mmspec.types import Draft

    for first in grid:
        for second in grid:
            u = torch.full(tokens.shape, float(second), dtype=torch.float64)
            u[:, 0] = first
            got = along_path(Draft(tokens, shape.tree), p, exact, u)
            count = int(got.count)
            path = [int(t) for t in tokens[0, got.accepted[0]]][1:count]
            new = [*path, int(got.next_token)]
            if len(new) == 1:  # the second token is drawn by the round that follows
                after = law[new[0]].softmax(-1)
                new.append(int((after.cumsum(0) <= second).sum().clamp(max=4)))
            seen[new[0], new[1]] += 1
    joint = law[3].softmax(-1)[:, None] * law.softmax(-1)
    for (a, b), chance in zip([(a, b) for a in range(5) for b in range(5)], joint.flatten().tolist(), strict=True):
        assert abs(seen[a, b] / steps**2 - chance) < 2.5 / steps


def test_a_round_that_was_not_drafted_tests_nothing() -> None:
    drafter, table = RecycleDrafter().fit(ANY, {}), torch.arange(RANKS).view(1, 1, RANKS)
    shape, known = shaped(((0,),), CPU), drafter.successors
    assert known is not None
    root = lone(torch.tensor([[3]]))
    scores = Scores(Categorical(ids=torch.tensor([[1]])), likeliest=table)
    last = Round(root, scores, along_path(root, scores.p, None, None), root.tokens, ((0,),), ((1,),), (0,), (False,))
    drafter._learn(known, last, [_Place(shape)], [1])
    assert not known.rates.tests and known.table[3].tolist() == list(range(RANKS))


def test_options() -> None:
    model = fresh()
    with mmspec.enable(model, "recycle", depth=3, width=2) as handle:
        assert handle.drafter.options == RecycleOptions(3, 2, 32)
    with mmspec.enable(model, "recycle", width=1) as handle:
        assert handle.drafter.options == RecycleOptions(8, 1, 9)


def test_prompts_are_read() -> None:
    """What followed a word of a prompt last is the likeliest after it, and the others move back by one."""
    known = Successors(40, CPU)
    known.table[5] = torch.arange(10, 10 + RANKS)
    known.read(torch.tensor([[5, 7, 5, 12, NO_TOKEN], [NO_TOKEN, 7, 9, 8, 39]]))
    assert known.table[5].tolist() == [12, 10, 11, *range(13, 10 + RANKS)]  # it stood among them
    assert known.table[7].tolist() == [9] + [NO_TOKEN] * (RANKS - 1)
    assert known.table[[9, 8], 0].tolist() == [8, 39]
    known.read(torch.tensor([[5, 30]]))
    assert known.table[5].tolist() == [30, 12, 10, 11, *range(13, 9 + RANKS)]
    known.read(torch.tensor([[3]]))
    assert (known.table[[-1, 3, 12, 39]] == NO_TOKEN).all()


def test_streaks_make_chains_longer() -> None:
    """After the likeliest came several times in a row, it is likelier than at first, and chains are worth more."""
    known = Successors(40, CPU)
    for _ in range(90):
        known.compared(range(1, 9), 9, 0)
        known.compared(range(1, 9), 1, 4)
    assert known.rate(0) < 0.1 and known.rate(0, 7) > 0.9
    shapes = [known.shape(RecycleOptions(), 0.02, streak, lambda n: 1 + 0.2 * (n > 1)) for streak in (0, 4)]
    assert shapes[0] == () and max(map(len, shapes[1])) == RecycleOptions().depth
    assert known.compared([1, 2], 1, 2) == 3 and known.compared([1, 2], 2, 2) == 0
