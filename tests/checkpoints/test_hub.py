"""A model named by a folder that is missing."""

from __future__ import annotations

import pytest

from mmspec.app.devices import EngineError, find_model


@pytest.mark.parametrize("name", ["misspelt", "./owner", "../name", "/owner", "owner/", "a/b/c"])
def test_a_folder_that_is_missing_is_called_one(name: str) -> None:
    with pytest.raises(EngineError, match="no folder"):
        find_model(name)
