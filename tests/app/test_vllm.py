"""`--engine vllm`: items, settings and ends of its engine, by a module that keeps vLLM's documented interface."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import fake_vllm
import numpy as np
import pytest
import tiny_llava
from PIL import Image

from mmspec.app import cli

OK, FATAL, SOME_FAILED = 0, 1, 3


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llava.save(tmp_path_factory.mktemp("tiny") / "llava"))


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> list[fake_vllm.LLMEngine]:
    """Engines that were made."""
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm)
    monkeypatch.setattr(fake_vllm.LLMEngine, "made", [])
    return fake_vllm.LLMEngine.made


@pytest.fixture
def caption(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for name in "abcde":
        values = np.random.default_rng(ord(name)).integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(values).save(f"photos/{name}.png")

    def run(*words: str) -> int:
        fixed = ["--engine", "vllm", "--model", model, "--prompt", "w5 w6", "--devices", "cpu", "--quiet"]
        return cli.main(["caption", "photos", *fixed, *words])

    return run


def journal() -> list[dict]:
    return [json.loads(line) for line in Path("captions/.mmspec/worker-0.jsonl").read_text().splitlines()]


def test_every_item_is_answered_and_goes_through_the_same_journal(caption, vllm, model: str) -> None:
    assert caption() == OK
    records = journal()
    assert sorted(record["file_name"] for record in records) == [f"{name}.png" for name in "abcde"]
    assert len({record["text"] for record in records}) == 5 and all(r["finish"] == "stop" for r in records)
    assert Path("captions/a.txt").read_text().startswith("saw ")
    [engine] = vllm
    assert engine.args.model == model and engine.args.speculative_config is None
    assert all("<image>" in prompt and "w5 w6" in prompt for prompt in engine.prompts)
    assert caption() == OK and len(vllm) == 1, "nothing to do, nothing loaded"


def test_settings_reach_vllm(caption, vllm) -> None:
    said = ["--enable", "gpu_memory_utilization=0.5", "depth=3", "max_model_len=4096"]
    assert caption(*said, "--drafter", "ngram", "--max-new-tokens", "4", "--temperature", "1") == OK
    args = vllm[0].args
    assert (args.gpu_memory_utilization, args.max_model_len) == (0.5, 4096)
    assert args.speculative_config == {"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 3}
    assert all(r["finish"] == "length" and r["tokens"] == 4 and r["drafter"] == "ngram" for r in journal())
    assert caption("--no-resume", "--drafter", "org/eagle") == OK
    assert vllm[1].args.speculative_config == {"model": "org/eagle", "num_speculative_tokens": 5}


def test_words_that_an_answer_begins_with(caption, vllm) -> None:
    assert caption("--start-with", "A photo that") == OK
    assert all(record["text"].startswith("A photo that saw ") for record in journal())
    assert all(prompt.endswith("A photo that") for prompt in vllm[0].prompts)


def test_an_item_that_vllm_refuses_fails_alone(caption, vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fake_vllm.LLMEngine.add_request

    def add_request(self, request_id, prompt, params):
        if request_id == "2":
            raise ValueError("the prompt is longer than max_model_len")
        real(self, request_id, prompt, params)

    monkeypatch.setattr(fake_vllm.LLMEngine, "add_request", add_request)
    assert caption() == SOME_FAILED
    [failure] = [json.loads(line) for line in Path("captions/failed.jsonl").read_text().splitlines()]
    assert failure["error"] == "ValueError" and len([r for r in journal() if r.get("status") != "failed"]) == 4


def test_an_engine_that_dies_ends_the_run_and_the_next_goes_on(caption, vllm, monkeypatch, capsys) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fake_vllm.LLMEngine, "dies_after", 3)
        assert caption() == FATAL
    assert "vLLM has died; run the command again" in capsys.readouterr().err
    assert caption() == OK and not Path("captions/failed.jsonl").exists()


def test_without_vllm_it_says_what_to_install(caption, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert caption() == FATAL
    assert "mmspec caption: --engine vllm needs vLLM" in capsys.readouterr().err
