"""What tiny targets ship with, written as it is published: multi-token-prediction heads, in the model's own folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def shipped(model: Any, folder: Path, extra: dict[str, Tensor], shards: bool = False) -> None:
    """Save a model with further tensors beside its own; `config._name_or_path` says where."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    if shards:
        held = load_file(path)
        save_file(held, folder / "model-00001-of-00002.safetensors")
        save_file(extra, folder / "model-00002-of-00002.safetensors")
        path.unlink()
        where = dict.fromkeys(held, "model-00001-of-00002.safetensors")
        where |= dict.fromkeys(extra, "model-00002-of-00002.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    else:
        save_file({**load_file(path), **extra}, path, metadata={"format": "pt"})
    model.config._name_or_path = str(folder)


def _drawn(shapes: dict[str, Tensor], g: torch.Generator) -> dict[str, Tensor]:
    """Weights so large that a head says something; norms near those of a new layer."""
    return {
        key: torch.randn(t.shape, generator=g) * (0.1 if t.dim() == 1 else t.shape[-1] ** -0.5)
        + (t if t.dim() == 1 else 0)
        for key, t in shapes.items()
    }


def qwen_heads(model: Any, heads: int = 1) -> dict[str, Tensor]:
    """`mtp.*`, as Qwen3.5 has it: fc and norms once, `heads` layers of full attention."""
    decoder, g = model.get_decoder(), torch.Generator().manual_seed(3)
    H = decoder.config.hidden_size
    layer = next(each for each in decoder.layers if hasattr(each, "self_attn"))
    shapes = {"fc.weight": torch.empty(H, 2 * H)}
    shapes |= {f"{name}.weight": torch.zeros(H) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    shapes |= {f"layers.{k}.{key}": t for k in range(heads) for key, t in layer.state_dict().items()}
    return {f"mtp.{key}": t for key, t in _drawn(shapes, g).items()}


def glm_heads(model: Any, heads: int = 1, prefix: str = "model.language_model.") -> dict[str, Tensor]:
    """`layers.{N}.*`, as GLM-4.5V, GLM-OCR and DeepSeek-V3 have it, with copies of the embedding and of the head."""
    decoder, g = model.get_decoder(), torch.Generator().manual_seed(3)
    H, N = decoder.config.hidden_size, len(decoder.layers)
    shapes: dict[str, Tensor] = {}
    for k in range(N, N + heads):
        one = {f"{name}.weight": torch.ones(H) for name in ("enorm", "hnorm", "shared_head.norm")}
        one |= {"eh_proj.weight": torch.empty(H, 2 * H), **decoder.layers[-1].state_dict()}
        shapes |= {f"{prefix}layers.{k}.{key}": t for key, t in one.items()}
    out = _drawn(shapes, g)
    out[f"{prefix}layers.{N}.embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
    out[f"{prefix}layers.{N}.shared_head.head.weight"] = model.get_output_embeddings().weight.detach().clone()
    return out


_ADDS = ("o_proj", "down_proj", "out_proj", "post_self_attn_layernorm", "post_mlp_layernorm")  # to what stands already


def agreeing(model: Any, heads: dict[str, Tensor], much: float = 0.05) -> None:
    """Let a model and its heads think alike, most of the time: what follows a token hangs on little but the token."""
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(4)
        for tensors in (dict(model.get_decoder().named_parameters()), heads):
            for key, t in tensors.items():
                if any(name in key for name in _ADDS):
                    t.mul_(much)
                if key.endswith(("fc.weight", "eh_proj.weight")):
                    t.copy_(torch.eye(len(t), 2 * len(t)) + t * much)


def by_expert(heads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts one by one, as checkpoints have them, in the place of all in one tensor."""
    out: dict[str, Tensor] = {}
    for key, t in heads.items():
        stem, _, name = key.rpartition(".")
        if name == "gate_up_proj":
            for i, one in enumerate(t):
                gate, up = one.chunk(2)
                out |= {f"{stem}.{i}.gate_proj.weight": gate.clone(), f"{stem}.{i}.up_proj.weight": up.clone()}
        elif name == "down_proj" and t.dim() == 3:
            out |= {f"{stem}.{i}.down_proj.weight": one.clone() for i, one in enumerate(t)}
        else:
            out[key] = t
    return out


def drafts_of(drafter: Any) -> list[tuple[list[list[int]], list[list[int]]]]:
    """What it will have proposed to each row, with the tokens that stood before."""
    seen, propose = [], drafter.propose

    def told(session: Any, target: Any) -> Any:
        draft = propose(session, target)
        seen.append(([list(row.tokens) for row in session.rows], draft.tokens[:, 1:].tolist()))
        return draft

    drafter.propose = told
    return seen


def read_at_once(model: Any, inputs: dict[str, Tensor], whole: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings, final features and positions [axes, B, T] of a text [B, T] with the pictures of these inputs."""
    called: list[Any] = []
    kinds = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(whole)], 1)[:, : whole.shape[1]]
    told = {"input_ids": whole, "attention_mask": torch.ones_like(whole), "mm_token_type_ids": kinds}
    hook = model.get_decoder().register_forward_hook(lambda m, a, k, out: called.append((k, out)), with_kwargs=True)
    with hook, torch.no_grad():
        model(**{**inputs, **told})
    given, out = called[0]
    return given["inputs_embeds"], out.last_hidden_state, given["position_ids"]
