"""ViSpec's checkpoint layouts: its authors' and that of NVIDIA's NeMo AutoModel."""

from __future__ import annotations

from mmspec.checkpoints import eagle
from mmspec.checkpoints.eagle import BARE, BIASES, FINAL_ONLY, NEMO, NORMS, PLAIN
from mmspec.checkpoints.files import Settings
from mmspec.checkpoints.layout import Keys, Layout, Published, has
from mmspec.drafters.vispec import ViSpecConfig

_VISION_BIASES = BIASES | {"img_fc.bias", "adaptor.kv.bias"}
_WHOLE = {"summaries": True, "global_vector": True, "head_dim": 0}  # without ablations


def _adaptor(at: str, queries: str) -> Keys:
    """The tensors of the vision adaptor, and of the layer that adds its last vector."""
    return {
        **{f"img_fc.{part}": (f"img_fc.{part}",) for part in ("weight", "bias")},
        "adaptor.q": (f"{at}.{queries}",),
        **{f"adaptor.kv.{part}": (f"{at}.k_proj.{part}", f"{at}.v_proj.{part}") for part in ("weight", "bias")},
        "adaptor.out.weight": (f"{at}.o_proj.weight",),
    }


def _read(layout: Layout, files: Published) -> Settings:
    [queries] = layout.theirs("adaptor.q")
    return {**eagle.read(layout, files), "num_q": (*files.shapes[queries], 0)[0]}


def _nemo(c: ViSpecConfig) -> Settings:
    return {**eagle.nemo("VispecDraftModel", c), "vispec_num_query_tokens": c.num_q}


LAYOUTS = {
    "vispec": Layout(
        "ViSpec, as its authors write it", has("imadpt."), _read, eagle.write, eagle.needs, method="vispec",
        keys={**PLAIN, **_adaptor("imadpt", "q")}, optional=_VISION_BIASES,
        fixed={**BARE, **_WHOLE, "input_norm": False},
        usual={"media": "merge", "depth": 4, "width": 8, "size": 30},  # the authors' settings in their measurements
    ),
    "nemo-vispec": Layout(
        "ViSpec, as NVIDIA's NeMo AutoModel writes it", has("img_adaptor."), _read, _nemo, eagle.needs,
        method="vispec", keys={**NEMO, **_adaptor("img_adaptor", "query")}, optional=_VISION_BIASES | NORMS,
        fixed={**FINAL_ONLY, **_WHOLE}, usual={"media": "merge"}, one_axis=True,
    ),
}  # fmt: skip
