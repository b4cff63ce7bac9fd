"""The variables of a prompt are filled in, and mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer

from mmspec import zoo
from mmspec.app.media.items import IMAGE, Item, file_source
from mmspec.app.prompt import PromptChoice, PromptError, Prompts
from mmspec.pipelines.prompts import chat_inputs, inputs_of


def item(name: str = "birds/red/1.jpg", **more) -> Item:
    return Item(name, IMAGE, file_source(Path(name)), **more)


def test_variables_are_filled_in_everywhere():
    every = "{name}|{dir}|{existing}|{{x}}"
    shared = dict.fromkeys(("system", "prepend", "append"), every)
    asked = Prompts(every, **shared).of(item(existing="a {name} bird"))
    filled = "1|birds/red|a {name} bird|{x}"
    assert asked == PromptChoice(filled, filled, filled, filled)
    assert Prompts(every).of(item("1.jpg")).text == "1|||{x}"
    assert Prompts("{name}").of(item("caf\udce9.jpg")).text == r"caf\udce9"  # not valid Unicode


@pytest.mark.parametrize("where", ["prompt", "system", "prepend", "append"])
@pytest.mark.parametrize(
    "text, says",
    [
        ("a {titel}", r"unknown variable \{titel\} in the .*; use \{name\}, \{dir\}, \{existing\}"),
        ("a {}", r"unknown variable \{\}"),
        ("a {0}", r"unknown variable \{0\}"),
        ("{name.__class__}", "unknown variable"),
        ("{dir[0]}", "unknown variable"),
        ("{name!r}", r"unknown variable \{name!r\}"),
        ("{name:>9999999999}", "unknown variable"),
        ("{name", "an unmatched brace"),
        ("name}", "an unmatched brace"),
    ],
)
def test_what_is_no_variable_is_refused(where: str, text: str, says: str):
    with pytest.raises(PromptError, match=says) as refused:
        Prompts(**({"text": "Describe it."} | {where.replace("prompt", "text"): text}))
    assert where in str(refused.value)


def test_what_is_put_around_an_answer():
    assert PromptChoice("?", prepend="<", append=">").caption(" a cat.\n") == "<a cat.>"


@pytest.mark.parametrize("thinking", [False, True])
def test_models_that_may_reason_do_so_only_if_told_to(thinking: bool):
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("scenes-hybrid"))
    tokenizer.chat_template = "{{ messages[0].content }} {{ 'small' if enable_thinking else 'large' }}"
    chat = [{"role": "user", "content": [{"type": "text", "text": "red"}]}]
    ids = inputs_of(tokenizer, [chat], **({"thinking": True} if thinking else {}))["input_ids"][0]
    assert tokenizer.decode(ids).split() == ["red", "small" if thinking else "large"]


def test_marks_of_pictures_in_a_text_do_not_count_as_pictures():
    processor, picture = AutoProcessor.from_pretrained(zoo.path("scenes-video")), Image.new("RGB", (96, 96))
    plain = chat_inputs(processor, ["what is red ?"], [[picture]])
    for marked in ("<image>\nwhat is red ?", "<image> what is red ? <image>"):
        assert chat_inputs(processor, [marked], [[picture]])["input_ids"].tolist() == plain["input_ids"].tolist()
    assert "pixel_values" not in chat_inputs(processor, ["<image> what is red ?"], [[]])
