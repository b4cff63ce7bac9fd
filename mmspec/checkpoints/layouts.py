"""The published layouts of drafters as tables: which tensor is called what, and how a file shows its layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from reprlib import repr as briefly
from typing import Any

from mmspec.types import FINAL

Keys = Mapping[str, tuple[str, ...]]  # our tensor: theirs, stacked along the first axis in this order
Seen = Callable[[Mapping[str, Any], Collection[str]], bool]  # of config.json and the tensors' names


def _block(at: str) -> Keys:
    """The decoder layer, in Llama's names behind a prefix."""
    qkv = [f"{at}.self_attn.{x}_proj" for x in "qkv"]
    return {
        "block.qkv.weight": tuple(f"{name}.weight" for name in qkv),
        "block.qkv.bias": tuple(f"{name}.bias" for name in qkv),
        "block.out.weight": (f"{at}.self_attn.o_proj.weight",),
        "block.mlp_norm.weight": (f"{at}.post_attention_layernorm.weight",),
        "block.gate_up.weight": (f"{at}.mlp.gate_proj.weight", f"{at}.mlp.up_proj.weight"),
        "block.down.weight": (f"{at}.mlp.down_proj.weight",),
    }


def _adaptor(at: str, queries: str) -> Keys:
    """ViSpec's vision adaptor, and the layer that mixes its last vector in."""
    return {
        "img_fc.weight": ("img_fc.weight",),
        "img_fc.bias": ("img_fc.bias",),
        "adaptor.q": (f"{at}.{queries}",),
        "adaptor.kv.weight": (f"{at}.k_proj.weight", f"{at}.v_proj.weight"),
        "adaptor.kv.bias": (f"{at}.k_proj.bias", f"{at}.v_proj.bias"),
        "adaptor.out.weight": (f"{at}.o_proj.weight",),
    }


_PLAIN: Keys = {"fc.weight": ("fc.weight",), "fc.bias": ("fc.bias",), **_block("layers.0")}
# EAGLE's layer 0 has no input norm, but those of others with the same names may have one.
_EAGLE: Keys = {**_PLAIN, "input_norm.weight": ("layers.0.input_layernorm.weight",)}
_NEMO: Keys = {**_EAGLE, "out_norm.weight": ("norm.weight",)}
_IN_FILES = {"head.weight": "lm_head.weight", "head.ids": "draft_ids"}  # our tensors: their names in our own files
_MOST_FEATURES = 8  # that a drafter with a norm for each reads
_EAGLE3: Keys = {
    "fc.weight": ("fc.weight",),
    "embed_norm.weight": ("midlayer.input_layernorm.weight",),
    "feature_norm.weight": ("midlayer.hidden_norm.weight",),
    **_block("midlayer"),
    "out_norm.weight": ("norm.weight",),
    "head.weight": ("lm_head.weight",),
    "head.ids": ("d2t",),  # as an offset: target id = row + d2t[row]
    **{f"fc_norm.{i}.weight": (f"fc_norm.{i}.weight",) for i in range(_MOST_FEATURES)},  # EAGLE-3.1
    "fused_norm.weight": ("input_norm.weight",),  # as for gpt-oss
}
_SPECULATORS: Keys = {  # the layer's name differs, and there are no biases
    ours: tuple(name.replace("midlayer.", "layers.0.") for name in theirs)
    for ours, theirs in _EAGLE3.items()
    if ours != "block.qkv.bias"
} | {
    "mask_hidden": ("mask_hidden",),  # P-EAGLE
    "more.{m}.input_norm.weight": ("layers.{m}.input_layernorm.weight",),
    **{f"more.{{m}}.{k}": theirs for k, theirs in _block("layers.{m}").items() if not k.endswith("bias")},
}
_NORMED = frozenset({"fused_norm.weight", *(f"fc_norm.{i}.weight" for i in range(_MOST_FEATURES))})


def _denoiser(q: str = "q_norm", fc: str = "fc", norm: str = "hidden_norm") -> Keys:
    """A block drafter, in the names of Qwen3; {n} stands for the number of a layer."""
    at, head, choice = "layers.{n}", "markov_head", "candidate_selector"
    mixed = [f"{at}.{x}_conv.{y}" for x in ("attention", "mlp") for y in ("base_kernel", "kernel_projection.weight")]
    attention = {key.replace("block", at): theirs for key, theirs in _block(at).items()}
    return {
        "fc.weight": (f"{fc}.weight",),
        "hidden_norm.weight": (f"{norm}.weight",),
        **attention,
        f"{at}.out.bias": (f"{at}.self_attn.o_proj.bias",),
        f"{at}.input_norm.weight": (f"{at}.input_layernorm.weight",),
        f"{at}.q_norm.weight": (f"{at}.self_attn.{q}.weight",),
        f"{at}.k_norm.weight": (f"{at}.self_attn.{'key_layernorm' if q.startswith('query') else 'k_norm'}.weight",),
        **{key: (key,) for key in mixed},
        "out_norm.weight": ("norm.weight",),
        "markov.w1.weight": (f"{head}.markov_w1.weight",),
        "markov.w2.weight": (f"{head}.markov_w2.weight",),
        **{f"markov.{x}_proj.{y}": (f"{head}.{x}_proj.{y}",) for x in ("gate", "joint") for y in ("weight", "bias")},
        **{f"confidence.proj.{y}": (f"confidence_head.proj.{y}",) for y in ("weight", "bias")},
        "selector.predecessor": (f"{choice}.predecessor_codebook",),
        "selector.successor": (f"{choice}.successor_codebook",),
        "selector.hidden.weight": (f"{choice}.hidden_projection.weight",),
    }


_DFLASH = _denoiser()
_MUSE = {k: v for k, v in _denoiser(fc="encoder.fc", norm="encoder.output_norm_enc").items() if k.startswith(
    ("fc", "hidden_norm", "out_norm", "layers.")) and not k.endswith("bias") and "_conv" not in k}  # fmt: skip
_PARTS = frozenset(
    key for key in _DFLASH if key.endswith("bias") or "_conv." in key or key.startswith(("markov", "conf", "selector"))
)


@dataclass(frozen=True)
class Layout:
    """One way of writing a drafter down.

    Attributes:
        about: one line for people.
        seen: whether config.json and the tensors' names are of this layout.
        method: of the drafters that it holds; "": of any.
        layer: prefix of the decoder layer's tensors.
        keys: our tensor: theirs. What is not listed has our own name in files.
        optional: our tensors that a file may lack.
        dropped: their tensors that are passed over: copies of the target's, or derived from others.
        fixed: settings that the layout can be written with no other value of.
        usual: settings that no file tells, as the authors' code has them.
        sizes: settings that the shape of a tensor tells: (their tensor, axis).
        renamed: settings that config.json has under another name.
        own_head: whether it brings an output head; None: either.
        one_axis: positions are counted in one dimension, even where config.json asks for M-RoPE.
    """

    about: str
    seen: Seen
    method: str = "eagle"
    layer: str = "layers.0"
    keys: Keys = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    dropped: tuple[str, ...] = ("embed_tokens.weight",)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    usual: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    own_head: bool | None = False
    one_axis: bool = False

    def over(self, layers: int) -> Layout:
        """The same for a drafter of so many layers: {n} in a name is the number of each, {m} of each but the first."""

        def numbered(name: str) -> list[tuple[str, str]]:
            mark = next((mark for mark in ("{n}", "{m}") if mark in name), "")
            return [(mark, str(i)) for i in range(mark == "{m}", layers)] if mark else [("", "")]

        keys = {
            ours.replace(mark, i): tuple(name.replace(mark, i) for name in theirs)
            for ours, theirs in self.keys.items()
            for mark, i in numbered(ours)
        }
        optional = frozenset(name.replace(mark, i) for name in self.optional for mark, i in numbered(name))
        return replace(self, keys=keys, optional=optional)

    def theirs(self, ours: str) -> tuple[str, ...]:
        return self.keys.get(ours, (_IN_FILES.get(ours, ours),))

    def drops(self, key: str) -> bool:
        return key in self.dropped or (bool(self.keys) and key.endswith("rotary_emb.inv_freq"))


def _marked(config: Mapping[str, Any]) -> str | None:
    """The layout that our own writer recorded in config.json."""
    marker = config.get("mmspec")
    if not isinstance(marker, Mapping):
        return None
    layout = marker.get("layout", "mmspec")
    if not isinstance(layout, str):
        raise ValueError(f"mmspec.layout in config.json is {briefly(layout)}; it is one of {', '.join(LAYOUTS)}")
    return layout


def _has(start: str) -> Seen:
    return lambda config, keys: any(key.startswith(start) for key in keys)


def _made_by(name: str) -> Seen:
    def seen(config: Mapping[str, Any], keys: Collection[str]) -> bool:
        listed = config.get("architectures")
        return isinstance(listed, list) and name in listed

    return seen


def _msd(config: Mapping[str, Any], keys: Collection[str]) -> bool:
    """The tensors are EAGLE's, but config.json is that of the target: LLaVA's with its mm_* fields, or Qwen2-VL's."""
    kind, authors = config.get("model_type"), any(field.startswith("mm_") for field in config)
    normed = "layers.0.input_layernorm.weight" in keys  # MSD's layer for Qwen2-VL is Qwen2's; EAGLE's has no such norm
    return "fc.weight" in keys and ((kind == "qwen2_vl" and normed) or (kind == "llava" and authors))


_FINAL = {"features": (FINAL,), "parallel_norm": False, "norm_residual": False, "embed_norm": False, "rope": "1d"}
_BARE = {**_FINAL, "out_norm": False, "head_dim": 0}
_WHOLE = {"summaries": True, "global_vector": True, "head_dim": 0}  # ViSpec without ablations
_THREE = {"parallel_norm": True, "input_norm": False, "fc_bias": False, "rope": "1d"}
_BIASES = frozenset({"fc.bias", "block.qkv.bias"})
_VISION_BIASES = _BIASES | {"img_fc.bias", "adaptor.kv.bias"}
_NORMS = frozenset({"input_norm.weight", "out_norm.weight"})

LAYOUTS = {  # the first that is seen is it
    "mmspec": Layout(
        "our own: the module's tensors by their names, fused projections",
        lambda config, keys: _marked(config) == "mmspec",
        method="",
        layer="",
        dropped=(),
        own_head=None,
    ),
    "speculators-block": Layout(
        "DFlash, DSpark and DFlash2, as vLLM's speculators writes them",
        lambda config, keys: config.get("speculators_model_type") in ("dflash", "dspark", "dflash2"),
        method="block",
        keys={**_DFLASH, "head.weight": ("lm_head.weight",), "head.ids": ("d2t",)},
        optional=_PARTS | {"head.weight", "head.ids"},
        dropped=("embed_tokens.weight", "t2d", "verifier_norm.weight", "verifier_lm_head.weight"),
        fixed={"rope_first": False, "bare_embeds": False},
        own_head=None,
        one_axis=True,
    ),
    "muse-glimmer": Layout(
        "Muse-Glimmer's assistant, a DFlash drafter, as transformers has it",
        _has("encoder.fc."),
        method="block",
        keys=_MUSE,
        dropped=(),
        fixed={
            "rope_first": False,
            "bare_embeds": True,
            "bias": False,
            "markov_rank": 0,
            "confidence": False,
            "taps": 0,
            "selector_rank": 0,
            "target_hidden": 0,
            "anchored": False,
            "from_anchor": False,
            "rope_kind": "default",
        },
        one_axis=True,
    ),
    "hunyuan-dflash": Layout(
        "DFlash, as HunyuanOCR brings it",
        lambda config, keys: "hidden_norm.weight" in keys and any(k.endswith(".query_layernorm.weight") for k in keys),
        method="block",
        keys=_denoiser("query_layernorm"),
        optional=_PARTS,
        dropped=("embed_tokens.weight", "lm_head.weight"),
        fixed={"rope_first": True, "bare_embeds": False, "from_anchor": False},
        one_axis=True,
    ),
    "dflash": Layout(
        "DFlash, DSpark and DFlash2, as z-lab, DeepSpec and SpecForge write them",
        lambda config, keys: "hidden_norm.weight" in keys and "fc.weight" in keys,
        method="block",
        keys=_DFLASH,
        optional=_PARTS,
        dropped=("embed_tokens.weight", "lm_head.weight"),
        fixed={"rope_first": False, "bare_embeds": False, "from_anchor": False},
        one_axis=True,
    ),
    "speculators": Layout(
        "EAGLE-3, as vLLM's speculators writes it",
        lambda config, keys: "speculators_model_type" in config,
        keys=_SPECULATORS,
        optional=_NORMED | {"head.ids", "mask_hidden"},
        dropped=("embed_tokens.weight", "t2d", "verifier_norm.weight", "verifier_lm_head.weight"),
        fixed={**_THREE, "qkv_bias": False},
        sizes={"draft_vocab": ("lm_head.weight", 0)},
        renamed={"norm_residual": "norm_before_residual"},
        own_head=True,
    ),
    "vispec": Layout(
        "ViSpec, as its authors write it",
        _has("imadpt."),
        method="vispec",
        keys={**_PLAIN, **_adaptor("imadpt", "q")},
        optional=_VISION_BIASES,
        fixed={**_BARE, **_WHOLE, "input_norm": False},
        usual={"media": "merge", "depth": 4, "width": 8, "size": 30},  # what the authors measured with
        sizes={"num_q": ("imadpt.q", 0)},
    ),
    "nemo-vispec": Layout(
        "ViSpec, as NVIDIA's NeMo AutoModel writes it",
        _has("img_adaptor."),
        method="vispec",
        keys={**_NEMO, **_adaptor("img_adaptor", "query")},
        optional=_VISION_BIASES | _NORMS,
        fixed={**_FINAL, **_WHOLE},
        usual={"media": "merge"},
        sizes={"num_q": ("img_adaptor.query", 0)},
        one_axis=True,
    ),
    "nemo-msd": Layout(
        "MSD, as NVIDIA's NeMo AutoModel writes it",
        _made_by("MultimodalEagleDraftModel"),
        method="msd",
        keys=_NEMO,
        optional=_BIASES | _NORMS,
        fixed=_FINAL,
        one_axis=True,
    ),
    "nemo-eagle": Layout(
        "EAGLE-1 and -2, as NVIDIA's NeMo AutoModel writes them",
        _made_by("LlamaEagleDraftModel"),
        keys=_NEMO,
        optional=_BIASES | _NORMS,
        fixed=_FINAL,
        one_axis=True,
    ),
    "eagle3": Layout(
        "EAGLE-3, as SafeAILab and SpecForge write it",
        _has("midlayer."),
        layer="midlayer",
        keys=_EAGLE3,
        optional=_NORMED | {"block.qkv.bias", "head.ids"},
        dropped=("embed_tokens.weight", "t2d"),
        fixed={**_THREE, "norm_residual": False},
        sizes={"draft_vocab": ("lm_head.weight", 0)},
        renamed={"norm_residual": "norm_before_residual"},
        own_head=True,
    ),
    "msd": Layout(
        "MSD, as its authors write it for LLaVA and Qwen2-VL",
        _msd,
        method="msd",
        keys=_EAGLE,
        optional=_BIASES | {"input_norm.weight"},
        fixed=_BARE,
        usual={"depth": 6, "width": 10, "size": 59},  # the loader's own, where it does not measure
        one_axis=True,
    ),
    "eagle": Layout(
        "EAGLE-1 and -2, as SafeAILab writes them; the drafters that FLASH trains",
        lambda config, keys: "fc.weight" in keys and _has("layers.0.")(config, keys),
        keys=_EAGLE,
        optional=_BIASES | {"input_norm.weight"},
        fixed=_BARE,
        usual={"depth": 6, "width": 8, "size": 63},  # the authors' tree, where a file names none
    ),
}


def layout_named(name: str) -> Layout:
    """The table of a layout.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if name not in LAYOUTS:
        raise ValueError(f"unknown layout {name!r}; choose from {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def detect(config: Mapping[str, Any], keys: Collection[str]) -> str:
    """Which layout a file has. MSD's tensors have EAGLE's names and shapes: there config.json decides, and a caller who
    knows better names the layout.

    Args:
        config: config.json as it is.
        keys: the names of the tensors.

    Raises:
        ValueError: none that is known.
    """
    marked = _marked(config)
    for name, layout in LAYOUTS.items():
        if marked == name or (marked not in LAYOUTS and layout.seen(config, keys)):
            return name
    shown = ", ".join(sorted(keys)[:6]) or "none"
    kinds = config.get("architectures")
    whole = f"if it is a whole model ({kinds[0]}), name it so: drafter='model', draft=…; " if kinds else ""
    raise ValueError(
        f"no known drafter layout fits these tensors ({shown}{', …' if len(keys) > 6 else ''}); "
        f"{whole}known: {', '.join(f'{name} ({layout.about})' for name, layout in LAYOUTS.items())}. "
        "If it is one of them, pass layout="
    )
