"""Block drafters: DFlash, DSpark and DFlash2 in every published layout, computed as published; outputs stay stock's."""

from dataclasses import replace
from types import SimpleNamespace as Some

import pytest
import tiny_vlms
import torch
import transformers as T
from compared import as_stock
from published_drafters import norm, put, turn
from safetensors.torch import load_file
from torch.nn import functional as F
from transcribed_drafters import round_of, session_of
from transformers.cache_utils import DFlashCache

import mmspec
from mmspec.app import cli
from mmspec.drafters.dflash import BlockDrafter
from mmspec.pipelines.host.names import CACHE
from mmspec.protocols import TargetInfo
from mmspec.types import Prompt

V, H = tiny_vlms.VOCAB, tiny_vlms.HIDDEN
HEADS, KV, D, MLP, LAYERS, BLOCK, MASK = 4, 2, 16, 48, 2, 6, 5
INFO = TargetInfo("somebody/target", V, H, H, 3, torch.device("cpu"), torch.float32)
QWEN = {
    "model_type": "qwen3", "hidden_act": "silu", "num_hidden_layers": LAYERS, "vocab_size": V, "hidden_size": H,
    "intermediate_size": MLP, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": D,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "rope_scaling": None,
}  # fmt: skip


def tensors(q: str = "q_norm", k: str = "k_norm", fc: str = "fc", hidden: str = "hidden_norm") -> dict:
    found = {f"{fc}.weight": torch.randn(H, 2 * H) / 8, f"{hidden}.weight": 1 + torch.rand(H)}
    found["norm.weight"] = 1 + torch.rand(H)
    for i in range(LAYERS):
        at = f"layers.{i}"
        shapes = {
            "self_attn.q_proj": (HEADS * D, H), "self_attn.k_proj": (KV * D, H), "self_attn.v_proj": (KV * D, H),
            "self_attn.o_proj": (H, HEADS * D), "mlp.gate_proj": (MLP, H), "mlp.up_proj": (MLP, H),
            "mlp.down_proj": (H, MLP),
        }  # fmt: skip
        found |= {f"{at}.{name}.weight": torch.randn(shape) / 8 for name, shape in shapes.items()}
        norms = {"input_layernorm": H, "post_attention_layernorm": H, f"self_attn.{q}": D, f"self_attn.{k}": D}
        found |= {f"{at}.{name}.weight": 1 + torch.rand(n) for name, n in norms.items()}
    return found


def dflash(**more) -> tuple[dict, dict]:
    own = {"mask_token_id": MASK, "target_layer_ids": [0, 1]}
    config = {"architectures": ["DFlashDraftModel"], **QWEN, "block_size": BLOCK, "dflash_config": own, **more}
    return config, tensors()


def sliding() -> tuple[dict, dict]:
    kinds = ["sliding_attention", "full_attention"]
    return dflash(layer_types=kinds, sliding_window=7, use_sliding_window=True)


def markov(kind: str = "vanilla") -> dict:
    found = {"markov_head.markov_w1.weight": torch.randn(V, 4), "markov_head.markov_w2.weight": torch.randn(V, 4)}
    if kind == "gated":
        found |= {"markov_head.gate_proj.weight": torch.randn(4, H + 4), "markov_head.gate_proj.bias": torch.randn(4)}
    if kind == "rnn":
        joint = {"weight": torch.randn(12, H + 8), "bias": torch.randn(12)}
        found |= {f"markov_head.joint_proj.{name}": t for name, t in joint.items()}
    confidence = {"weight": torch.randn(1, H + 4) / 8, "bias": torch.ones(1)}
    return found | {f"confidence_head.proj.{name}": t for name, t in confidence.items()}


def dspark(kind: str = "vanilla") -> tuple[dict, dict]:
    config, t = dflash()
    own = {"markov_rank": 4, "markov_head_type": kind, "enable_confidence_head": True}
    config["dflash_config"] |= {**own, "confidence_head_with_markov": True}
    copies = {"embed_tokens.weight": torch.randn(V, H), "lm_head.weight": torch.randn(V, H)}
    return {**config, "architectures": ["DSparkDraftModel"]}, {**t, **markov(kind), **copies}


def dflash2() -> tuple[dict, dict]:
    config, t = dflash()
    config["dflash_config"] |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 4, "selector_top_k": 8}
    for i in range(LAYERS):
        for name in ("attention_conv", "mlp_conv"):
            t[f"layers.{i}.{name}.base_kernel"] = torch.randn(2, 2, H)
            t[f"layers.{i}.{name}.kernel_projection.weight"] = torch.randn(4 * H // 16, H) / 8
    books = {f"candidate_selector.{x}_codebook": torch.randn(V, 4) for x in ("predecessor", "successor")}
    choice = {**books, "candidate_selector.hidden_projection.weight": torch.randn(4, H)}
    return {**config, "architectures": ["DFlash2DraftModel"]}, {**t, **choice}


def hunyuan() -> tuple[dict, dict]:
    config, _ = dflash()
    return config, tensors("query_layernorm", "key_layernorm")


def muse() -> tuple[dict, dict]:
    made = T.MuseGlimmerAssistantConfig(
        hidden_size=H, intermediate_size=MLP, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV, head_dim=D, sliding_window=7, block_size=BLOCK, mask_token_id=MASK,
        target_layer_ids=[0, 1], bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    config = {**made.to_dict(), "architectures": ["MuseGlimmerAssistantModel"]}
    return config, tensors(fc="encoder.fc", hidden="encoder.output_norm_enc")


def speculators(kind: str = "dflash", rows: int = 40) -> tuple[dict, dict]:
    config, t = {"dflash": dflash, "dspark": dspark, "dflash2": dflash2}[kind]()
    own = {k: v for k, v in config.pop("dflash_config").items() if k != "target_layer_ids"}
    said = {
        "speculators_model_type": kind, "transformer_layer_config": QWEN, "draft_vocab_size": rows,
        "aux_hidden_state_layer_ids": [1, 2], "block_size": BLOCK, **own, "sample_from_anchor": kind == "dspark",
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "somebody/target"}},
    }  # fmt: skip
    t = {k: v for k, v in t.items() if k not in ("lm_head.weight", "embed_tokens.weight")}
    if rows < V:
        ids = torch.randperm(V)[:rows].sort().values
        t |= {"d2t": ids - torch.arange(rows), "t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)}
        t["lm_head.weight"] = torch.randn(rows, H)
    if "markov_head.markov_w2.weight" in t:
        t["markov_head.markov_w2.weight"] = torch.randn(rows, 4)
    return said, t


MADE = {
    "dflash": ("dflash", dflash),
    "sliding": ("dflash", sliding),
    "dspark": ("dflash", dspark),
    "dspark, gated": ("dflash", lambda: dspark("gated")),
    "dspark, rnn": ("dflash", lambda: dspark("rnn")),
    "dflash2": ("dflash", dflash2),
    "hunyuan": ("hunyuan-dflash", hunyuan),
    "muse": ("muse-glimmer", muse),
    "speculators dflash": ("speculators-block", speculators),
    "speculators dspark": ("speculators-block", lambda: speculators("dspark")),
    "speculators dflash2": ("speculators-block", lambda: speculators("dflash2", V)),
}


def load(folder, **options) -> BlockDrafter:
    return mmspec.load_drafter(folder, target=INFO, **options)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MADE)
def test_written_as_published(tmp_path, name):
    layout, make = MADE[name]
    config, t = make()
    first = load(put(tmp_path / "a", config, t))
    mmspec.save_drafter(first, tmp_path / "b", layout=layout)
    written = load_file(tmp_path / "b" / "model.safetensors")
    copies = {"embed_tokens.weight"} | ({"lm_head.weight"} if layout == "dflash" else set())
    assert written.keys() == t.keys() - copies
    assert all(torch.equal(written[key], t[key]) for key in written)
    mmspec.save_drafter(load(tmp_path / "b"), tmp_path / "c")
    again = load(tmp_path / "c")
    assert again.config == first.config and first.config.features == (1, 2)
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True))


@pytest.mark.parametrize("name", ["dspark", "dflash2", "sliding"])
def test_convert(tmp_path, name):
    """From z-lab's names to those of speculators and back, by the command; Muse-Glimmer's have no place for heads."""
    source, layouts = put(tmp_path / "a", *MADE[name][1]()), ("speculators-block", "dflash")
    said = ["--target", "me/other"]
    assert cli.main(["convert", str(source), str(tmp_path / "m"), *said, "--layout", "muse-glimmer"]) == 1
    if name == "sliding":
        layouts = ("dflash", "mmspec")  # speculators counts its windows from the anchor
        assert cli.main(["convert", str(source), str(tmp_path / "s"), *said, "--layout", "speculators-block"]) == 1
    for i, layout in enumerate(layouts):
        assert cli.main(["convert", str(source), str(tmp_path / f"{i}"), *said, "--layout", layout]) == 0
        source = tmp_path / f"{i}"
    first, last = load(tmp_path / "a"), load(source)
    assert replace(first.config, target="me/other") == last.config
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), last.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("make", "lost"),
    [
        (dflash, "layers.1.mlp.up_proj.weight"),
        (dspark, "markov_head.markov_w2.weight"),
        (dspark, "confidence_head.proj.bias"),
        (dflash2, "layers.1.attention_conv.base_kernel"),
        (dflash2, "candidate_selector.successor_codebook"),
        (muse, "encoder.output_norm_enc.weight"),
        (speculators, "d2t"),
    ],
)
def test_incomplete_files(tmp_path, make, lost):
    config, t = make()
    del t[lost]
    with pytest.raises(ValueError, match=f"missing: {lost}"):
        load(put(tmp_path, config, t))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, "must give mask_token_id"),
        ({"dflash_config": {"mask_token_id": MASK}}, "target_layer_ids in config.json must list"),
        ({"num_hidden_layers": 3}, r"missing: layers\.2\."),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers in config.json must be"),
        ({"block_size": "many"}, "must give block_size"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window None"),
        ({"dflash_config": {"projector_type": "domino"}}, "Domino"),
        ({"hidden_act": "gelu"}, "another activation"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "scaled by 'longrope'"),
    ],
)
def test_configs_that_are_refused(tmp_path, change, reason):
    config, t = dflash()
    with pytest.raises(ValueError, match=reason):
        load(put(tmp_path, {**config, **change}, t))


def test_options(tmp_path):
    drafter = load(put(tmp_path, *dflash()))
    assert (drafter.fit(INFO, {}).options.depth, drafter.fit(INFO, {}).nodes) == (BLOCK - 1, BLOCK)
    assert drafter.fit(INFO, {"width": 3, "size": 12}).options.tree == "dynamic"
    for given, reason in (
        ({"depth": BLOCK}, "depth is at most that"),
        ({"prune": 0.5}, "no use for prune"),
        ({"confidence": 0.5}, "a confidence head"),
        ({"window": 3}, "no use for window"),
    ):
        with pytest.raises(ValueError, match=reason):
            drafter.fit(INFO, given)
    with pytest.raises(ValueError, match="does not fit"):
        drafter.fit(TargetInfo("other", V, H + 8, H + 8, 3, torch.device("cpu"), torch.float32), {})


# -- numbers -----------------------------------------------------------------------------------------------------------


class Table:
    """A target that embeds by one table and reads the hidden state as it is."""

    def __init__(self) -> None:
        self.table = torch.randn(V, H)

    def embed(self, ids):
        return self.table[ids]

    bare_embed = embed

    def head(self, hidden, vocab=None):
        return hidden @ self.table.T


def rounds(drafter, features, counts, target):
    """Hidden states of the blocks of several rounds that read a prompt of `features` rows, then `counts` rows each."""
    found, at = [], features.shape[1] - sum(counts) + 1
    drafter.logits = lambda rows, target, own=drafter.logits: found.append(rows) or own(rows, target)
    ids = torch.zeros(1, at, dtype=torch.long)
    prompt = Prompt(ids, None, features[:, :at], ids, torch.ones_like(ids, dtype=torch.bool))
    session = session_of([7])
    session.memory = drafter.start(session, target, prompt)
    at -= 1
    for count in counts:
        kept = torch.arange(count)[None]
        session.last = round_of(kept, features[:, at : at + count], (count,), session.pending)
        drafter.propose(session, target)
        at += count
    return found


def test_as_transformers_own_assistant(tmp_path):
    """Muse-Glimmer's module, its cache, and ours, over a prompt and two rounds, the window exceeded."""
    config, t = muse()
    drafter, target = load(put(tmp_path, config, t)).fit(INFO, {}), Table()
    stock = T.MuseGlimmerAssistantModel(T.MuseGlimmerAssistantConfig(**config)).eval()
    stock.load_state_dict(t)
    features, counts = torch.randn(1, 20, 2 * H), [1, 3, 2]
    ours = rounds(drafter, features, counts, target)
    block = target.embed(torch.tensor([[7] + [MASK] * (BLOCK - 1)]))
    cache, read = DFlashCache(config=stock.config), 0
    cache.activate_past_recording()
    for upto, mine in zip((15, 18, 20), ours, strict=True):  # as stock's candidate generator goes on
        cache.set_previous_accepted_tokens(upto - read)
        if read:
            cache.crop(-BLOCK)
        positions = torch.arange(read, upto + BLOCK)[None]
        out = stock(
            noise_embeds=block, context_hidden_states=features[:, read:upto], position_ids=positions,
            attention_mask=torch.ones(1, upto + BLOCK, dtype=torch.long), **{CACHE: cache},
        )  # fmt: skip
        torch.testing.assert_close(mine, out.last_hidden_state[:, 1:], atol=1e-5, rtol=1e-4)
        read = upto


def literal(t, features, block, config, rope_first=False, causal=(False, False), window=(None, None), conv=False):
    """The published forward, layer by layer: [n, H] of a block [n, H] behind features [m, 2·H]."""
    q_name, k_name = ("query_layernorm", "key_layernorm") if rope_first else ("q_norm", "k_norm")
    context = norm(features @ t["fc.weight"].T, t["hidden_norm.weight"])
    m, n, x = len(features), len(block), block
    place = torch.arange(m + n)

    def mixed(x, weights, base):
        before = torch.cat([torch.zeros(1, H), x[:-1]])
        by = [base[i] + weights[:, i].repeat_interleave(16, -1) for i in range(2)]
        return by[0] * x + by[1] * before

    for i in range(LAYERS):
        at = f"layers.{i}"
        w = {name: t[f"{at}.self_attn.{name}_proj.weight"].T for name in "qkvo"}
        qn, kn = (t[f"{at}.self_attn.{name}.weight"] for name in (q_name, k_name))
        y = norm(x, t[f"{at}.input_layernorm.weight"])
        if conv:
            kernels = (y @ t[f"{at}.attention_conv.kernel_projection.weight"].T).view(n, 2, 2, -1)
            base = t[f"{at}.attention_conv.base_kernel"]
            y = mixed(y, kernels[:, 0], base[0])
        both = torch.cat([context, y])
        q, k, v = (y @ w["q"]).view(n, HEADS, D), (both @ w["k"]).view(m + n, KV, D), (both @ w["v"]).view(m + n, KV, D)
        if rope_first:
            q, k = norm(turn(q, 1e6, place[m:]), qn), norm(turn(k, 1e6, place), kn)
        else:
            q, k = turn(norm(q, qn), 1e6, place[m:]), turn(norm(k, kn), 1e6, place)
        distance = place[m:, None] - place
        seen = torch.ones(n, m + n, dtype=torch.bool)
        seen = seen & (distance >= 0) if causal[i] else seen
        seen = seen & (distance.abs() < window[i]) if window[i] else seen
        k, v = (x.repeat_interleave(HEADS // KV, 1).transpose(0, 1) for x in (k, v))
        o = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=seen)
        o = o.transpose(0, 1).reshape(n, -1) @ w["o"]
        x = x + (mixed(o, kernels[:, 1], base[1]) if conv else o)
        y = norm(x, t[f"{at}.post_attention_layernorm.weight"])
        if conv:
            kernels = (y @ t[f"{at}.mlp_conv.kernel_projection.weight"].T).view(n, 2, 2, -1)
            base = t[f"{at}.mlp_conv.base_kernel"]
            y = mixed(y, kernels[:, 0], base[0])
        gate, up, down = (t[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        y = (F.silu(y @ gate) * (y @ up)) @ down
        x = x + (mixed(y, kernels[:, 1], base[1]) if conv else y)
    return norm(x, t["norm.weight"])


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (dflash, {}),
        (sliding, {"causal": (True, False), "window": (7, None)}),
        (hunyuan, {"rope_first": True}),
        (dflash2, {"conv": True}),
    ],
)
def test_computes_as_published(tmp_path, make, how):
    config, t = make()
    drafter, target = load(put(tmp_path, config, t)).fit(INFO, {}), Table()
    features = torch.randn(1, 20, 2 * H)
    ours = rounds(drafter, features, [1, 3, 2], target)
    block = target.embed(torch.tensor([7] + [MASK] * (BLOCK - 1)))
    for upto, mine in zip((15, 18, 20), ours, strict=True):
        want = literal(t, features[0, :upto], block, config, **how)[1:]
        torch.testing.assert_close(mine[0], want, atol=1e-4, rtol=1e-3)


# -- outputs -----------------------------------------------------------------------------------------------------------


def test_confidence_shortens_drafts(tmp_path):
    model, inputs = tiny_vlms.model("llava"), tiny_vlms.prompt("llava", "ragged")
    drafter = load(put(tmp_path, *dspark()))
    drafted = [as_stock(model, inputs, drafter, **options).stats.drafted for options in ({}, {"confidence": 0.5})]
    assert drafted[1] < drafted[0]


@pytest.mark.parametrize("name", ["dflash", "dspark", "dflash2", "speculators dspark"])
@pytest.mark.parametrize("tree", ["chain", "mc_sim_7b_63"])
@pytest.mark.every(6)
def test_drawn_drafts_come_from_their_laws(tmp_path, name, tree):
    """Over many seeds a draft's first token, and the second after it, follow the distribution that was recorded."""
    drafter = load(put(tmp_path, *MADE[name][1]())).fit(INFO, {"tree": tree, "draws": True})
    depth, rows = drafter.options.depth, 20000
    hidden, logits = torch.randn(1, depth, H), 2 * torch.randn(1, depth, drafter.config.draft_vocab or V)
    session = Some(
        pending=torch.full((rows,), 9), emitted=torch.ones(rows, dtype=torch.long), seeds=torch.arange(rows),
        last=None,
    )  # fmt: skip
    with torch.no_grad():
        draft = drafter._drafted(session, hidden.expand(rows, -1, -1), logits.expand(rows, -1, -1), drawn=V)
    first = draft.tokens[:, 1]
    q = draft.q.logits[0, 1].softmax(-1)
    got = torch.bincount(first, minlength=V) / rows
    assert (got - q).abs().sum() / 2 < 0.05
    common = first == first.mode().values
    child = int((draft.tree.parents[0] == 1).nonzero()[0])
    distribution = draft.q.logits[common][:, child].softmax(-1)
    alike = distribution[:1].expand_as(distribution)
    assert torch.allclose(distribution, alike, atol=1e-5)  # of the token before alone
    got = torch.bincount(draft.tokens[common, child], minlength=V) / common.sum()
    assert (got - distribution[0]).abs().sum() / 2 < 0.15
