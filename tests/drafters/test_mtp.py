"""Multi-token-prediction heads: published layouts, drafts that are what the heads say, tokens that are the target's."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import published_mtp
import pytest
import tiny_vlms
import torch
import transformers as T
from compared import as_alone, as_stock, stock_drafts
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.generation.candidate_generator import MTPCandidateGenerator

import mmspec

NAME = "qwen3_5"
OPTIONS: dict[str, dict[str, Any]] = {
    "chain": {},
    "deep chain": {"depth": 7, "width": 1},
    "tree": {"depth": 4, "width": 3, "size": 12},
    "static tree": {"tree": "mc_sim_7b_63"},
    "drawn": {"tree": "mc_sim_7b_63", "draws": True},
    "pruned": {"prune": 0.5},
    "few tokens": {"draft_vocab": 90},
}


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def qwen(request: Any, tmp_path_factory: Any) -> Any:
    """Qwen3.5 with one head in its folder, that agrees with it most of the time."""
    model = copy.deepcopy(tiny_vlms.model(NAME, request.param))
    heads = published_mtp.qwen_heads(model)
    published_mtp.agreeing(model, heads)
    published_mtp.shipped(model, tmp_path_factory.mktemp("qwen"), heads, shards=True)
    return model


def prompts(kind: str, **more: Any) -> dict[str, Tensor]:
    return tiny_vlms.prompt(NAME, kind, **more)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["image first", "ragged", "ragged video"])
@pytest.mark.every(24)
def test_the_tokens_are_the_targets(qwen: Any, options: str, kind: str) -> None:
    inputs = prompts(kind)
    assert as_stock(qwen, inputs, "mtp", **OPTIONS[options]).stats.tokens_per_target_call > 1.5
    eos = int(tiny_vlms.generate(qwen, inputs)[-1, inputs["input_ids"].shape[1] + 9])
    as_stock(qwen, inputs, "mtp", call={"eos_token_id": eos}, **OPTIONS[options])


def test_draws_are_those_of_the_seed(qwen: Any) -> None:
    how: dict[str, Any] = {"do_sample": True, "top_k": 20, "temperature": 0.7}
    as_stock(qwen, prompts("ragged"), "mtp", call=how, seed=5, reproducible=True)


@pytest.mark.every(3)
def test_prompts_come_and_go(qwen: Any) -> None:
    asked = [prompts("ragged", rows=[i]) for i in range(4)]
    asked[3] = {k: v for k, v in asked[3].items() if "pixel" not in k and "grid" not in k}
    tree = {"depth": 3, "width": 2, "size": 6}
    as_alone(qwen, asked, "mtp", 2, {"max_new_tokens": 24, "do_sample": False}, **tree)


def test_positions_are_the_targets_own(qwen: Any) -> None:
    """The first token of each draft is what the head says when it reads the whole text at once, pictures included."""
    inputs = prompts("several images")
    with mmspec.enable(qwen, "mtp") as handle:
        drafter, seen = handle.drafter, published_mtp.drafts_of(handle.drafter)
        tiny_vlms.generate(qwen, inputs)
    embeds, features, positions = published_mtp.read_at_once(qwen, inputs, torch.tensor(seen[-1][0]))
    heads = drafter.heads
    with torch.no_grad():
        x, rows = embeds[:, 1:], slice(None, -1)
        turned = heads.rotary(x, positions[-3:, ..., rows])
        mask = torch.full((x.shape[1], x.shape[1]), torch.finfo(x.dtype).min).triu(1)[None, None]
        z = heads.layers[0](x, features[:, rows], turned, mask, None, None)
        for tokens, draft in seen:
            n = len(tokens[0])
            assert int(qwen.lm_head(z[:, n - 2]).argmax()) == draft[0][0]


def glm_moe(heads: int) -> Any:
    """A model that transformers itself can decode by its heads."""
    torch.manual_seed(0)
    config = T.Glm4MoeConfig(
        **tiny_vlms.TEXT, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1,
        n_group=1, topk_group=1, first_k_dense_replace=1, num_nextn_predict_layers=heads, partial_rotary_factor=0.5,
    )  # fmt: skip
    model = tiny_vlms.enlarged(T.Glm4MoeForCausalLM(config))
    model._keys_to_ignore_on_load_unexpected = {r"model\.layers\.[3-9]\."}
    return model


@pytest.mark.parametrize("much", [0.05, 0.3])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.every(2)
def test_drafts_are_those_of_transformers(
    heads: int, much: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round by round the same tokens, from the same file, experts one by one."""
    model, ids = glm_moe(heads), torch.randint(5, 100, (1, 12), generator=torch.Generator().manual_seed(1))
    extra = published_mtp.glm_heads(model, heads, prefix="model.")
    published_mtp.agreeing(model, extra, much)
    published_mtp.shipped(model, tmp_path, published_mtp.by_expert(extra))
    model.config.dtype = torch.float32  # saving makes a text of it, on which stock fails
    inputs, seen, theirs = {"input_ids": ids}, [], stock_drafts(MTPCandidateGenerator, monkeypatch)
    full = tiny_vlms.generate(model, inputs)
    assert torch.equal(tiny_vlms.generate(model, inputs, use_mtp=True), full)
    handle = as_stock(
        model, inputs, "mtp", depth=heads, begun=lambda handle: seen.append(published_mtp.drafts_of(handle.drafter))
    )
    assert much > 0.1 or handle.stats.tokens_per_target_call > 1.5
    ours = [draft[0] for _, draft in seen[0]]
    assert len(ours) == len(theirs[1:])
    assert all(a[: len(b)] == b for a, b in zip(ours, theirs[1:], strict=True))


def _written(tmp_path: Path, change: Any) -> Any:
    model = copy.deepcopy(tiny_vlms.model(NAME))
    heads = published_mtp.qwen_heads(model)
    change(heads)
    published_mtp.shipped(model, tmp_path, heads)
    return model


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda heads: heads.pop("mtp.fc.weight"), "missing: layers.0.eh_proj.weight"),
        (lambda heads: heads.update({"mtp.layers.0.odd.weight": torch.ones(2)}), "unexpected: .*odd"),
        (lambda heads: heads.update({"mtp.fc.weight": torch.ones(64, 64)}), r"eh_proj.weight is \[64, 64\]"),
        (lambda heads: heads.update({"mtp.layers.2.x.weight": torch.ones(2)}), r"numbered \[0, 2\]"),
        (lambda heads: heads.clear(), "have none"),
        *(
            (lambda heads, dtype=dtype: heads.update({"mtp.fc.weight": heads["mtp.fc.weight"].to(dtype)}), str(dtype))
            for dtype in (torch.int8, torch.bool, torch.float8_e4m3fn)
        ),
    ],
)
def test_a_bad_file_is_refused_by_name(change: Any, says: str, tmp_path: Path) -> None:
    model = _written(tmp_path, change)
    with pytest.raises(ValueError, match=says):
        mmspec.enable(model, "mtp")
    assert type(model) is T.Qwen3_5ForConditionalGeneration


def test_damaged_and_absent_files(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_vlms.model(NAME))
    with pytest.raises(ValueError, match="not on this machine"):
        mmspec.enable(model, "mtp")
    heads = published_mtp.qwen_heads(model)
    published_mtp.shipped(model, tmp_path, heads, shards=True)
    path = tmp_path / "model-00002-of-00002.safetensors"
    held = path.read_bytes()
    path.write_bytes(held[: len(held) // 2])
    with pytest.raises(ValueError, match="damaged or incomplete"):
        mmspec.enable(model, "mtp")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"lists model-00002-of-00002.safetensors"):
        mmspec.enable(model, "mtp")
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        mmspec.enable(model, "mtp")


def test_options_that_make_no_sense(qwen: Any) -> None:
    with pytest.raises(ValueError, match="no use for window"):
        mmspec.enable(qwen, "mtp", window=4)
    with pytest.raises(ValueError, match="all of the target's head"):
        mmspec.enable(qwen, "mtp", tree="mc_sim_7b_63", draws=True, draft_vocab=90)


def test_the_files_are_as_published(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_vlms.model(NAME))
    published_mtp.shipped(model, tmp_path, published_mtp.qwen_heads(model))
    held = load_file(tmp_path / "model.safetensors")
    names = {key for key in held if key.startswith("mtp.")}
    assert {"mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.norm.weight"} <= names
    assert "mtp.layers.0.self_attn.q_norm.weight" in names
    save_file(held, tmp_path / "model.safetensors")  # without metadata, as some tools write it
    with mmspec.enable(model, "mtp") as handle:
        assert handle.drafter.config.heads == 1


def _deepseek() -> Any:
    return T.DeepseekV3ForCausalLM(
        T.DeepseekV3Config(
            **{**tiny_vlms.PLAIN, "num_key_value_heads": 4}, n_routed_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=32, n_shared_experts=1,
            n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
            qk_nope_head_dim=8, v_head_dim=16,
        )
    )  # fmt: skip


def _step() -> Any:
    """Heads of other kinds of layers than the target's, as its config lists them."""
    kinds = ["full_attention", "sliding_attention"] * 3
    text = {**tiny_vlms.TEXT, "num_nextn_predict_layers": 3, "layer_types": kinds, "sliding_window": 6}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return T.Step3p7ForConditionalGeneration(T.Step3p7Config(text_config=text, vision_config=vision))


def _glm_ocr() -> Any:
    vision = {**tiny_vlms.QWEN_VISION, "depth": 2, "out_hidden_size": 64}
    text = dict(**tiny_vlms.TEXT, rope_parameters=tiny_vlms.rope(mrope_section=[2, 3, 3]))
    return T.GlmOcrForConditionalGeneration(T.GlmOcrConfig(text_config=text, vision_config=vision))


@pytest.mark.parametrize(
    ("build", "heads", "prefix", "padding"),
    [
        (_glm_ocr, 1, "model.language_model.", 4),
        (_deepseek, 1, "model.", 5),
        (_step, 3, "model.language_model.", 5),
    ],
)
def test_other_families(build: Any, heads: int, prefix: str, padding: int, tmp_path: Path) -> None:
    """GLM-OCR's layer behind the last, which transformers drops; DeepSeek-V3's latent attention; Step-3.7's windows."""
    torch.manual_seed(0)
    model = tiny_vlms.enlarged(build())
    extra = published_mtp.glm_heads(model, heads, prefix)
    published_mtp.agreeing(model, extra)
    published_mtp.shipped(model, tmp_path, extra)
    ids = torch.randint(5, 100, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    for options in ({}, {"depth": 4, "width": 2, "size": 8}):
        handle = as_stock(model, {"input_ids": ids, "attention_mask": mask}, "mtp", **options)
        assert handle.stats.tokens_per_target_call > 1.2


def test_saving_a_model_says_that_its_heads_are_left_out(qwen: Any, tmp_path: Path) -> None:
    with mmspec.enable(qwen), pytest.warns(UserWarning, match="leaves out the multi-token-prediction heads") as said:
        qwen.save_pretrained(tmp_path / "one")
        qwen.save_pretrained(tmp_path / "two")
    assert sum("multi-token" in str(one.message) for one in said) == 1
    with mmspec.enable(qwen, drafter="ngram"), warnings.catch_warnings():
        warnings.simplefilter("error")
        qwen.save_pretrained(tmp_path / "three")
