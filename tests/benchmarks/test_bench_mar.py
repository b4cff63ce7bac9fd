"""The MAR suite of the image benchmark: real calls on a tiny pipeline, records and tables."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import tiny_mar as tiny

from benchmarks.__main__ import parser as workshop
from benchmarks.suites import mar as judged_mar
from benchmarks.suites import mar_ways as mar
from mmspec.app import cli
from mmspec.app.mar import draws


def test_the_suite_measures_a_folder(tmp_path, capsys):
    tiny.pipeline().save_pretrained(tmp_path / "model")
    line = ["image", "--model", str(tmp_path / "model"), "--images", "2", "--batch", "2", "--json"]
    line += [str(tmp_path / "out.json"), "--methods", "quarter*", "n=4", "self-2", "disa*", "--guidance", "1.5"]
    assert cli.main(line, workshop) == 0
    records = {r["method"]: r for r in json.loads((tmp_path / "out.json").read_text())["records"]}
    assert list(records) == ["all, plain head", "quarter, plain head", "n=4", "disa 9-4", "self-2"]
    assert records["all, plain head"]["speedup_e2e"] == 1.0 and records["all, plain head"]["passes"] == 8
    assert records["n=4"]["passes"] == 2 and records["n=4"]["distribution"] == "another"
    assert records["disa 9-4"]["evaluations"] < 0.8 * records["all, plain head"]["evaluations"]
    assert [name for name, r in records.items() if r["stock_path"]] == ["all, plain head", "quarter, plain head"]
    speculated = records["self-2"]
    assert speculated["distribution"] == "kept" and speculated["passes"] < 8 and 0 < speculated["acceptance"] < 1
    assert "over quarter, plain head" in capsys.readouterr().out


def test_ways_cover_both_bases_and_every_mode():
    names = {way.name: way for way in mar.ways(64, 50, {"draft": object(), "mar-b": object()})}
    ends = {name: way.facts["distribution"] for name, way in names.items()}
    assert names["quarter, plain head"].arguments["num_inference_steps"] == 16
    assert {end for name, end in ends.items() if name.startswith(("self", "draft", "all"))} == {mar.KEPT}
    assert ends["cspd-4"] == mar.BENT and ends["n=16"] == mar.OTHER
    assert names["cspd-8 mar-b n=16"].options["draft"] is names["draft-2 mar-b"].options["draft"]
    assert names["cspd-8 n=16"].arguments == {"num_inference_steps": 16} and ends["cspd-8 n=16"] == mar.BENT
    assert names["self-4, compiled"] == replace(names["self-4"], name="self-4, compiled", arguments={"compile": True})
    assert not any(name.startswith(("draft", "cspd")) for name in (way.name for way in mar.ways(64, 50, {})))


def test_drafts_of_ones_own(tmp_path):
    tiny.pipeline().save_pretrained(tmp_path / "model")
    tiny.transformer(2).save_pretrained(tmp_path / "small")
    line = ["image", "--model", str(tmp_path / "model"), "--images", "1", "--batch", "1", "--guidance", "1"]
    line += ["--json", str(tmp_path / "out.json"), "--methods", "cspd-4*", "cspd-8*", "--drafters"]
    assert cli.main([*line, str(tmp_path / "small")], workshop) == 0
    records = {r["method"]: r for r in json.loads((tmp_path / "out.json").read_text())["records"]}
    assert set(records) == {"all, plain head", "cspd-4 small", "cspd-8 small", "cspd-8 small n=4"}
    assert records["cspd-4 small"]["draft_rows"] > 0 and records["cspd-8 small n=4"]["passes"] == 2
    assert cli.main([*line, str(tmp_path / "nowhere")], workshop) == 1


@pytest.mark.full
def test_quality_of_few_pictures(tmp_path, monkeypatch):
    call, groups = mar.call, []
    monkeypatch.setattr(judged_mar, "call", lambda *given: groups.append(given[3]) or call(*given))
    figure = pytest.importorskip("matplotlib.figure")
    tiny.pipeline().save_pretrained(tmp_path / "model")
    line = ["image", "--model", str(tmp_path / "model"), "--images", "1", "--quality-images", "5", "--json"]
    line += [str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.svg")]
    assert cli.main([*line, "--methods", "n=4", "--guidance", "1"], workshop) == 0
    *speeds, record = json.loads((tmp_path / "out.json").read_text())["records"]
    assert {r["method"] for r in speeds} == {"all, plain head", "n=4"} and record["method"] == "n=4"
    assert (tmp_path / "out.svg").stat().st_size > 1000
    panel = figure.Figure().subplots()
    judged_mar.draw_curves(panel, [*speeds, record])
    (dot,) = (line for line in panel.lines if line.get_label() == "distribution: another")
    seconds = [r["seconds_per_image"] for r in speeds if (r["method"], r["batch"]) == ("n=4", 1)]
    assert list(dot.get_xdata()) == seconds and list(dot.get_ydata()) == [record["fd_all"]]
    assert record["fd_all"] > 0 and record["fd_real"] is None and record["noise"] > 0
    assert [len(seeds) for seeds in groups[-3:]] == [5, 5, 5], "no picture counts twice"


def test_a_folder_that_is_none_is_told(tmp_path, capsys):
    (tmp_path / "model_index.json").write_text('{"_class_name": "MARPipeline"}')
    assert cli.main(["image", "--model", str(tmp_path)], workshop) == 1
    assert "cannot load" in capsys.readouterr().err
    assert cli.main(["bench", "image", "--model", str(tmp_path)]) == 1
    assert "generate --model" in capsys.readouterr().err


@pytest.mark.parametrize(("model", "known"), [("mar", True), ("scenes-mar", True), ("scenes-llamagen", False)])
def test_what_is_a_mar(model, known):
    assert draws(model) is known
