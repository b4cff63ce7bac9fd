"""A prompt is chosen once and for all by the item's name, its variables are filled in, and mistakes are named."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mmspec.app.caption.prompts import PromptChoice, PromptError, Prompts
from mmspec.app.media.items import IMAGE, FileSource, Item


def item(name: str = "birds/red/1.jpg", **more) -> Item:
    return Item(name, IMAGE, FileSource(Path(name)), **more)


def test_variables_are_filled_in_everywhere():
    every = "{name}|{dir}|{tags}|{existing}|{{x}}"
    shared = dict.fromkeys(("system", "start", "prepend", "append"), every)
    asked = Prompts.read(every, **shared).of(item(existing="a {name} bird", tags=("red", "small")))
    filled = "1|birds/red|red, small|a {name} bird|{x}"
    assert asked == PromptChoice(filled, filled, filled, filled, filled)
    assert Prompts.read(every).of(item("1.jpg")).text == "1||||{x}"


@pytest.mark.parametrize("where", ["prompt", "system", "start", "prepend", "append"])
@pytest.mark.parametrize(
    "text, says",
    [
        ("a {titel}", r"unknown variable \{titel\} in the .*; use \{name\}, \{dir\}, \{tags\}, \{existing\}"),
        ("a {}", r"unknown variable \{\}"),
        ("a {0}", r"unknown variable \{0\}"),
        ("{name.__class__}", "unknown variable"),
        ("{tags[0]}", "unknown variable"),
        ("{name!r}", r"unknown variable \{name!r\}"),
        ("{name:>9999999999}", "unknown variable"),
        ("{name", "a brace too many"),
        ("name}", "a brace too many"),
    ],
)
def test_what_is_no_variable_is_refused(where: str, text: str, says: str):
    with pytest.raises(PromptError, match=says) as refused:
        Prompts.read(**({"prompt": "Describe it."} | {where: text}))
    assert where in str(refused.value)


def test_a_weighted_file_is_drawn_by_weight_and_the_same_again(tmp_path: Path):
    file = tmp_path / "prompts.txt"
    file.write_text("# a comment\n\nfirst\n3\tsecond of {name}\n", encoding="utf-8")
    prompts = Prompts.read(file=file)
    names = [f"{number}.jpg" for number in range(2000)]
    drawn = [prompts.of(item(name), seed=1).text.split()[0] for name in names]
    assert 420 < Counter(drawn)["first"] < 580  # a quarter of 2000, and four deviations
    assert drawn == [Prompts.read(file=file).of(item(name), seed=1).text.split()[0] for name in names]
    assert drawn != [prompts.of(item(name), seed=2).text.split()[0] for name in names]


def test_json_and_text_say_the_same(tmp_path: Path):
    lines, listed = tmp_path / "p.txt", tmp_path / "p.json"
    lines.write_text("0.5\tone\ntwo\n")
    listed.write_text('[{"prompt": "one", "weight": 0.5}, "two"]')
    assert Prompts.read(file=lines) == Prompts.read(file=listed)
    assert Prompts.read(file=lines).choices == (("one", 0.5), ("two", 1.0))


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("p.txt", b"", "holds no prompt"),
        ("p.txt", b"# only this\n", "holds no prompt"),
        ("p.txt", b"many\tone\n", "line 1: 'many' before the tab is not a weight"),
        ("p.txt", b"0\tone\n", "weight 0.0 of 'one' is not a number above 0"),
        ("p.txt", b"nan\tone\n", "not a number above 0"),
        ("p.txt", b"2\t \n", "a prompt is empty"),
        ("p.txt", b"ask {this}\n", r"p.txt: unknown variable \{this\}"),
        ("p.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("p.json", b"[", "not JSON"),
        ("p.json", b'{"prompt": "x"}', "holds a dict, not a list"),
        ("p.json", b'[{"text": "x"}]', "is not a prompt"),
        ("p.json", b'[{"prompt": "x", "wieght": 2}]', "is not a prompt"),
        ("p.json", b'[{"prompt": "x", "weight": "2"}]', "not a number above 0"),
    ],
)
def test_a_bad_file_is_named_and_explained(tmp_path: Path, name: str, content: bytes, says: str):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(PromptError, match=says) as refused:
        Prompts.read(file=file)
    assert str(file) in str(refused.value)


def test_a_missing_file_and_two_sources_are_refused(tmp_path: Path):
    with pytest.raises(PromptError, match="No such file"):
        Prompts.read(file=tmp_path / "none.txt")
    for both in ({}, {"prompt": "x", "file": "y"}):
        with pytest.raises(PromptError, match="either --prompt or --prompt-file"):
            Prompts.read(**both)


@pytest.mark.parametrize(
    "answer, caption",
    [
        ("A photo of a cat.", "<A photo of a cat.>"),  # the engine gave the whole answer
        (" a cat.", "<A photo of a cat.>"),  # it gave what follows the start
        ("a cat.\n", "<A photo of a cat.>"),
        (", perhaps, a cat", "<A photo of, perhaps, a cat>"),
        ("", "<A photo of>"),
    ],
)
def test_a_caption_begins_with_its_start_once(answer: str, caption: str):
    assert PromptChoice("?", start="A photo of ", prepend="<", append=">").caption(answer) == caption
