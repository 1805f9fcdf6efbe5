"""A run's result for use elsewhere: one plain model folder with its card, a server, the hub.

Other packages import from here alone; a module is loaded when a name of it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podium.runs.shipping.card import CARD, model_card, title_of
    from podium.runs.shipping.export import export_model, is_merged, merged_folder
    from podium.runs.shipping.hub import files_to_send, find_repository, left_out, one_message, send
    from podium.runs.shipping.origin import base_named
    from podium.runs.shipping.prompt_prefix import opening
    from podium.runs.shipping.serving import LOOPBACK, become, server

_HOME = {
    "CARD": "card",
    "LOOPBACK": "serving",
    "base_named": "origin",
    "become": "serving",
    "export_model": "export",
    "files_to_send": "hub",
    "find_repository": "hub",
    "is_merged": "export",
    "left_out": "hub",
    "merged_folder": "export",
    "model_card": "card",
    "one_message": "hub",
    "opening": "prompt_prefix",
    "send": "hub",
    "server": "serving",
    "title_of": "card",
}

# fmt: off
__all__ = [
    "CARD", "LOOPBACK", "base_named", "become", "export_model", "files_to_send",
    "find_repository", "is_merged", "left_out", "merged_folder", "model_card", "one_message",
    "opening", "send", "server", "title_of",
]
# fmt: on


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
