"""Models run by their authors' own processors, which keep state and prompt the model themselves: same pictures."""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import remote_image_models as remote
import torch
import transformers as T
from hostile_drafters import DRAFTERS, Oracle
from table_targets import excess
from tiny_vlms import TEXT, VOCAB
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import mmspec
from mmspec.pipelines.host.names import CACHE
from mmspec.pipelines.host.processors.followed import Reader
from mmspec.rules import lantern

JACOBI: dict[str, dict[str, Any]] = {"jacobi": {}, "jacobi tree": {"proactive": (2, 3)}}
HOSTILE = ["ngram", "random tree", "holes", "broken chain", "always wrong", "always right", "drawn", "empty"]


def drawn(name: str, **options: Any) -> tuple[Tensor, Tensor]:
    """One call under seed 7: the tokens, and the state in which it leaves torch's generator."""
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the stock path would be taken with one
        tokens = remote.model(name).generate(**{**remote.call(name), **options})
    return tokens, torch.get_rng_state()


@cache
def stock(name: str, sample: bool) -> tuple[Tensor, Tensor]:
    return drawn(name, do_sample=sample)


def forwards(name: str, run: Any) -> int:
    """How often the decoder reads while something runs."""
    seen: list[int] = []
    with remote.model(name).get_decoder().register_forward_hook(lambda *_: seen.append(1)):
        run()
    return len(seen)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("how", [*JACOBI, *HOSTILE])
@pytest.mark.parametrize("name", remote.MODELS)
@pytest.mark.every(12)
def test_the_picture_is_the_stock_picture(name: str, how: str, sample: bool) -> None:
    """Text, a picture, text, perhaps another picture: greedy, and from the same seed."""
    model, (expected, state) = remote.model(name), stock(name, sample)
    assert (expected == remote.OPEN).sum() > 1 and (expected == remote.CLOSE).sum() > 0
    oracle, options = Oracle.of(remote.call(name)["input_ids"], expected), JACOBI.get(how, {})
    made = "jacobi" if how in JACOBI else DRAFTERS[how](model, oracle)
    with mmspec.enable(model, drafter=made, reproducible=True, **options) as handle:
        tokens, after = drawn(name, do_sample=sample)
    assert torch.equal(tokens, expected) and torch.equal(after, state)
    assert handle.stats.tokens == expected.shape[1] - 6


@pytest.mark.parametrize("name", remote.MODELS)
@pytest.mark.every(3)
def test_one_forward_reads_a_whole_draft_in_either_stream(name: str) -> None:
    model, (expected, _) = remote.model(name), stock(name, True)
    before = forwards(name, lambda: drawn(name, do_sample=True))
    right = DRAFTERS["always right"](model, Oracle.of(remote.call(name)["input_ids"], expected))
    with mmspec.enable(model, drafter=right, reproducible=True):
        after = forwards(name, lambda: drawn(name, do_sample=True))
    assert before > 80 and after < before / 4


class Dictated(LogitsProcessor):
    """Keeps what the processors before it made of the scores, and lets tokens known beforehand follow."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.seen = tokens, list[Tensor]()

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(scores)
        return remote.only(scores, self.tokens[ids.shape[1]])


@pytest.mark.parametrize("options", [{"window": 6}, {"coupling": "gumbel"}, {"coupling": "none", "proactive": (2, 3)}])
@pytest.mark.parametrize("name", remote.MODELS)
@pytest.mark.every(6)
def test_every_token_is_drawn_from_the_stock_distribution(name: str, options: dict[str, Any]) -> None:
    """Whatever was drawn, its scores are those that stock's loop has at that place."""
    with mmspec.enable(remote.model(name), drafter="jacobi", **options):
        out, _ = drawn(name, do_sample=True, output_scores=True, return_dict_in_generate=True)
    dictated = Dictated(out.sequences[0].tolist())
    remote.model(name).generate(
        **{**remote.call(name), "logits_processor": [*remote.call(name)["logits_processor"], dictated]}, do_sample=False
    )
    assert len(dictated.seen) == len(out.scores) > 50
    torch.testing.assert_close(torch.cat(out.scores), torch.cat(dictated.seen), atol=2e-4, rtol=1e-4)


@pytest.mark.full
def test_sampled_codes_have_the_stock_law() -> None:
    """The first two codes of a guided picture: counted, against the distribution of the model's two streams."""
    model, words, begin = remote.model("lumina_mgpt"), [1, 5, 6], [remote.OPEN, remote.SIZES + 1, remote.SIZES + 1]

    def first(ids: list[int]) -> Tensor:
        c, u = (model(torch.tensor([text + ids])).logits[0, -1].double() for text in (words + begin, begin))
        codes = (u + 2.0 * (c - u))[remote.FIRST_CODE :]
        kept = codes.topk(5)
        out = torch.zeros(VOCAB, dtype=torch.float64)
        return out.index_put_((kept.indices + remote.FIRST_CODE,), (kept.values / 6).softmax(0))

    def draw() -> list[int]:
        guide, grid, warper = remote.call("lumina_mgpt")["logits_processor"]
        warper.picture = 5
        out = model.generate(
            torch.tensor([words + begin]), logits_processor=LogitsProcessorList([guide, grid, warper]), temperature=6.0,
            do_sample=True, top_k=0, max_new_tokens=2,
        )  # fmt: skip
        return out[0, -2:].tolist()

    with torch.no_grad():
        one = first([])
        joint = torch.stack([p * first([x]) if (p := one[x]) > 0 else torch.zeros(VOCAB) for x in range(VOCAB)])
    torch.manual_seed(3)
    with mmspec.enable(model, drafter="jacobi", window=3):
        samples = torch.tensor([draw() for _ in range(500)])
    assert float(joint.max()) < 0.3 and int((joint > 0.01).sum()) > 10
    assert excess(samples, joint.flatten(), VOCAB) < 4
    assert excess(samples.flip(1), joint.flatten(), VOCAB) > 10, "another law would be seen"


# -- what may be followed --------------------------------------------------------------------------------------------


class Counts(LogitsProcessor):
    """Turns the scores further with each token, by what it counted itself."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"steps": [0], "last": torch.zeros(1, dtype=torch.long)}

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.seen["steps"][0] += 1
        self.seen["last"] += ids[:1, -1]
        return scores.roll(self.seen["steps"][0] + int(self.seen["last"]) % 5, -1)


def counted(how: Any = None, rows: int = 1, **options: Any) -> Tensor:
    ids = torch.tensor([[1, 5, 6, 7]] * rows)
    processors = LogitsProcessorList([Counts() if how is None else how])
    return remote.model("emu3_5").generate(
        ids, logits_processor=processors, max_new_tokens=20, do_sample=False, **options
    )


def test_a_processor_that_says_where_its_state_lies_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, model = counted(), remote.model("emu3_5")
    with mmspec.enable(model, drafter=DRAFTERS["always right"](model, Oracle.of(expected[:, :4], expected))) as handle:
        with pytest.warns(UserWarning, match="set Counts.mmspec_own_state = True"):
            assert torch.equal(counted(), expected)
        monkeypatch.setattr(Counts, "mmspec_own_state", True, raising=False)
        own = Counts()
        assert torch.equal(counted(own), expected)
        assert handle.stats.tokens_per_target_call > 4
        assert own.seen["steps"] == [0], "the call's own processors stay as they came"
        with pytest.warns(UserWarning, match="for one row only"):
            assert torch.equal(counted(rows=2)[0], expected[0])


GSD = "gsd(group=14, distance=9.0, gap=0.15, space='embeddings')"
RULES = [GSD, "typical(epsilon=0.3, delta=0.1)", "lantern(k=8, lam=3.0)"]


def lawful(name: str, text: list[int]) -> int:
    """The number of codes in a text whose first picture stands on its grid, and which has none outside of pictures."""
    begin, codes = text.index(remote.OPEN), [token >= remote.FIRST_CODE for token in text]
    assert not any(codes[:begin])
    if name in remote.EMU:
        head = text.index(remote.IMG, begin) + 1
        height, width = (int(n) for n in remote.Digits().decode(torch.tensor(text[begin + 1 : head - 1])).split("*"))
        lines = [True] * width + [False]
        grid = (lines * height)[:-1]
    else:
        head = begin + 3
        height, width = (2 * (token - remote.SIZES) for token in text[begin + 1 : head])
        grid = ([True] * width + [False]) * height
    assert codes[head : head + len(grid)] == grid and text[head + len(grid)] == remote.CLOSE
    return sum(codes)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["emu3_5", "lumina_mgpt", "lumina_mgpt 2"])
@pytest.mark.every(4)
def test_a_relaxed_rule_keeps_the_grid(name: str, rule: str) -> None:
    """What the processors forbid is never kept; only picture tokens cost anything."""
    model, made = remote.model(name), rule
    if name in remote.EMU and "lantern" in rule:
        with pytest.raises(ValueError, match="this target has none"):
            mmspec.enable(model, drafter="jacobi", rule=rule)
        made = lantern(torch.randn(VOCAB, 4, generator=torch.Generator().manual_seed(1)), k=8, lam=3.0)
    costs = {}
    for budget in (None, 0.0):
        with mmspec.enable(model, drafter="jacobi", rule=made, budget=budget) as handle:
            tokens = drawn(name, do_sample=True, temperature=6.0)[0]
        assert lawful(name, tokens[0].tolist()) > 8 and not handle.stats.lossless
        costs[budget] = handle.stats.spent
    assert costs[None] > 0.2 and costs[0.0] <= 1e-9


def test_text_beside_pictures_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lumina-mGPT without its processors writes text, and so does a rule with no meaning for a part of the tokens."""
    model, call = remote.model("lumina_mgpt"), remote.call("lumina_mgpt")
    with mmspec.enable(model, drafter="jacobi", rule=RULES[1]) as handle:
        with pytest.warns(UserWarning, match="this call generates text as far as mmspec knows"):
            model.generate(call["input_ids"], max_new_tokens=8, do_sample=True)
        assert handle.stats.spent == 0
    with mmspec.enable(model, drafter="jacobi", rule="grouped(radius=0.5)") as handle:
        with pytest.warns(UserWarning, match="must use the ordinary residual"):
            model.generate(**call, do_sample=True)
        assert handle.stats.spent == 0 and handle.stats.rounds


@pytest.mark.parametrize(("rule", "relaxes"), [(RULES[1], False), ("lantern(k=60, delta=1.0)", True)])
def test_greedy_pictures_are_relaxed_by_lantern_alone(rule: str, relaxes: bool) -> None:
    model, expected = remote.model("lumina_mgpt"), stock("lumina_mgpt", False)[0]
    with mmspec.enable(model, drafter="jacobi", rule=rule) as handle:
        if relaxes:
            tokens = drawn("lumina_mgpt", do_sample=False)[0]
        else:
            with pytest.warns(UserWarning, match="no effect on greedy calls"):
                tokens = model.generate(**remote.call("lumina_mgpt"), do_sample=False)
    assert lawful("lumina_mgpt", tokens[0].tolist()) and torch.equal(tokens, expected) != relaxes
    assert (handle.stats.spent > 0) == relaxes and handle.stats.spent == int(handle.stats.spent)


def test_a_processor_that_holds_a_stock_cache_runs_the_stock_path() -> None:
    model, call = remote.model("emu3_5"), remote.call("emu3_5")
    model.generate(**call, do_sample=False)
    with mmspec.enable(model, drafter="jacobi"), pytest.warns(UserWarning, match="create a new one for each call"):
        model.generate(**call, do_sample=False)


def test_two_more_prompts_run_the_stock_path() -> None:
    model, call = remote.model("emu3_5"), remote.call("emu3_5")
    expected = model.generate(**remote.call("emu3_5"), do_sample=False)
    call["logits_processor"][0].unconditional_type = "no_text_img_cfg"
    with mmspec.enable(model, drafter="jacobi"), pytest.warns(UserWarning, match="guides by two more prompts"):
        assert torch.equal(model.generate(**call, do_sample=False), expected)


def test_files_of_emu3_5_load_as_qwen3(tmp_path: Path) -> None:
    """Their config has another model type, and the same names as Qwen3's."""
    model, ids = remote.model("emu3_5"), torch.tensor([[1, 5, 6, 7]])
    model.save_pretrained(tmp_path)
    rope = {"rope_theta": 1e4, "rope_scaling": None}
    published = {"architectures": ["Emu3ForCausalLM"], "model_type": "Emu3", "pretraining_tp": 1, "image_area": 518400,
                 "auto_map": {"AutoConfig": "configuration_emu3.Emu3Config"}, "rms_norm_eps": 1e-6}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**TEXT, **rope, **published}))
    loaded = T.Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_what_a_reader_does_not_follow_is_an_error() -> None:
    reader, ids = Reader(remote.model("emu3_5")), torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert reader(ids).logits.shape == (1, 3, VOCAB) and reader.device == ids.device
        for given, word in (
            ({"attention_mask": torch.tensor([[0, 1, 1]])}, "padding"),
            ({"position_ids": ids}, "position_ids"),
            ({"input_ids": ids.expand(2, -1)}, "several rows"),
            ({CACHE: object()}, "a new cache"),
        ):
            with pytest.raises(ValueError, match=f"calls the model with {word}"):
                reader(**{"input_ids": ids, **given})
