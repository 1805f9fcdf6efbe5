"""`builtin:search?path=documents&results=3`: BM25 over the paragraphs of a local folder's text files."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

from podium.errors import ConfigError, not_whole
from podium.errors.texts import listed

SUFFIXES = (".txt", ".md", ".rst")

LONGEST = 2_000
"""Characters of a passage: a longer paragraph is cut into several."""

MOST = 64 << 20
"""Bytes of all files."""


def make(*, path: str, results: int = 3, folder: Path) -> Callable[[str], str]:
    """The tool over this folder, indexed now. Raises `ConfigError`, also where bm25s is not installed."""
    if importlib.util.find_spec("bm25s") is None:
        raise ConfigError("`builtin:search` needs bm25s.", fix="pip install 'podium[search]'")
    if type(results) is not int or results < 1:
        raise not_whole("results", results, fix="results=3")
    passages = _passages(_folder(str(path), folder))
    import bm25s

    index = bm25s.BM25()
    index.index(bm25s.tokenize(passages, show_progress=False), show_progress=False)

    def search(query: str) -> str:
        """Search a collection of texts.

        Args:
            query: A few words to search for.

        Returns:
            The passages that match best, with the names of their files.
        """
        words = bm25s.tokenize([str(query)[:1000]], return_ids=False, show_progress=False)
        found, scores = index.retrieve(words, k=min(results, len(passages)), show_progress=False)
        hits = [passages[place] for place, score in zip(found[0], scores[0], strict=True) if score > 0]
        return "\n\n".join(hits) or "nothing was found"

    return search


def _folder(path: str, folder: Path) -> Path:
    candidates = [base / Path(path).expanduser() for base in (folder, Path.cwd())]
    if (found := next((candidate for candidate in candidates if candidate.is_dir()), None)) is None:
        raise ConfigError(
            f"there is no folder {path} (looked in {folder.resolve()} and {Path.cwd()}).",
            fix="path=FOLDER",
            path=path,
            resolve=folder.resolve(),
            cwd=Path.cwd(),
        )
    return found


def _passages(folder: Path) -> list[str]:
    """Every paragraph behind the name of its file."""
    files = sorted(file for file in folder.rglob("*") if file.suffix.casefold() in SUFFIXES and file.is_file())
    if (size := sum(file.stat().st_size for file in files)) > MOST:
        raise ConfigError(f"{folder} has {size >> 20} MB of text; at most {MOST >> 20} MB are searched.")
    passages = []
    for file in files:
        for paragraph in re.split(r"\n\s*\n", file.read_text(encoding="utf-8", errors="replace")):
            pieces = [paragraph[start : start + LONGEST].strip() for start in range(0, len(paragraph), LONGEST)]
            passages += [f"{file.relative_to(folder)}: {piece}" for piece in pieces if piece]
    if not passages:
        raise ConfigError(
            f"{folder} has no text to search in (files {listed(SUFFIXES)}).", folder=folder, suffixes=SUFFIXES
        )
    return passages
