"""What MkDocs is told beyond `mkdocs.yml`: pages that lie elsewhere in the repository, and notebooks nobody has listed."""

from __future__ import annotations

import html as characters
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "nb_accelerate/cli/flags.md": "reference/flags.md",
    "nb_accelerate/compat/parity.md": "reference/parity.md",
}
"""Files of the repository that are pages too, and what they are called on the site."""

_CODE = re.compile(r"<(pre|code|script|style|svg)\b.*?</\1>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_MARKUP = re.compile(r"^.*(?:::\s*$|`|^\s*\|.*\||^\s*(?:[-*+]|\d+\.)\s).*$", re.MULTILINE)
"""A line of a page that still has markup in it: a block, a table or a list that was not seen as such."""

_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append to the tutorial each notebook that the navigation does not name."""
    named = str(config.nav)
    (tutorial,) = (section["Tutorial"] for section in config.nav if "Tutorial" in section)
    tutorial += [path.name for path in sorted(ROOT.glob("notebooks/*.ipynb")) if path.name not in named]
    return config


def on_files(files: Files, *, config: MkDocsConfig, **_: Any) -> Files:
    """Add the pages of `PAGES`."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_LINK.sub(_on_the_site, text)))
    return files


def _on_the_site(link: re.Match[str]) -> str:
    """Return a link of a file at the top of the repository as a page at the top of the site has it.

    A file that is no page, such as the licence, is left: MkDocs then says that there is no such page.
    """
    before, target, anchor, after = link.groups()
    return f"{before}{PAGES.get(target, target.removeprefix('notebooks/'))}{anchor or ''}{after}"


def on_page_content(html: str, *, page: Page, **_: Any) -> None:
    """Warn, which fails the build, of lines whose markup was not understood. What notebooks print is not looked at."""
    if page.file.src_uri.endswith(".md"):
        text = characters.unescape(_TAG.sub("", _CODE.sub("", html)))
        for line in _MARKUP.findall(text):
            logging.getLogger("mkdocs.pages").warning(f"{page.file.src_uri}: not rendered: {line.strip()}")
