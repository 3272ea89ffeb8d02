"""Pages of the site that are files at the top of the repository; MkDocs calls the two functions.

Their links start at the repository's top, a page's at `docs`.
"""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

__all__ = ["on_files", "on_page_markdown"]

TOP = Path(__file__).resolve().parent.parent
PAGES = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages."""
    for page, source in PAGES.items():
        text = (TOP / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links of these pages, and to them."""
    added = page.file.src_uri in PAGES
    for name, source in PAGES.items():
        markdown = markdown.replace(f"../{source})", f"{name})")
        if added:
            markdown = markdown.replace(f"]({source})", f"]({name})")
    return markdown.replace("](docs/", "](") if added else markdown
