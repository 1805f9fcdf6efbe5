"""Several datasets as one: Podium's parts with weights, and TRL's with fractions. No row is ever repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np

from podium.data.files import readable
from podium.data.sources import load_splits
from podium.errors import DataError


def mixed(parts: Mapping[str, Any], weights: Sequence[float | None], *, seed: int) -> Any:
    """Parts by name as one dataset: all their rows, or with weights as many of each as keeps the shares.

    Which rows of a part are taken depends on `seed` alone. They are spread evenly, so that every stretch of the
    mixture has about the shares of the whole. Of streams the shares hold on average. Raises `DataError` (D058) for
    columns of one name whose types do not go together.
    """
    from datasets import concatenate_datasets, interleave_datasets

    _check_types(parts)
    rows = list(parts.values())
    if len(rows) == 1:
        return rows[0]
    if any(weight is None for weight in weights):
        return concatenate_datasets(rows)
    shares = np.array(weights, float) / sum(float(weight or 0) for weight in weights)
    if not all(hasattr(each, "__len__") for each in rows):
        return interleave_datasets(rows, probabilities=shares.tolist(), seed=seed, stopping_strategy="first_exhausted")
    return concatenate_datasets(rows).select(_interleaved([len(each) for each in rows], shares, seed))


def _interleaved(sizes: Sequence[int], shares: np.ndarray, seed: int) -> list[int]:
    """Rows of the parts laid end to end, in the order of the mixture.

    >>> order = _interleaved([4, 100], np.array([0.4, 0.6]), seed=1)
    >>> len(order), sum(index < 4 for index in order), sum(index < 4 for index in order[:5])
    (10, 4, 2)
    """
    total = min(size / share for size, share in zip(sizes, shares, strict=True))
    places: list[tuple[float, int]] = []
    start = 0
    for part, (size, share) in enumerate(zip(sizes, shares, strict=True)):
        count = min(size, round(share * total))
        drawn = np.sort(np.random.default_rng([seed, part]).permutation(size)[:count])
        places += [((k + 0.5) / count, start + int(index)) for k, index in enumerate(drawn)]
        start += size
    return [index for _, index in sorted(places)]


def _check_types(parts: Mapping[str, Any]) -> None:
    """Raises `DataError` for columns of two parts that differ in type; null fits every type."""
    from datasets import Value

    seen: dict[str, tuple[str, Any]] = {}
    for name, rows in parts.items():
        for column, kind in (rows.features or {}).items():
            if kind == Value("null"):
                continue
            first, other = seen.setdefault(column, (name, kind))
            if other != kind:
                one, two = (
                    str(each.dtype) if isinstance(each, Value) else "a mapping" if isinstance(each, dict) else "a list"
                    for each in (other, kind)
                )
                raise DataError(
                    "D058.check_types",
                    fix=_ONE_WAY.get(column, "Write the column one way in all parts, or leave it out of one."),
                    column=column,
                    one=one,
                    first=first,
                    two=two,
                    name=name,
                )


_ONE_WAY = {
    "prompt": 'Write `prompt: "{column}"` and `chat: true` (or a `system`) for every part, or for none.',
    "answer": 'Write `answer: "{column}"` for every part: a template gives text.',
}


def trl_mixture(
    datasets: Sequence[Mapping[str, Any]], *, streaming: bool, test_split_size: float | None, seed: int
) -> dict[str, Any]:
    """TRL's `datasets:`: parts one after another, cut to shares when `fraction` is given. Raises `DataError`."""
    from datasets import concatenate_datasets

    parts = [_trl_part(part, streaming=streaming) for part in datasets]
    fractions = [part.get("fraction") for part in datasets]
    if any(fraction is not None for fraction in fractions):
        parts = _cut_to_shares(parts, fractions, streaming=streaming)
    rows = concatenate_datasets(parts)
    if test_split_size is None:
        return {"train": rows}
    if streaming:
        raise _needs_a_count("test_split_size")
    return dict(rows.train_test_split(test_size=test_split_size, seed=seed))


def chosen(splits: Mapping[str, Any], wanted: str, name: str, key: str) -> Any:
    """One split by its name. Raises `DataError` (D038)."""
    if wanted not in splits:
        near = (get_close_matches(wanted, splits) or [*splits, ""])[0]
        raise DataError("D038.no_split", changes={key: near}, setting=key, name=name, wanted=wanted, splits=splits)
    return splits[wanted]


def _needs_a_count(key: str) -> DataError:
    return DataError("C030.needs_know_many", setting=key)


def _trl_part(part: Mapping[str, Any], *, streaming: bool) -> Any:
    from datasets import load_dataset

    path, split = part["path"], part.get("split") or "train"
    if part.get("data_files") or part.get("data_dir") or part.get("name") or not split.isidentifier():
        options = {key: part.get(key) for key in ("name", "data_dir", "data_files")}
        what = f"The part `{path}` of `datasets` cannot be had: {{cause}}"
        with readable(what, path, code="D035", fix="Private or gated: `hf auth login`."):
            rows = load_dataset(path, split=split, streaming=streaming, **options)
    else:
        rows = chosen(load_splits(path, streaming=streaming), split, path, "split")
    return rows.select_columns(part["columns"]) if part.get("columns") else rows


def _cut_to_shares(parts: list[Any], fractions: list[float | None], *, streaming: bool) -> list[Any]:
    """The first rows of each part, so that none is repeated and the shares come out (as in TRL 1.16)."""
    if streaming:
        raise _needs_a_count("fraction")
    if any(fraction is None for fraction in fractions):
        raise DataError("C030.fraction_given_some")
    given = [float(fraction or 0) for fraction in fractions]
    shares = [fraction / sum(given) for fraction in given]
    total = min(len(part) / share for part, share in zip(parts, shares, strict=True) if share > 0)
    return [part.select(range(round(share * total))) for part, share in zip(parts, shares, strict=True)]
