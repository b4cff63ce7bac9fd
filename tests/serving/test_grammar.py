"""Answers in JSON: always valid, those of stock generate, in fewer rounds where the schema forces tokens."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from compared import drain
from torch import Tensor

import mmspec
from mmspec import media, zoo
from mmspec.app import embedded
from mmspec.app import engine as engines
from mmspec.app.cli import main
from mmspec.pipelines.drafters import forced
from mmspec.pipelines.prompts import chat_inputs
from mmspec.pipelines.serving.continuous import ContinuousBatcher


def strict(**fields: Any) -> dict[str, Any]:
    """The schema of an object that has exactly these fields."""
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


THING = strict(size={"enum": ["small", "large"]}, count={"type": "integer", "minimum": 0, "maximum": 9})
THINGS = {"type": "array", "minItems": 1, "maxItems": 1, "items": THING}
SCHEMA = strict(background={"type": "string", "maxLength": 8}, objects=THINGS)
SAMPLES = sorted(zoo.samples().glob("*.png"))
OWN = [*embedded.drafters(embedded.MODEL)]
MOST = 64


@cache
def engine() -> engines.Engine:
    return engines.load(embedded.MODEL, "none", "cpu", "auto", MOST, 0.0)


@cache
def prompts(count: int = 2) -> Any:
    pictures = [[media.load_image(path)] for path in SAMPLES[:count]]
    return chat_inputs(engine().processor, ["Describe this image."] * count, pictures)


def grammar() -> Any:
    return mmspec.json_grammar(engine().processor, SCHEMA)


def generate(inputs: Any, **how: Any) -> Tensor:
    how = {"max_new_tokens": MOST, "do_sample": False, "logits_processor": [grammar()]} | how
    return engine().model.generate(**inputs, **how)[:, inputs["input_ids"].shape[1] :]


@cache
def stock() -> Tensor:
    return generate(prompts())


def texts(rows: Any) -> list[str]:
    return engine().processor.batch_decode(rows, skip_special_tokens=True)


def valid(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


@pytest.mark.parametrize("drafter", ["plain", "suffix", "recycle", *OWN, "ngram", "eagle chain", "adaptive"])
@pytest.mark.every(6)
def test_json_is_that_of_stock_and_forced_tokens_save_rounds(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rounds = engine().model, []
    options = {"eagle chain": {"depth": 3, "width": 1, "size": 4}, "adaptive": {"adaptive": True, "width": 1}}
    own = zoo.path(embedded.DRAFTER) if drafter in options else drafter
    own = zoo.path(drafter) if drafter in OWN else own
    for _ in range(2):
        with mmspec.enable(model, drafter=own, **options.get(drafter, {})) as handle:
            assert torch.equal(generate(prompts()), stock())
            rounds.append(handle.stats.rounds)
        monkeypatch.setattr(forced, "with_forced", lambda drafter, rows: drafter)
    assert rounds[0] < 0.8 * rounds[1]
    assert all(map(valid, texts(stock())))


@pytest.mark.parametrize("draws", [False, True])
def test_drawn_json_is_valid_and_with_stocks_noise_stocks(draws: bool) -> None:
    """With `draws` the drafter says q; tokens that are forced are point masses beside it."""
    model, how = engine().model, {"do_sample": True, "temperature": 1.2, "top_k": 50}
    torch.manual_seed(3)
    want = generate(prompts(), **how)
    tree = {"tree": [[0], [1], [0, 0]], "draws": True} if draws else {}
    with mmspec.enable(model, drafter=zoo.path(embedded.DRAFTER), reproducible=not draws, **tree) as handle:
        torch.manual_seed(3)
        found = generate(prompts(), **how)
        assert handle.stats.accepted > 20
    assert all(map(valid, texts(found)))
    assert draws or torch.equal(found, want)


def test_rows_with_a_grammar_beside_rows_without() -> None:
    model, one = engine().model, prompts(1)
    plain = generate(one, logits_processor=None)[0].tolist()
    with mmspec.enable(model, drafter=zoo.path(embedded.DRAFTER)):
        flow = ContinuousBatcher(model, engine().processor, 3, max_new_tokens=MOST, do_sample=False)
        asked = [{name: value[:1] for name, value in prompts(1).items()} for _ in range(6)]
        ends = drain(flow, asked, own=[{}, {"logits_processor": [grammar()]}] * 3)
    assert [end.error for end in ends] == [None] * 6
    json_rows = [texts([ends[number].tokens])[0] for number in (1, 3, 5)]
    assert len(set(json_rows)) == 1 and valid(json_rows[0])
    assert json_rows[0] == texts(generate(one))[0]
    assert {tuple(ends[number].tokens) for number in (0, 2, 4)} == {tuple(plain[: len(ends[0].tokens)])}


def test_a_parse_goes_anywhere() -> None:
    tokenizer = engine().processor.tokenizer
    text = tokenizer.encode('{"background":"red","objects":[{"size":"small","count":3}]}', add_special_tokens=False)
    parse, fresh = grammar().parse(), lambda: grammar().parse()
    other = tokenizer.encode('{"background":"bl', add_special_tokens=False)
    for go in (text, text[:9], other, text[:3], [], text, [*text, tokenizer.eos_token_id], [*text[:5], 7, 7, 7], other):
        again = fresh()
        assert parse.go(go) == again.go(go)
        assert parse.mask == again.mask
    assert fresh().forced([], 16) == tokenizer.encode('{"background":"', add_special_tokens=False)
    assert fresh().forced([], 2) == text[:2]
    assert fresh().forced(text, 16) == [tokenizer.eos_token_id]


def wide() -> Any:
    """A grammar beyond the limits of llguidance's parser, which shows in the middle of an answer."""
    kinds = [{"properties": {"kind": {"const": f"a{i}"}, "target": {"type": "string"}}} for i in range(150)]
    return mmspec.json_grammar(engine().processor, {"anyOf": [{"type": "object", **kind} for kind in kinds]})


def test_a_row_beyond_the_limits_of_the_parser_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on together."""
    rows, real = list[int](), ContinuousBatcher._round
    monkeypatch.setattr(ContinuousBatcher, "_round", lambda self: rows.append(len(self.running)) or real(self))
    with mmspec.enable(engine().model, "ngram"):
        flow = ContinuousBatcher(engine().model, engine().processor, 3, max_new_tokens=16, do_sample=False)
        ends = drain(flow, [prompts(1)] * 3, own=[{"logits_processor": [wide()]}, {}, {}])
    assert "too large for llguidance" in str(ends[0].error) and rows[:2] == [3, 2] and 1 not in rows
    assert ends[1].tokens == ends[2].tokens and not (ends[1].error or ends[2].error)


@pytest.mark.parametrize("enabled", [False, True])
def test_a_grammar_beyond_the_limits_of_its_parser_is_an_error(enabled: bool) -> None:
    with mmspec.enable(engine().model, "ngram") if enabled else nullcontext():
        with pytest.raises(ValueError, match="too large for llguidance, so simplify the schema"):
            generate(prompts(1), logits_processor=[wide()])
        assert torch.equal(generate(prompts()), stock())


def test_one_processor_serves_one_call_after_the_other() -> None:
    one = grammar()
    for count in (1, 2):
        assert texts(generate(prompts(count), logits_processor=[one])) == texts(stock())[:count]
    beams = generate(prompts(1), logits_processor=[one], num_beams=2)
    assert valid(texts(beams)[0])


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "thing"}, "is not supported: .*[Ii]nvalid type"),
        ("{", "cannot be read|is not supported"),
        ({"type": "object", "not": {}}, "Unimplemented keys"),
    ],
)
def test_schemas_that_cannot_be_kept_to_are_refused(schema: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        mmspec.json_grammar(engine().processor, schema)


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="a grammar needs a fast tokenizer; object is not one"):
        mmspec.json_grammar(object(), SCHEMA)


def test_captions_are_json_and_a_cut_one_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema, out = tmp_path / "schema.json", tmp_path / "out"
    schema.write_text(json.dumps(SCHEMA))
    words = ["caption", *map(str, SAMPLES[:3]), "--out", str(out), "--json-schema", str(schema)]

    def recorded() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (out / "metadata.jsonl").read_text().splitlines()]

    assert main([*words, "--max-new-tokens", "9"]) == 3
    assert f"{SAMPLES[0].name}: no complete JSON in 9 tokens; raise" in (out / "failed.jsonl").read_text()
    assert main(words) == 0
    assert [valid(record["text"]) for record in recorded()] == [True] * 3
    assert recorded()[0]["text"] == texts(stock())[0]
    said = capsys.readouterr().out
    assert said.count("on 3 of them stock generate took") == said.count("identical text on 3 of 3") == 2  # cut or not
    schema.write_text(json.dumps(strict(a={"const": 1})))
    assert main([*words, "--no-compare"]) == 0  # anew, for the schema is another
    assert {record["text"][:6] for record in recorded()} == {'{"a":1'}


@pytest.mark.parametrize(
    ("text", "more", "says"),
    [
        ("[1]", [], "holds a list; give an object"),
        ("{", [], "cannot be read as JSON"),
        ('{"type": "thing"}', [], "is not supported"),
        ("{}", ["--append", "A"], "--json-schema cannot be combined with --prepend or --append"),
    ],
)
def test_what_the_command_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, more: list[str], says: str
) -> None:
    (tmp_path / "schema.json").write_text(text)
    words = [str(SAMPLES[0]), "--out", str(tmp_path / "out"), "--json-schema", str(tmp_path / "schema.json")]
    assert main(["caption", *words, *more]) != 0
    assert says in capsys.readouterr().err
