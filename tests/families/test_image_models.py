"""Models that draw pictures token by token, patched as they stand: stock calls, stock tokens, fewer forwards."""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import remote_image_models
import tiny_image_models
import tiny_vlms
import torch
import transformers as T
from compared import as_stock
from hostile_drafters import DRAFTERS, Oracle, eagle
from table_targets import excess
from tiny_image_models import PAINTERS, draw
from torch import Tensor

import mmspec
from mmspec.loop import decode, start
from mmspec.pipelines.families import decoder_only
from mmspec.pipelines.families import table as families
from mmspec.pipelines.host.processors.table import Processors
from mmspec.pipelines.patch import UnsupportedError
from mmspec.pipelines.target.model import Request
from mmspec.pipelines.target.vlm import VlmTarget
from mmspec.session import Row, Session

STOCK = [name for name, painter in PAINTERS.items() if painter.stock]
HOSTILE = ["ngram", "random tree", "specials", "holes", "broken chain", "empty", "drawn", "eagle tree", "eagle NaN"]
KNOWING = ["always right", "right within", "always wrong"]


def cases(names: Any, drafters: list[str]) -> list[Any]:
    """Every model with every drafter; a third of the pairs, with all of either, and all of jacobi's run by default."""
    return [
        pytest.param(name, how, marks=[] if (i + j) % 3 == 0 or how == "jacobi" else pytest.mark.full)
        for i, name in enumerate(names)
        for j, how in enumerate(drafters)
    ]


def plain(name: str, call: dict[str, Any], **options: Any) -> Tensor:
    """Stock decoding; where stock has no such call, our own with drafts that propose nothing."""
    model = tiny_image_models.model(name)
    if PAINTERS[name].stock:
        return draw(model, call, **options)
    with mmspec.enable(model, drafter=DRAFTERS["empty"](model, Oracle({})), reproducible=True):
        return draw(model, call, **options)


def drafter(name: str, how: str, call: dict[str, Any], answer: Tensor) -> Any:
    """A drafter by name; one that knows the answer finds it by a row's prompt, which Janus' rows do not hold."""
    if how == "jacobi":
        return how
    ids = call["input_ids"]
    answers = {(): answer[0].tolist()} if name == "janus" else dict(Oracle.of(ids, answer).answers)
    return DRAFTERS[how](tiny_image_models.model(name), Oracle(answers))


# -- greedy ----------------------------------------------------------------------------------------------------------


@cache
def greedy(name: str, rows: int) -> tuple[dict[str, Any], Tensor]:
    """A call and what plain decoding makes of it."""
    call = PAINTERS[name].call(rows)
    return call, plain(name, call)


@pytest.mark.parametrize(("name", "how"), cases(PAINTERS, ["jacobi", *HOSTILE, *KNOWING]))
@pytest.mark.every(8)
def test_greedy_is_token_identical(name: str, how: str) -> None:
    model = tiny_image_models.model(name)
    for rows in (1, 3):
        call, expected = greedy(name, rows)
        with mmspec.enable(model, drafter=drafter(name, how, call, expected)) as handle:
            assert torch.equal(draw(model, call), expected)
        tau = handle.stats.tokens_per_target_call
        if rows == 1 and how in ("always right", "right within"):
            assert tau > 2
        if how in ("always wrong", "empty") and (rows == 1 or name != "janus"):
            assert tau == 1


@pytest.mark.parametrize("name", STOCK)
def test_eager_attention_is_token_identical(name: str) -> None:
    as_stock(tiny_image_models.model(name, "eager"), PAINTERS[name].call(3), "jacobi", draw=draw, window=5)


@pytest.mark.parametrize("name", PAINTERS)
def test_the_models_prove_something(name: str) -> None:
    """Pictures differ by prompt and hold many codes: a patch that mixed up rows or tokens would be seen."""
    answer = plain(name, PAINTERS[name].call(3))[:, -16:].tolist()
    assert len({tuple(row) for row in answer}) == 3
    assert len(set(answer[0])) > 6


# -- sampling, seed-exact --------------------------------------------------------------------------------------------

SAMPLING: list[dict[str, Any]] = [{"temperature": 1.3, "top_k": 0}, {"temperature": 0.9, "top_k": 20, "top_p": 0.9}]


def seeded(model: Any, call: dict[str, Any], **options: Any) -> Any:
    """What one sampled call gives under seed 7."""
    torch.manual_seed(7)
    return draw(model, call, do_sample=True, **options)


@pytest.mark.parametrize(("name", "how"), cases(STOCK, ["jacobi", "ngram", "random tree", "drawn", "eagle chain"]))
@pytest.mark.every(2)
def test_the_same_seed_gives_the_stock_picture(name: str, how: str) -> None:
    for rows, sampling in zip((1, 3), SAMPLING, strict=True):
        call = {"do_sample": True, **sampling}
        as_stock(tiny_image_models.model(name), PAINTERS[name].call(rows), how, call=call, seed=7, draw=draw,
                 reproducible=True)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "how"), cases(["llava", "qwen2_5_vl", "gemma3", "paligemma"], ["ngram", "random tree", "jacobi"])
)
@pytest.mark.every(2)
def test_the_same_seed_gives_the_stock_text(name: str, how: str) -> None:
    """Also for text about pictures, and for rows that end before the others."""
    model, call = tiny_vlms.model(name), {"do_sample": True, "max_new_tokens": 24}
    for kind in ("image first", "ragged"):
        inputs = tiny_vlms.prompt(name, kind)
        ending = {"eos_token_id": int(seeded(model, inputs, max_new_tokens=24)[0, -15])}
        as_stock(model, inputs, how, call={**call, **ending}, seed=7, reproducible=True)


@pytest.mark.parametrize("name", STOCK)
def test_a_right_guess_is_kept_while_sampling(name: str) -> None:
    model, call = tiny_image_models.model(name), PAINTERS[name].call(1)
    expected = seeded(model, call)
    assert not torch.equal(expected, greedy(name, 1)[1])
    with mmspec.enable(model, drafter=drafter(name, "always right", call, expected), reproducible=True) as handle:
        assert torch.equal(seeded(model, call), expected)
    assert handle.stats.tokens_per_target_call > 4


# -- sampling, by the distribution -----------------------------------------------------------------------------------


def first_two(model: Any, call: dict[str, Any], scale: float, temperature: float) -> Tensor:
    """The distribution of Janus' first two codes, [V, V], from the model's parts alone."""
    ids, inner = call["input_ids"], model.model
    pads = torch.where((ids == 1) | (ids == tiny_image_models.BEGIN), ids, 0)
    prompt = model.get_input_embeddings()(torch.cat([ids, pads]))

    def distribution(embeds: Tensor) -> Tensor:
        last = inner.language_model(inputs_embeds=embeds).last_hidden_state[:, -1]
        cond, uncond = inner.generation_head(last).chunk(2)
        return ((uncond + scale * (cond - uncond)).double() / temperature).softmax(-1)

    first = distribution(prompt)[0]
    V = len(first)
    codes = model.prepare_embeddings_for_image_generation(torch.arange(V)[:, None])
    longer = [torch.cat([half.expand(V, -1, -1), codes], 1) for half in prompt.chunk(2)]
    return first[:, None] * distribution(torch.cat(longer))


@pytest.mark.parametrize("options", [{"drafter": "jacobi", "window": 3}, {"drafter": "ngram"}])
@torch.no_grad()
def test_sampled_pictures_have_the_stock_law(options: dict[str, Any]) -> None:
    model, many = tiny_image_models.small_janus(), 3000
    prompt = tiny_image_models.ragged([[1, 5, 6, tiny_image_models.BEGIN]])
    call = {**prompt, "generation_mode": "image", "guidance_scale": 1.5}
    distribution, other = (first_two(model, call, scale, 8.0).flatten() for scale in (1.5, 2.5))
    torch.manual_seed(1)
    with mmspec.enable(model, **options) as handle:
        drawn = draw(model, call, do_sample=True, top_k=0, temperature=8.0, num_return_sequences=many)[:, :2]
    assert float(distribution.max()) < 0.5 and int((distribution * many > 5).sum()) > 10
    assert excess(drawn, distribution, 6) < 5
    assert excess(drawn, other, 6) > 10, "another guidance would be seen"
    assert handle.stats.tokens == many * 4


# -- what each family needs ------------------------------------------------------------------------------------------


def forwards(module: Any, run: Any) -> list[int]:
    """Rows of each forward of a module while something runs."""
    seen: list[int] = []

    def hook(_: Any, args: Any, kwargs: Any) -> None:
        given = kwargs.get("inputs_embeds") if kwargs.get("inputs_embeds") is not None else args[0]
        seen.append(len(given))

    with module.register_forward_pre_hook(hook, with_kwargs=True):
        run()
    return seen


def test_a_draft_model_reads_the_prompt_of_an_image() -> None:
    """By a call of its own, which is not one for an image."""
    model, call = tiny_image_models.model("chameleon"), PAINTERS["chameleon"].call(1)
    with mmspec.enable(model, drafter="plain"):
        plain = draw(model, call)
    with mmspec.enable(model, drafter=copy.deepcopy(model)) as handle:
        assert torch.equal(draw(model, call), plain)
    assert handle.stats.drafted


def test_emu3_runs_both_prompts_in_one_forward() -> None:
    model, call = tiny_image_models.model("emu3"), PAINTERS["emu3"].call(1)
    stock = forwards(model.model.text_model, lambda: draw(model, call))
    with mmspec.enable(model, drafter=DRAFTERS["empty"](model, Oracle({}))):
        ours = forwards(model.model.text_model, lambda: draw(model, call))
    assert len(stock) == 2 * 22 and set(stock) == {1}
    assert ours == [1, 1] + [2] * 21


def test_emu3_returns_the_stock_scores_and_logits() -> None:
    model, call = tiny_image_models.model("emu3"), PAINTERS["emu3"].call(1)
    told = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    stock = draw(model, call, **told)
    with mmspec.enable(model, drafter="jacobi"):
        ours = draw(model, call, **told)
    assert torch.equal(stock.sequences, ours.sequences)
    for name in ("scores", "logits"):
        for a, b in zip(stock[name], ours[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


class Caught(Exception):
    """Carries what stock `generate` hands to its decoding method."""


@torch.no_grad()
def test_guided_rows_join_a_running_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each picture is the one it would have been alone, though both its streams move in the batch when others come."""
    model, full = tiny_image_models.model("emu3"), PAINTERS["emu3"].call(3)
    per_row = [name for name, value in full.items() if isinstance(value, Tensor)]
    calls = [{**full, **{name: full[name][[b]] for name in per_row}} for b in range(3)]
    expected = [draw(model, call)[0].tolist() for call in calls]

    def catch(model: Any, handle: Any, call: Any) -> None:
        raise Caught(call)

    def opened(call: dict[str, Any]) -> tuple[Session, VlmTarget]:
        with monkeypatch.context() as patched, pytest.raises(Caught) as caught:
            patched.setattr(decoder_only, "generate", catch)
            draw(model, call)
        made = caught.value.args[0]
        target, ends = VlmTarget(model, (), made.guidance), made.endings
        tokens, request = made.input_ids[0].tolist(), Request(Processors(made.processors), sample=False)
        row = Row(tokens, len(tokens), ends.limit, 0, ends.eos, ends.of(0), request=request)
        return start(target, handle.drafter, [row], made)[0], target

    with mmspec.enable(model, drafter="jacobi", window=5) as handle:
        session, target = opened(calls[0])
        rows = list(session.rows)
        for call in calls[1:]:
            for _ in zip(range(2), decode(session, target, handle.drafter), strict=False):
                pass
            guest, _ = opened(call)
            rows += guest.rows
            session.admit(guest)
        for _ in decode(session, target, handle.drafter):
            pass
    assert [row.tokens for row in rows] == expected


def test_guidance_without_a_negative_prompt_is_stock() -> None:
    call = {name: value for name, value in PAINTERS["emu3"].call(3).items() if not name.startswith("negative")}
    as_stock(tiny_image_models.model("emu3"), call, "jacobi", draw=draw)


def test_janus_draws_and_writes_on_one_enabled_model() -> None:
    text = {**tiny_image_models.ragged(tiny_image_models.PROMPTS), "max_new_tokens": 12, "max_length": None}
    calls = [PAINTERS["janus"].call(3), text]
    handle = as_stock(tiny_image_models.model("janus"), calls, "jacobi", draw=draw, window=6)
    assert handle.stats.tokens == 3 * 16 + 3 * 12


def test_janus_keeps_its_arguments() -> None:
    model, call = tiny_image_models.model("janus"), PAINTERS["janus"].call(1)
    options = {"num_return_sequences": 3, "temperature": 1.4, "return_dict_in_generate": True}
    expected = seeded(model, call, **options)
    mine = T.LogitsProcessorList([T.TemperatureLogitsWarper(0.5)])
    cooler = seeded(model, call, logits_processor=T.LogitsProcessorList(mine))
    with mmspec.enable(model, drafter="jacobi", reproducible=True):
        got = seeded(model, call, **options)
        again = [seeded(model, call, logits_processor=mine) for _ in range(2)]
    assert torch.equal(got.sequences, expected.sequences) and got.sequences.shape == (3, 16)
    assert all(torch.equal(tokens, cooler) for tokens in again)
    assert not torch.equal(cooler, seeded(model, call))
    assert len(mine) == 1, "the caller's list is left alone"


def test_janus_runs_the_stock_loop_where_it_has_to() -> None:
    class Own(T.LogitsProcessor):
        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            return scores.roll(1, -1)

    model, call = tiny_image_models.model("janus"), PAINTERS["janus"].call(1)
    expected = draw(model, call, logits_processor=T.LogitsProcessorList([Own()]))
    with mmspec.enable(model) as handle:
        with pytest.warns(UserWarning, match="logits processor Own"):
            got = draw(model, call, logits_processor=T.LogitsProcessorList([Own()]))
        with pytest.raises(UnsupportedError, match="scores"):
            draw(model, call, return_dict_in_generate=True, output_scores=True)
        assert handle.stats.tokens == 0
    assert torch.equal(got, expected)
    with mmspec.enable(model, drafter=eagle(tiny_image_models.small_janus())):
        draw(model, call)
        with pytest.raises(UnsupportedError, match="vocabulary"):
            mmspec.enable(tiny_image_models.small_janus(), drafter=eagle(model))
            draw(tiny_image_models.small_janus(), call)
    mmspec.disable(tiny_image_models.small_janus())


def hand_drawn(model: Any, ids: Tensor, length: int) -> list[int]:
    """Greedy picture tokens of one prompt by whole forwards through the decoder and the head, nothing cached."""
    codes = torch.arange(tiny_image_models.FIRST_CODE, tiny_image_models.FIRST_CODE + 64)
    drawn = torch.cat([ids, torch.tensor([[tiny_image_models.BEGIN]])], 1)
    for _ in range(length):
        logits = model.lm_head(model.model(input_ids=drawn).last_hidden_state[0, -1])
        drawn = torch.cat([drawn, codes[logits[codes].argmax()].view(1, 1)], 1)
    return [*drawn[0].tolist(), tiny_image_models.END]


@torch.no_grad()
def test_chameleon_draws_what_its_head_says(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_image_models.model("chameleon"), torch.tensor([tiny_image_models.PROMPTS[0]])
    expected = hand_drawn(model, ids, 16)
    begun = torch.cat([ids, torch.tensor([[tiny_image_models.BEGIN]])], 1)
    with mmspec.enable(model, drafter="jacobi"):
        for prompt in (ids, begun):
            call = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
            assert draw(model, call, multimodal_generation_mode="image-only")[0].tolist() == expected
        brief = draw(model, call, multimodal_generation_mode="image-only", max_length=prompt.shape[1] + 4)
        assert brief[0].tolist() == expected[: prompt.shape[1] + 4]
        short, said = T.GenerationConfig(max_new_tokens=5, do_sample=False), list[str]()  # of a length beside a config
        monkeypatch.setattr(T.generation.utils.logger, "warning_once", lambda message, *_: said.append(message))
        shown = model.generate(**call, multimodal_generation_mode="image-only", generation_config=short)
        assert not said and shown[0].tolist() == expected[: prompt.shape[1] + 5] and short.max_new_tokens == 5


def test_chameleon_writes_as_before() -> None:
    model, prompts = tiny_image_models.model("chameleon"), tiny_image_models.ragged(tiny_image_models.PROMPTS)
    text = {**prompts, "max_new_tokens": 9}
    expected = draw(model, text)
    with mmspec.enable(model, drafter="jacobi"):
        assert torch.equal(draw(model, text), expected)
        assert torch.equal(draw(model, text, multimodal_generation_mode="text-only"), expected)
        with pytest.raises(ValueError, match="one of text-only, image-only; got 'unrestricted'"):
            draw(model, text, multimodal_generation_mode="unrestricted")


@pytest.mark.parametrize("name", ["chameleon", "janus"])
def test_words_may_be_drafted_as_a_call_asks(name: str) -> None:
    inputs, call = {"input_ids": torch.tensor([[1, 5, 6, 7, 8, 9]])}, {"max_new_tokens": 6}
    call["prompt_lookup_num_tokens"] = 2
    assert as_stock(tiny_image_models.model(name), inputs, "ngram", call=call).stats.rounds


def test_chameleon_never_falls_back_to_text() -> None:
    model, call = tiny_image_models.model("chameleon"), PAINTERS["chameleon"].call(1)
    with mmspec.enable(model, on_unsupported="fallback"), pytest.raises(UnsupportedError, match="no image mode"):
        draw(model, call, num_beams=2)


# -- rules -----------------------------------------------------------------------------------------------------------

BENT = ["lantern(k=8, lam=3.0)", "scaled(omega=2.0)", "gsd(group=6)", "grouped(radius=0.5)", "pooled(radius=0.5)",
        "typical(epsilon=0.05, delta=0.2)"]  # fmt: skip


@pytest.mark.parametrize(("name", "rule"), cases(["janus", "emu3", "glm_image", "chameleon guided"], BENT))
@pytest.mark.every(3)
def test_relaxed_rules_reach_every_model(name: str, rule: str) -> None:
    model, call = tiny_image_models.model(name), PAINTERS[name].call(2)
    with mmspec.enable(model, drafter="jacobi", rule=rule) as bent:
        seeded(model, call)
    assert bent.rule.name.startswith(rule.split("(")[0]) and not bent.stats.lossless
    if not rule.startswith("grouped"):  # exact for cells as a whole: nothing to cut short
        with mmspec.enable(model, drafter="jacobi", rule=rule, budget=0.0) as bound:
            seeded(model, call)
        assert bent.stats.spent > 0 and bound.stats.spent <= 1e-9


def test_greedy_lantern_on_anole_pays_for_every_token_that_is_not_likeliest() -> None:
    """Its neighbours are found by hand, in the raw codes, as the authors find them; every token stands by them."""
    model, call = tiny_image_models.model("chameleon guided"), PAINTERS["chameleon guided"].call(1)
    drawing = {**call, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    codes = model.model.vqmodel.quantize.embedding.weight
    with torch.no_grad():
        codes /= codes.norm(dim=-1, keepdim=True)  # so that both distances are one
    apart, first = torch.cdist(codes, codes).fill_diagonal_(math.inf), model.model.vocabulary_mapping.image_tokens[0]
    with mmspec.enable(model, drafter="jacobi", rule="lantern(k=40, delta=0.9)") as handle:
        out = model.generate(**drawing)
    paid = 0
    for token, scores in zip(out.sequences[0, -len(out.scores) :].tolist(), out.scores, strict=True):
        p = scores[0].double().softmax(-1)
        if token == int(p.argmax()):
            continue
        sums = p[apart[token - first].argsort()[:40] + first].cumsum(0)
        assert float(p[token]) + max([0.0, *sums[sums <= 0.9].tolist()]) >= float(p.max()) - 1e-6
        paid += 1
    assert handle.stats.spent == paid > 2


def test_text_stays_exact_under_a_rule_for_pictures() -> None:
    text = {**tiny_image_models.ragged(tiny_image_models.PROMPTS), "max_new_tokens": 12, "max_length": None}
    for name in ("janus", "chameleon", "emu3"):
        model = tiny_image_models.model(name)
        with mmspec.enable(model, drafter="jacobi", rule="lantern(k=8, lam=3.0)") as handle:
            seeded(model, text)
        assert handle.stats.lossless and handle.stats.spent == 0


@pytest.mark.parametrize("name", ["emu3", "chameleon", "glm_image"])
def test_codes_stand_at_their_tokens(name: str) -> None:
    """Whoever asks for the codes nearest to a picture token gets picture tokens, by the tokenizer's own distance."""
    model = tiny_image_models.model(name)
    book = families.of(model).codebook(model)
    first, count = (0, 126) if name == "glm_image" else (40, 64)
    assert book.shape[0] == model.get_output_embeddings().weight.shape[0]
    codes = torch.nn.functional.normalize(model.model.vqmodel.quantize.embedding.weight, dim=-1)
    mine = torch.nn.functional.normalize(book, dim=-1)
    torch.testing.assert_close(mine[first : first + count] @ mine[first : first + count].T, codes @ codes.T)
    others = torch.cat([mine[:first], mine[first + count :]])
    assert float((mine[first : first + count] @ others.T).abs().max()) == 0


# -- the patch -------------------------------------------------------------------------------------------------------


def test_every_model_called_proved_is_proved_here(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {tiny_image_models.model(name).config.model_type for name in PAINTERS}
    kinds |= {name.split()[0] for name in remote_image_models.MODELS}
    assert kinds | {"llamagen"} == set(families.PICTURES)
    mmspec.supported()
    said = capsys.readouterr().out
    assert all(word in said for word in (*families.PICTURES, "jacobi", "lantern"))


@pytest.mark.parametrize("name", ["janus", "emu3", "glm_image", "chameleon"])
def test_disable_leaves_no_trace(name: str) -> None:
    model = tiny_image_models.model(name)
    before = {n: (type(m), set(vars(m))) for n, m in model.named_modules()}
    with mmspec.enable(model, drafter="jacobi", reproducible=True):
        draw(model, PAINTERS[name].call(1))
        assert type(model) is not before[""][0]
    assert {n: (type(m), set(vars(m))) for n, m in model.named_modules()} == before


@pytest.mark.parametrize("name", PAINTERS)
@pytest.mark.every(8)
def test_two_threads_draw_on_one_model(name: str) -> None:
    model, calls = tiny_image_models.model(name), [PAINTERS[name].call(rows) for rows in (1, 2, 3)]
    expected = [plain(name, call) for call in calls] * 3
    with mmspec.enable(model, drafter="jacobi", window=4), ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda call: draw(model, call), calls * 3))
    assert all(map(torch.equal, found, expected))


# -- a diffusers pipeline --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def glm_pipeline() -> Any:
    return tiny_image_models.glm_pipeline()


def test_a_pipeline_draws_the_same_picture_for_the_same_generator(glm_pipeline: Any) -> None:
    def picture() -> bytes:
        g = torch.Generator().manual_seed(3)
        return glm_pipeline(
            "w5 w6 w7", height=64, width=64, num_inference_steps=1, generator=g, max_sequence_length=16
        ).images[0].tobytes()  # fmt: skip

    encoder = glm_pipeline.vision_language_encoder
    stock = picture()
    with mmspec.enable(glm_pipeline, drafter="jacobi", reproducible=True) as handle:
        assert mmspec.stats(glm_pipeline) is handle.stats
        fast = picture()
    assert fast == stock
    assert handle.stats.tokens == 261
    assert type(encoder) is T.GlmImageForConditionalGeneration


# -- pipelines whose text model writes -------------------------------------------------------------------------------


class Words:
    """A tokenizer that knows numbers, and the chat templates of the pipelines below."""

    pad_token_id, eos_token_id, model_max_length = 0, 2, 12

    @property
    def tokenizer(self) -> Words:
        return self

    def apply_chat_template(self, *args: Any, tokenize: bool = True, **kwargs: Any) -> Any:
        return self("") if tokenize else ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ids = torch.tensor([[1, 5, 6, 7, 8, 5, 6]])
        return T.BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def decode(self, ids: Tensor, **kwargs: Any) -> str:
        return " ".join(map(str, ids.tolist()))

    def batch_decode(self, ids: Tensor, **kwargs: Any) -> list[str]:
        return [self.decode(row) for row in ids]


def test_the_text_model_of_a_diffusers_pipeline_is_found_where_it_writes() -> None:
    import diffusers as D

    writer, parts = tiny_vlms.model("llava"), {"scheduler": None, "vae": None, "transformer": None}
    flux = D.Flux2Pipeline(text_encoder=writer, tokenizer=Words(), **parts)
    ernie = D.ErnieImagePipeline(text_encoder=None, tokenizer=None, pe=writer, pe_tokenizer=Words(), **parts)
    for pipe, write in (
        (flux, lambda: flux.upsample_prompt("w5")),
        (ernie, lambda: ernie._enhance_prompt_with_pe("w5", torch.device("cpu"), temperature=1.0, top_p=1.0)),
    ):
        expected = write()
        with mmspec.enable(pipe, drafter="ngram") as handle:
            if pipe is ernie:
                assert write() == expected
            else:
                torch.manual_seed(0)
                assert write()
            assert handle.stats.rounds and mmspec.stats(pipe) is handle.stats
        assert not hasattr(type(writer), "_mmspec_patch")
    ernie.register_modules(text_encoder=tiny_vlms.model("qwen2_vl"))
    with pytest.raises(TypeError, match=r"several models that can generate: .*; enable one of them, such as pipe"):
        mmspec.enable(ernie, drafter="ngram")
    with pytest.raises(TypeError, match="a pipeline that generates tokens; got ErnieImagePipeline"):
        mmspec.enable(D.ErnieImagePipeline(text_encoder=None, tokenizer=None, **parts))
