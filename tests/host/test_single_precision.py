"""Devices without float64, such as MPS: nothing asks for it there, and all that is promised holds in float32."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import hostile_drafters
import pytest
import tiny_llamagen
import tiny_mar
import tiny_vlms
import torch
import torchgen
import yaml
from tiny_mar import seeded
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import mmspec
from mmspec.kernels import reference as ops
from mmspec.kernels import reference_noise
from mmspec.models import mar_scheduler
from mmspec.pipelines.mar.plan import Speculation
from mmspec.tree import from_parents
from tests.host import test_generate as text
from tests.pictures import test_mar_speculate as toys

ANY_DEVICE = ("MPS", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
CPU_ONLY = ("_for_cpu", "mkldnn_", "_mkl_linear")  # what the CPU runs in place of something that MPS has, too


class LikeMps(TorchDispatchMode):
    """Within it the CPU refuses what MPS would: float64 tensors, and operations for which torch has no MPS kernel."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not runs_on_mps(func):
            raise NotImplementedError(f"{func} has no MPS kernel")
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, torch.Tensor) and each.dtype == torch.float64:
                raise TypeError(f"{func} makes a float64 tensor")
        return out


@cache
def kernels() -> dict[str, Any]:
    """What torch says of each of its operations."""
    told = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return {each["func"].partition("(")[0]: each for each in yaml.load(told.read_text(), loader)}


@cache
def runs_on_mps(func: Any) -> bool:
    name = func._schema.name.removeprefix("aten::")
    told = kernels().get(f"{name}.{func._schema.overload_name}".removesuffix("."), {})
    told = kernels()[told["structured_delegate"]] if "structured_delegate" in told else told
    homes = [home.strip() for several in told.get("dispatch", {"MPS": None}) for home in several.split(",")]
    return any(part in name for part in CPU_ONLY) or any(home.startswith(ANY_DEVICE) for home in homes)


@pytest.fixture(autouse=True)
def _cpu_is_like_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_noise, "WITHOUT_FLOAT64", frozenset({"cpu"}))
    monkeypatch.setattr(mar_scheduler, "alpha_bar", on_the_host(mar_scheduler.alpha_bar))
    monkeypatch.setattr(mar_scheduler.MARScheduler, "chain", on_the_host(mar_scheduler.MARScheduler.chain))


def on_the_host(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a sampler's few numbers on the real CPU, in float64."""

    def made(*told: Any) -> Any:
        with _disable_current_modes():
            found = make(*told)
            getattr(found, "steps", None)  # a chain's own numbers, which it keeps
            return found

    return made


def test_asking_for_float64_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_noise, "WITHOUT_FLOAT64", frozenset())
    with LikeMps(), pytest.raises(TypeError, match="float64"):
        ops.uniform(torch.tensor([3]), torch.arange(9))
    with LikeMps(), pytest.raises(NotImplementedError, match="ndtri"):
        torch.special.ndtri(torch.rand(3))


# -- the noise -------------------------------------------------------------------------------------------------------


def both(make: Callable[[], torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor]:
    """What is made in float32, and in float64."""
    with LikeMps():
        single = make()
    monkeypatch.setattr(reference_noise, "WITHOUT_FLOAT64", frozenset())
    return single, make()


def test_noise_is_the_upper_bits_of_the_same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    seed, counter = torch.tensor([5, -7, 2**62])[:, None], torch.arange(50_000)
    single, double = both(lambda: ops.uniform(seed, counter), monkeypatch)
    assert single.dtype == torch.float32 and torch.equal(single.double(), (double * 2**24).floor() / 2**24)


def test_no_noise_reaches_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_noise, "_hash", lambda seed, counter: torch.full_like(counter, -1))  # all bits set
    assert ops.uniform(torch.tensor([0]), torch.tensor([0])).item() == 1 - 2.0**-24
    most = torch.tensor(1 - 2.0**-24)
    assert ops.remaining(most, torch.tensor(2.0**-24)) < 1 and ops.quantile(most).isfinite()
    assert ops.quantile(torch.zeros(1)).isfinite() and ops.categorical(torch.tensor([1.0, 1e-9, 0.0]), most) < 2


def test_gumbel_and_normal_noise_are_those_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """To rounding, and so is the likeliest token of them: a seed draws on a Mac what it draws elsewhere."""
    position = torch.arange(40)[None]
    single, double = both(lambda: ops.gumbel(torch.tensor([9]), position, 3000), monkeypatch)
    assert single.dtype == torch.float32 and single.isfinite().all()
    common = double > -1  # below it float32 is coarse, and no draw looks there
    torch.testing.assert_close(single[common].double(), double[common], atol=1e-5, rtol=1e-6)
    assert torch.equal(single.argmax(-1), double.argmax(-1))
    u = (torch.arange(1, 2000) / 2000).float()
    torch.testing.assert_close(ops.quantile(u), torch.special.ndtri(u.double()).float(), atol=1e-4, rtol=1e-5)


def test_of_siblings_no_more_than_one_stands() -> None:
    """Where one's slice of [0, 1) ends, rounding may have let the next one's begin; both held the number in between."""
    rows, V = 3000, 40
    tokens, parents = torch.arange(-1, V).expand(rows, -1), torch.zeros(rows, V + 1, dtype=torch.long)
    tree, logits = from_parents(parents, 1), torch.randn(rows, 1, V).expand(-1, V + 1, -1)
    mass = ops.token_mass(logits, logits.logsumexp(-1), parents, tokens)
    low = ops.sibling_mass(mass, (parents[:, :, None] == parents[:, None]).tril(-1) & (tokens[:, None] >= 0))
    ends = torch.nextafter(low + mass, torch.zeros(()))  # the last number of each slice
    overlap = (ends[:, 1:-1] >= low[:, 2:]).float()
    assert overlap.any(1).float().mean() > 0.5
    u = ends.gather(1, 1 + overlap.argmax(1, keepdim=True)).expand(-1, V + 1)
    found = ops.verify_point_mass(logits, tokens, parents, tree.ancestors, u)
    assert found.count.max() == 2 and torch.equal(found.count, found.accepted.sum(1))


# -- texts -----------------------------------------------------------------------------------------------------------

TEXTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ngram": ("ngram", {}),
    "suffix": ("suffix", {}),
    "recycle": ("recycle", {}),
    "eagle chain": ("eagle chain", {}),
    "eagle tree": ("eagle tree", {}),
    "eagle, drawn": ("eagle chain", {"draws": True, "tree": "chain"}),
    "pruned": ("eagle tree", {"prune": 0.5}),
    "jacobi": ("jacobi", {"window": 6}),
    "auto": ("eagle tree", {"auto": True}),
    **{name: (name, {}) for name in ("vispec", "msd", "flash", "specvlm")},
}


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "seed-exact"])
@pytest.mark.parametrize("case", TEXTS)
@pytest.mark.every(3)
def test_texts_are_the_stock_ones(case: str, sample: bool) -> None:
    name, options = TEXTS[case]
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "ragged")
    made = hostile_drafters.DRAFTERS[name](model, None) if name in hostile_drafters.DRAFTERS else name
    how = {"do_sample": sample, "max_new_tokens": 12, **({"temperature": 0.9, "top_k": 40} if sample else {})}
    torch.manual_seed(5)
    stock, state = tiny_vlms.generate(model, inputs, **how), torch.get_rng_state()
    with mmspec.enable(model, made, reproducible=sample, **options) as handle, LikeMps():
        torch.manual_seed(5)
        assert torch.equal(tiny_vlms.generate(model, inputs, **how), stock)
        assert not sample or torch.equal(torch.get_rng_state(), state)
    assert handle.stats.tokens == stock.numel() - inputs["input_ids"].numel()


@pytest.mark.parametrize("drafter", ["drawn", "eagle tree"])
def test_sampled_texts_have_the_stock_law(drafter: str) -> None:
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "text only")
    how = {"top_k": 5, "temperature": 1.5}
    oracle = hostile_drafters.Oracle.of(inputs["input_ids"], tiny_vlms.generate(model, inputs))
    with LikeMps():
        samples = text.sampled(model, inputs, hostile_drafters.DRAFTERS[drafter](model, oracle), **how)
    assert text.excess(samples, text.joint_law(model, inputs, **how)) < text.EXCESS


# -- pictures --------------------------------------------------------------------------------------------------------

PICTURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "jacobi": ("jacobi", {"window": 6}),
    "jacobi tree": ("jacobi", {"window": 8, "proactive": (2, 3)}),
    "jacobi gumbel": ("jacobi", {"window": 6, "coupling": "gumbel"}),
    "jacobi auto": ("jacobi", {"window": 8, "auto": True}),
    "drawn": ("drawn", {}),
}


@pytest.mark.parametrize("case", PICTURES)
def test_seed_exact_pictures_are_those_of_plain_decoding(case: str) -> None:
    name, options = PICTURES[case]
    pipe = tiny_llamagen.pipeline("class", vocab=tiny_vlms.VOCAB)
    how = {"class_labels": [1, 2, 9], "top_k": 40, "temperature": 0.9, "output_type": "latent"}
    drafter = hostile_drafters.Drawn(lambda row, g: ([0, 0, 0], [0, 1, 1])) if name == "drawn" else name
    with LikeMps():
        plain = pipe(generator=seeded(4, 5, 6), **how).tokens
        with mmspec.enable(pipe, drafter, reproducible=True, **options) as handle:
            assert torch.equal(pipe(generator=seeded(4, 5, 6), **how).tokens, plain)
            greedy = {**how, "temperature": 0}
            drafted = pipe(**greedy).tokens
        assert torch.equal(pipe(**greedy).tokens, drafted) and handle.stats.tokens == 2 * 3 * 16


RULES = ["exact", "lantern(k=10, delta=0.3)", "lantern(k=10, lam=2.0)", "gsd(group=5)", "scaled(omega=3.0, nu=0.3)",
         "typical(epsilon=0.1, delta=0.5)", "grouped(cells=9)", "pooled(cells=9)"]  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", [{"window": 8}, {"window": 8, "proactive": (2, 3), "coupling": "none"}], ids=str)
@pytest.mark.every(4)
def test_every_rule_draws_and_charges(rule: str, options: dict[str, Any]) -> None:
    pipe, budget = tiny_llamagen.pipeline("class"), None if rule.startswith(("exact", "grouped")) else 0.4
    how = {"class_labels": [1, 2, 9], "generator": seeded(1, 2, 3), "output_type": "latent"}
    with mmspec.enable(pipe, "jacobi", rule=rule, budget=budget, **options) as handle, LikeMps():
        made = pipe(**how)
    assert all(0 <= spent <= (budget or 99) + 1e-6 for spent in made.spent)
    assert (max(made.spent) == 0) is (rule == "exact") and handle.stats.accepted > 0


def test_rules_leave_the_law_of_a_picture_when_exact() -> None:
    """At the bound that float64 keeps."""
    with LikeMps():
        tiny_llamagen.law_of_the_first_two_is_kept()


# -- continuous tokens -----------------------------------------------------------------------------------------------

MAR: dict[str, Callable[[], dict[str, Any]]] = {
    "self": lambda: {"ahead": 3},
    "a draft": lambda: {"ahead": 3, "draft": tiny_mar.transformer(2)},
    "cspd": lambda: {"ahead": 3, "draft": tiny_mar.transformer(2), "rule": "cspd"},
}


@pytest.mark.parametrize("mode", MAR)
@pytest.mark.every(4)
def test_pictures_of_continuous_tokens_are_drawn(mode: str) -> None:
    pipe = tiny_mar.pipeline()
    pipe.enable_speculation(**MAR[mode]())
    with LikeMps():
        alone = pipe([2], generator=seeded(7), guidance_scale=1.5, output_type="latent")
        among = pipe([0, 2], generator=seeded(1, 7), guidance_scale=1.5, output_type="pt")
    assert alone.tokens.isfinite().all() and alone.stats.summary()["tested"] > 0
    torch.testing.assert_close(among.tokens[1], alone.tokens[0], atol=5e-3, rtol=1e-3)


@pytest.mark.parametrize("steps", ["fast", "plain"])
def test_the_model_as_its_own_draft_is_always_kept(steps: str) -> None:
    pipe = tiny_mar.pipeline()
    pipe.enable_speculation(draft=tiny_mar.transformer(0), ahead=4, eta=1.0)
    with LikeMps():
        out = pipe([0, 1], generator=seeded(1, 2), output_type="latent", fast_head=steps == "fast")
    assert out.stats.summary()["acceptance"] > 0.99 and out.work["passes"] == 4


def test_continuous_tokens_have_the_law_of_plain_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toys, "N", 1500)
    with LikeMps():
        plain, (drafted, told) = toys.pictures(None, 50)[0], toys.pictures(Speculation(ahead=3), 60)
    assert told.summary()["refused"] > toys.N / 10 and toys.joint(drafted, plain) > 1e-3


# -- the real thing --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs a Mac with a GPU")
def test_mps_counts_the_noise_that_the_cpu_counts() -> None:
    seed, counter = torch.tensor([5, -7, 2**62])[:, None], torch.arange(5000)
    assert torch.equal(ops.uniform(seed.to("mps"), counter.to("mps")).cpu(), ops.uniform(seed, counter))
    assert os.environ.get("PYTORCH_ENABLE_MPS_FALLBACK") != "1", "a kernel that is missing would not show"
