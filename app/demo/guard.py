"""The demo's protection: no downloads of URLs, no decoding in the server process, no remote access without password."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

import gradio as gr
from gradio_client import utils as client_utils

from mmspec.app.options import is_local

ADDRESS = "The demo fetches nothing from the network. Download the file and upload it."


class AccessError(ValueError):
    """The demo may not be opened to others in this way; the message says what to do."""


def _unopened(kind: type) -> Any:
    """A subclass of the component that returns the path of an upload without opening it; only app/media decodes files.

    It must be a class, since gradio rebuilds a component by its class when an example or a button changes it. It
    bypasses gradio's metaclass, which would write a .pyi file beside this module.
    """
    own = {"preprocess": lambda _, payload: _path(payload), "is_template": True, "__module__": kind.__module__}
    return ABCMeta.__new__(type(kind), kind.__name__, (kind,), own)  # type: ignore[call-overload]


_Image, _Video = _unopened(gr.Image), _unopened(gr.Video)


def picture(**options: object) -> gr.Image:
    """An image input; gradio's own would open the upload with Pillow in the server process."""
    return _Image(type="filepath", image_mode=None, sources=["upload"], format="png", **options)


def video(**options: object) -> gr.Video:
    """A video input; gradio's own would start ffmpeg on the upload."""
    return _Video(format=None, sources=["upload"], include_audio=True, **options)


def _path(payload: Any) -> str | None:
    if payload is None:
        return None
    if not payload.path:
        raise gr.Error("The demo takes uploaded files only.")
    return str(payload.path)


class Page(gr.Blocks):
    """Blocks that refuse URLs as file inputs; stock gradio downloads them on the server."""

    async def preprocess_data(self, block_fn: Any, inputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        client_utils.traverse(inputs, _refuse_address, client_utils.is_file_obj)
        return await super().preprocess_data(block_fn, inputs, *args, **kwargs)


def _refuse_address(file: dict[str, Any]) -> dict[str, Any]:
    if client_utils.is_http_url_like(str(file.get("path") or "")):
        raise gr.Error(ADDRESS)
    return file


def credentials(host: str, auth: str | None) -> tuple[str, str] | None:
    """User and password; None if only this machine can reach the demo.

    Raises AccessError: another host without a password, or a password that cannot be read.
    """
    if auth is None:
        if is_local(host):
            return None
        raise AccessError(
            f"--host {host} lets others on the network in, so a password is needed: add --auth USER:PASSWORD, or set "
            f"MMSPEC_DEMO_AUTH, or leave --host out for this machine only"
        )
    user, colon, password = auth.partition(":")
    if not (user and colon and password):
        raise AccessError("--auth takes USER:PASSWORD, both not empty, separated by a colon")
    return user, password
