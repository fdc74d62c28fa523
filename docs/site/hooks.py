"""What mkdocs adds to docs/*.md when it builds the site: pages that are made of docstrings and of files elsewhere.

README is the first page. Links that lead out of docs/ go to the page that is made of that file.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]  # mkdocs runs this file by itself

import from_docstrings  # noqa: E402
import from_examples  # noqa: E402
from mkdocs.exceptions import PluginError  # noqa: E402
from mkdocs.structure.files import File, Files  # noqa: E402

COPIED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages that lie outside of docs/, by their path in the repository."""
FOLDERS = {"examples": "examples.md", "passes": "passes_reference.md"}
"""Pages that are made of what lies in a folder."""
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Give the pages of docs/integrations a place in the navigation, where there are any."""
    pages = sorted((ROOT / "docs" / "integrations").glob("*.md"))
    if pages:
        entry = {"Integrations": [str(page.relative_to(ROOT / "docs")) for page in pages]}
        titles = [next(iter(item)) if isinstance(item, dict) else item for item in config.nav]
        config.nav.insert(titles.index("Limits"), entry)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here."""
    made = {page: (ROOT / path).read_text(encoding="utf-8") for path, page in COPIED.items()}
    made |= {"passes_reference.md": from_docstrings.passes_page(), "api.md": from_docstrings.api_page()}
    made["examples.md"] = from_examples.page()
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Have links lead to the page that is made of a file outside of docs/; a link to one that has none becomes text."""
    source = {made: path for path, made in COPIED.items()}.get(page.file.src_uri)
    folder = ROOT if source else (ROOT / "docs" / page.file.src_uri).parent

    def link(found: re.Match[str]) -> str:
        text, path, heading = found[1], found[2], found[3] or ""
        target = path if "://" in path else _target((folder / path).resolve(), "../" * page.file.src_uri.count("/"))
        return f"[{text}]({target}{heading})" if target else text

    return _LINK.sub(link, markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Check that the API page has the public members of every public class, those of its base classes too."""
    if page.file.src_uri == "api.md":
        missing = [name for name in from_docstrings.members() if not re.search(rf'id="[\w.]*\b{name}"', html)]
        if missing:
            raise PluginError(f"the API page lacks {', '.join(missing)}; see inherited_members in mkdocs.yml")
    return html


def _target(file: Path, up: str) -> str:
    """The link to a file of the repository, from a page that lies `up` below docs/; "" where no page is made of it."""
    path = str(file.relative_to(ROOT))
    if path.startswith("docs/"):
        return up + path.removeprefix("docs/")
    if path in {**COPIED, **FOLDERS}:
        return up + {**COPIED, **FOLDERS}[path]
    anchor = from_examples.anchor(file)
    return f"{up}examples.md#{anchor}" if anchor else ""
