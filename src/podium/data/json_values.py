"""A column of a `Dataset` that gives back the values it was made of, whatever their types and keys.

    Dataset.from_dict({"checks": [{"min": 1}, {"max": 2.0}]}, features=Features({"checks": JsonValue()}))

Arrow gives every object of a column the keys of all others, and an integer among decimals becomes a decimal; the type
`Json` of `datasets` rounds decimals to 15 digits and reads a text such as "7" as a number.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from datasets import Json


@dataclass
class JsonValue(Json):
    """Values as JSON text, by Python's own encoder, which loses nothing."""

    def encode_example(self, example_data: Any) -> str | None:
        """The text that is stored. Raises `TypeError` for what JSON does not have."""
        return None if example_data is None else json.dumps(example_data)

    def decode_example(self, example_data: Any, token_per_repo_id: Any = None) -> Any:
        """The value that was stored."""
        return None if example_data is None else json.loads(example_data)

    def cast_storage(self, storage: pa.Array) -> pa.Array:
        """The column itself where it is JSON text already: `datasets` encodes text that its own reader refuses."""
        is_text = pa.types.is_string(storage.type)
        return pa.ExtensionArray.from_storage(self.pa_type, storage) if is_text else super().cast_storage(storage)
