"""A model named by its name on the Hub, where the Hub cannot be reached."""

from __future__ import annotations

import huggingface_hub
import pytest

from mmspec.app.devices import EngineError, find_model


class Session:
    """Counts how often it is asked, and answers like a network that is there, or that is not."""

    def __init__(self, there: bool):
        self.there, self.asked = there, 0

    def head(self, *_, **__) -> None:
        self.asked += 1
        if not self.there:
            raise OSError("Name or service not known")


@pytest.mark.parametrize(("there", "before", "asked"), [(True, False, 1), (False, False, 1), (False, True, 0)])
def test_the_hub_is_asked_once(there: bool, before: bool, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not answer, the libraries look into its cache alone, without retries for every file."""
    session = Session(there)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", before)
    assert find_model("owner/name") == "owner/name"
    assert session.asked == asked and huggingface_hub.constants.is_offline_mode() is not there


@pytest.mark.parametrize("name", ["misspelt", "./owner", "../name", "/owner", "owner/", "a/b/c"])
def test_a_folder_that_is_missing_is_called_one(name: str) -> None:
    with pytest.raises(EngineError, match="no folder"):
        find_model(name)
