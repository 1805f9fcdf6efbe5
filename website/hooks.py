"""MkDocs hooks: pages for files outside `docs`, and links between all of them.

The README is the first page; the reference, the pages of findings and every file that a page links to are pages, too. A
link is resolved as on a disk, from the file that contains it, and then pointed at the page of its target.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FINDINGS = "src/podium/runs/pages/"
SCHEMA = "src/podium/recipe/schema.py"
RENAMED = {"README.md": "index.md", "website/reference.md": "reference.md"}
KEYS = "<!-- keys -->"
"""A line of the reference in whose place the table of a recipe's keys is put."""
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)

pages: dict[str, str] = {}
"""Path in the repository -> path in the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages for the README, for findings and for every file that one of the pages links to."""
    pages.clear()
    pages.update({f"docs/{file.src_uri}": file.src_uri for file in files})
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in pages if path.endswith(".md")}
    waiting = [*RENAMED, *sorted(f"{FINDINGS}{page.name}" for page in (ROOT / FINDINGS).glob("*.md"))]
    waiting += [target for path, text in texts.items() for target in targets(path, text)]
    while waiting:
        path = waiting.pop(0)
        if path in pages or not (ROOT / path).is_file():
            continue
        uri = f"findings/{PurePosixPath(path).name}" if path.startswith(FINDINGS) else RENAMED.get(path, path)
        pages[path] = uri if uri.endswith(".md") else f"{uri}.md"
        text = (ROOT / path).read_text(encoding="utf-8")
        if uri.endswith(".md"):
            waiting += targets(path, text)
            text = text.replace(KEYS, keys())
        else:
            text = f"# {path}\n\n```{PurePosixPath(path).suffix[1:] or 'text'}\n{text}\n```\n"
        files.append(File.generated(config, pages[path], content=text))
    files.append(File.generated(config, "findings/index.md", content=findings()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links to files of the repository at their pages."""
    origin = next((path for path, uri in pages.items() if uri == page.file.src_uri), None)
    if origin is None:
        return markdown

    def pointed(match: re.Match[str]) -> str:
        target = resolved(origin, match[2])
        if target not in pages:
            return match[0]
        relative = os.path.relpath(pages[target], os.path.dirname(page.file.src_uri) or ".")
        return f"{match[1]}{relative}{match[3]}"

    return "".join(part if part.startswith("```") else LINK.sub(pointed, part) for part in FENCE.split(markdown))


def resolved(origin: str, link: str) -> str:
    """The path in the repository that a link in the file `origin` means."""
    return os.path.normpath(os.path.join(os.path.dirname(origin), link))


def targets(origin: str, text: str) -> list[str]:
    """Paths in the repository that a file links to."""
    return [resolved(origin, match[2]) for match in LINK.finditer(FENCE.sub("", text))]


def keys() -> str:
    """The keys of a recipe that are Podium's own, as a table."""
    for node in ast.parse((ROOT / SCHEMA).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "MEANINGS" and node.value:
            rows = [f"| `{key}` | {meaning} |" for key, meaning in ast.literal_eval(node.value).items()]
            return "\n".join(["| key | meaning |", "|---|---|", *rows])
    raise LookupError(f"{SCHEMA} has no MEANINGS")


def findings() -> str:
    """The list of all pages of findings."""
    titles = {page.stem: page.read_text(encoding="utf-8").split("\n", 1)[0] for page in (ROOT / FINDINGS).glob("*.md")}
    lines = [f"- [{title.removeprefix('# ')}]({code}.md)" for code, title in sorted(titles.items())]
    return "\n".join(
        ["# Findings", "", "Codes of `podium check`, of errors, and of the detectors of a run.", "", *lines]
    )
