"""The bench on real weights: what is measured over what, and that nothing that is asked there is learnt from."""

from __future__ import annotations

from benchmarks import real, real_prompts


def test_speed_ups_are_over_the_fastest_stock_path_too() -> None:
    """By the time a token, so that answers of unequal length compare."""
    did = {"rounds": 2, "row_rounds": 4, "gained": 8, "draft": 0.1, "verify": 0.4}
    made = {
        "stock": [real.RealCall(8.0, ((1, 2), (3, 4)), None)],
        "stock-static": [real.RealCall(4.0, ((1, 2), (3, 4)), None)],
        "plain": [real.RealCall(1.0, ((1,), (3,)), None)],  # ours: never the best stock path
        "eagle": [real.RealCall(4.0, ((1, 2, 3, 4), (3, 4, 5, 6)), did)],
    }
    found = {one["method"]: one for one in real.records("chats", made, {"eagle": "a note"})}
    eagle = found["eagle"]
    assert {one["best_stock"] for one in found.values()} == {"stock-static"}
    assert (eagle["speedup_e2e"], eagle["over_best"]) == (4.0, 2.0)
    assert (eagle["tokens_per_round"], eagle["draft_ms"], eagle["verify_ms"]) == (2.0, 50.0, 200.0)
    assert (found["stock-static"]["identical"], eagle["identical"]) == (1.0, 0.0)
    text = real.report.markdown(list(found.values()), {"temperature": 0}, {})
    assert "| eagle | 4.00x (4.00-4.00) | 2.00x (2.00-2.00) |" in text and "eagle: a note" in text


def test_no_prompt_that_is_measured_is_learnt_from() -> None:
    learnt, again = real_prompts.lessons(0), real_prompts.lessons(0)
    measured = {prompt.text for ask in real.KINDS.values() for prompt in ask()}
    assert learnt == again and len(learnt) > 1000 and len({*learnt}) == len(learnt)
    assert not measured & {*learnt} and len(measured) >= 60
