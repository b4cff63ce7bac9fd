"""Quality of pictures: distances with closed forms, sets made by hand, and a reader that must not be fooled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from PIL import Image

from benchmarks.suites import quality
from benchmarks.suites.quality import frechet, precision_recall
from benchmarks.zoo import faithful
from mmspec.app.bench.command import BenchError
from mmspec.zoo import pictures

CPU = torch.device("cpu")


def gaussian(mean: list[float], covariance: torch.Tensor, n: int = 200) -> torch.Tensor:
    """Features whose mean and covariance are exactly these."""
    noise = torch.randn(n, len(mean), dtype=torch.float64)
    noise = noise - noise.mean(0)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(noise.T @ noise / (n - 1)), noise.T, upper=False).T
    return white @ torch.linalg.cholesky(covariance).T + torch.tensor(mean, dtype=torch.float64)


def test_frechet_in_closed_form() -> None:
    a = gaussian([0.0, 1.0, 2.0], torch.diag(torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64)))
    b = gaussian([3.0, 1.0, -2.0], torch.diag(torch.tensor([4.0, 4.0, 1.0], dtype=torch.float64)), n=300)
    assert frechet(a, b) == pytest.approx(9 + 16 + 1 + 0 + 4, rel=1e-9)  # |Δμ|² + Σ (σa − σb)²
    assert frechet(b, a) == pytest.approx(frechet(a, b), rel=1e-12)


def test_frechet_of_covariances_that_do_not_commute() -> None:
    some = torch.randn(2, 6, 6, dtype=torch.float64)
    ca, cb = some @ some.mT + torch.eye(6, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(ca)
    root = vectors @ values.sqrt().diag() @ vectors.T
    shared = torch.linalg.eigvalsh(root @ cb @ root).sqrt().sum()
    expected = float(ca.trace() + cb.trace() - 2 * shared)
    assert frechet(gaussian([0.0] * 6, ca), gaussian([0.0] * 6, cb)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("n", [5, 100])
def test_frechet_of_a_set_with_itself_is_zero(n: int) -> None:
    """Also with fewer pictures than dimensions, where the covariances are singular."""
    some = torch.randn(n, 40) * 10
    assert frechet(some, some[torch.randperm(n)]) < 1e-9
    assert frechet(some, some + 1) == pytest.approx(40, rel=1e-6)


def test_frechet_refuses_what_it_cannot_measure() -> None:
    with pytest.raises(BenchError, match="at least 2 pictures"):
        frechet(torch.zeros(1, 3), torch.zeros(5, 3))
    with pytest.raises(BenchError, match="finite"):
        frechet(torch.full((5, 3), torch.nan), torch.zeros(5, 3))


def test_precision_and_recall_of_sets_made_by_hand() -> None:
    line = torch.arange(20.0)[:, None]
    assert precision_recall(line, line + 0.5) == (1.0, 1.0)
    assert precision_recall(line, line + 1000) == (0.0, 0.0)
    near = line[:4] * 0.01  # four points huddled at the start: all plausible, little covered
    precision, recall = precision_recall(line, near)
    assert precision == 1.0 and recall == pytest.approx(1 / 20)
    half = torch.cat([line[:10], line[10:] + 1000])
    assert precision_recall(line, half)[0] == 0.5
    with pytest.raises(BenchError, match="more than 3"):
        precision_recall(line[:3], line)


@pytest.fixture(scope="module")
def held() -> list[tuple[pictures.Picture, str]]:
    return pictures.held_out(12, seed=5)


@pytest.fixture(scope="module")
def reader() -> faithful.PictureReader:
    return faithful.PictureReader()


@pytest.mark.full
def test_the_true_picture_is_faithful_and_that_of_another_prompt_is_not(
    reader: faithful.PictureReader, held: list
) -> None:
    shown, wanted = [pictures.render(picture) for picture, _ in held], [picture for picture, _ in held]
    true = reader.score(shown, wanted)
    assert true["faithfulness"] > 0.97 and true["all_right"] > 0.9 and true["n"] == 12
    other = reader.score(shown[1:] + shown[:1], wanted)
    assert other["faithfulness"] < 0.6 and other["all_right"] == 0
    noise = [Image.effect_noise((64, 64), 90.0).convert("RGB")] * 2
    assert reader.score(noise, wanted[:2])["faithfulness"] < 0.5


def test_facts_of_a_description(held: list) -> None:
    picture = next(p for p, _ in held if p.relation == "left of")
    first, second = picture.things
    told = [f"a {t.size} {t.texture} {t.colour} {t.shape}" for t in (first, second)]
    text = f"The picture shows two on a {picture.background} background: {told[0]} at the top left and {told[1]}"
    true = faithful.facts(f"{text} at the top.", picture)
    assert all(all(some) for some in true.values())
    assert sum(map(len, true.values())) == 2 + 2 * 4 + 1  # background and count; the attributes of two; the relation
    swapped = faithful.facts(f"{text} at the top.", replace(picture, things=(second, first)))
    assert swapped["colour"] == [True, True] and swapped["relation"] == [False]
    assert faithful.facts("Nothing.", picture)["shape"] == [False, False]


def test_the_embedded_tower_tells_sets_apart(held: list) -> None:
    features = quality.tower(CPU)
    shown = [pictures.render(picture) for picture, _ in pictures.held_out(24, seed=6)]
    inverted = [Image.eval(picture, lambda value: 255 - value) for picture in shown]
    one, other, changed = features(shown[:12]), features(shown[12:]), features(inverted[:12])
    assert one.dtype == torch.float64 and one.shape == (12, 192)
    assert frechet(one, changed) > frechet(one, other) > 0
