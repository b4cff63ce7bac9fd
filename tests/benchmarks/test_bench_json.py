"""The json suite: captions of a schema by stock and by drafters, counted by a validator that mmspec does not use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import parser as workshop
from benchmarks.suites import json_captions
from mmspec.app import cli

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}


def test_captions_are_counted_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema, out = tmp_path / "schema.json", tmp_path / "out.json"
    schema.write_text(json.dumps(SCHEMA))
    said = ["json", "--schema", str(schema), "--images", "1", "--prompt", "short", "--max-new-tokens", "12"]
    assert cli.main([*said, "--device", "cpu", "--json", str(out)], workshop) == 0
    records = {r["method"]: r for r in json.loads(out.read_text())["records"]}
    assert list(records) == ["stock", "forced tokens alone", "scenes-video-eagle"]
    assert all(r["valid_rate"] == r["identical_rate"] == 1 for r in records.values())
    assert records["stock"]["tokens_per_target_call"] == 1 < records["forced tokens alone"]["tokens_per_target_call"]
    assert "100.0% valid" in capsys.readouterr().err


def test_what_is_not_of_the_schema_does_not_count() -> None:
    assert json_captions.valid('{"n": 2}', SCHEMA)
    assert not any(json_captions.valid(text, SCHEMA) for text in ('{"n": 3}', '{"n": 1', "one", '{"n": 1, "m": 0}'))
