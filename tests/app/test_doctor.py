"""`mmspec doctor`: what it finds here, what it says of what is wrong, and that it tells nobody's folders."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from mmspec.app import cli, doctor, embedded
from mmspec.app.doctor import BAD, GOOD, NOTE, Finding
from mmspec.pipelines.host import contract


@pytest.fixture(scope="module")
def found() -> list[Finding]:
    return list(doctor.findings("cpu"))


def test_all_is_well_here(found: list[Finding]):
    told = {one.about: one for one in found}
    assert [str(one) for one in found if one.mark == BAD] == []
    assert set(doctor.PACKAGES) | {"mmspec", "python", "contract", "device", "compiler"} <= set(told)
    assert told["contract"].text == f"{len(contract.judged())} rows hold"
    assert told["device"].text.startswith("cpu: ")
    for model in (embedded.MODEL, embedded.HYBRID):
        assert told[model].mark == GOOD and told[model].text.startswith("8 tokens, ")
        assert "identical to stock generate" in told[model].text


def test_it_names_no_folders(found: list[Finding]):
    text = "\n".join(map(str, found))
    for folder in (Path.home(), Path.cwd(), sys.prefix, Path(torch.__file__).parent):
        assert str(folder) not in text


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("cannot open /home/anna/my models/x", "cannot open …/my models/x"),
        ("in '/home/anna/models/llava/config.json': 3", "in '…/config.json': 3"),
        ("~/models/a.py, C:\\Users\\anna\\a.py", "…/a.py, …/a.py"),
        ("see pipelines/target/vlm.py, https://huggingface.co/docs/x", "see pipelines/target/vlm.py, https://huggingface.co/docs/x"),
    ],
)  # fmt: skip
def test_folders_are_left_out(said: str, told: str):
    assert str(Finding(GOOD, "x", said)).split(maxsplit=2)[2] == told


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without models and compiler."""
    monkeypatch.setattr(embedded, "DRAFTERS", {})
    monkeypatch.setattr(doctor, "_compiler", lambda: iter(()))


def report(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    return cli.main(["doctor", "--device", "cpu"]), capsys.readouterr().out


def test_a_broken_row_is_told(quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    row = next(row for row in contract.ROWS if not row.models)._replace(found="there is no such thing")
    some = next(row for row in contract.ROWS if row.models)._replace(found="it is gone")
    monkeypatch.setattr(contract, "broken", lambda: [row, some])
    code, said = report(capsys)
    assert code == 1 and f"{BAD}  contract       {row.what}: there is no such thing. {row.why}" in said
    assert f"{NOTE}  contract       {some.what}: it is gone" in said and "to be fixed: 1, marked NO" in said
    assert (
        f'2 of {len(contract.judged())} rows are broken; pip install "transformers{contract.TESTED["transformers"]}"'
        in said
    )


def test_versions_out_of_the_range_are_told(
    quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(contract, "TESTED", {"transformers": ">=4,<5", "torch": ">=2.11"})
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "transformers", "no-such-package"))
    code, said = report(capsys)
    assert code == 1 and 'untested: mmspec is tested with >=4,<5; pip install "transformers>=4,<5"' in said
    assert f'{BAD}  no-such-package not installed; pip install "no-such-package"' in said


def test_an_error_is_a_finding(quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def gone() -> list:
        raise OSError(f"cannot read {Path(torch.__file__)}")

    monkeypatch.setattr(contract, "broken", gone)
    code, said = report(capsys)
    assert code == 1 and f"{BAD}  contract       OSError: cannot read …/__init__.py" in said
    assert cli.main(["doctor", "--device", "nowhere"]) == 1 and "no device 'nowhere' here" in capsys.readouterr().out


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    finding, *_ = doctor._compiler()
    assert finding.mark == NOTE and "no C++ compiler, which compile=True needs" in finding.text


def test_a_model_that_nothing_drafts_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedded, "drafter", lambda model: embedded.STOCK)
    (finding,) = doctor._tokens(embedded.HYBRID, "cpu")
    assert finding.mark == BAD and finding.text.startswith("not accelerated: ")
