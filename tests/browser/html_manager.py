"""Pages that nbconvert makes of a notebook, with the widgets drawn by html-manager, which knows no kernel."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import tarfile
from typing import TYPE_CHECKING

import nbconvert
import pytest

if TYPE_CHECKING:
    from pathlib import Path

    import nbformat
    from playwright.async_api import BrowserContext, Page, Route

    from browser.chromium import Chromium

_PACKAGES = {
    "@jupyter-widgets/html-manager@1.0.15": (
        "package/dist/embed-amd.js",
        "5thBIV6ymNgmPVOHvzx+gGy8ZSKmSazhtGw4/c4xJDVzRhG9PTeQsRjF3FUTopvFi//SABeNz1yp47bCrJ3CQA==",
    ),
    "requirejs@2.3.8": (
        "package/require.js",
        "7/cTSLOdYkNBNJcDMWf+luFvMriVm7eYxp4BcFCsAX0wF421Vyce5SXP17c+Jd5otXKGNehIonFlyQXSowL6Mw==",
    ),
}
"""From npm: the file that a page loads, and the SHA-512 of the archive in base 64, as npm's lock files have it."""

_SITE = "http://127.0.0.1:9/"
"""No server is there: the browser is given what lies under it."""


def scripts(folder: Path) -> dict[str, Path]:
    """Return the scripts that a page with widgets loads, by name; they are taken from npm's registry.

    Without npm, or where it reaches no registry, the test that asks for them is skipped.
    """
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("html-manager comes from npm, which is not installed")
    found = {}
    for package, (member, expected) in _PACKAGES.items():
        run = subprocess.run(
            [npm, "pack", "--silent", "--cache", str(folder / "cache"), package],
            cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        if run.returncode:
            pytest.skip(f"npm does not bring {package}: {run.stderr[-200:]}")
        archive = folder / run.stdout.split()[-1]
        digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        assert digest == expected, f"{package} is another one than it was"
        script = folder / member.rpartition("/")[2]
        with tarfile.open(archive) as content:
            source = content.extractfile(member)
            assert source is not None, f"{package} has no file {member}"
            script.write_bytes(source.read())
        found[script.name] = script
    return found


class ExportedPage:
    """A page that nbconvert has made of a notebook, in a browser.

    Args:
        chromium: the browser.
        notebook: what is exported.
        scripts: by name; a page that asks for one that is not here gets nothing.
    """

    def __init__(self, chromium: Chromium, notebook: nbformat.NotebookNode, scripts: dict[str, Path]) -> None:
        exporter = nbconvert.HTMLExporter(
            require_js_url=f"{_SITE}require.js", widget_renderer_url=f"{_SITE}embed-amd.js", mathjax_url=""
        )
        html, _ = exporter.from_notebook_node(notebook)
        self._chromium = chromium
        self.problems: list[str] = []
        self._context: BrowserContext
        self._page: Page
        self._context, self._page = chromium.open(1000, 900)

        async def answer(route: Route) -> None:
            name = route.request.url.removeprefix(_SITE)
            if name == "page.html":
                await route.fulfill(body=html, content_type="text/html")
            elif name in scripts:
                await route.fulfill(path=scripts[name])
            else:
                await route.abort()

        async def open_() -> None:
            self._page.on("pageerror", lambda error: self.problems.append(str(error)))
            await self._context.route(f"{_SITE}**", answer)
            await self._page.goto(f"{_SITE}page.html", wait_until="load")

        chromium.wait_for(open_())

    def wait_for(self, selector: str) -> None:
        """Wait until there is an element of a kind, hidden or not."""
        self._chromium.wait_for(self._page.locator(selector).first.wait_for(state="attached", timeout=30_000))

    def wait_until_quiet(self) -> None:
        """Wait until the page has loaded what it asks for, and html-manager has drawn what it can."""
        self._chromium.wait_for(self._page.wait_for_load_state("networkidle"))
        drawn = "() => window.requirejs?.defined('@jupyter-widgets/html-manager/dist/libembed-amd')"
        self._chromium.wait_for(self._page.wait_for_function(drawn))
        self._chromium.wait_for(self._page.evaluate("() => new Promise(done => setTimeout(done, 0))"))

    def finish_animations(self) -> None:
        """Let the time of animations be over, by which the panel shows after a while that it has heard nothing."""
        finish = "() => document.getAnimations().forEach(one => one.finish())"
        self._chromium.wait_for(self._page.evaluate(finish))

    def count(self, selector: str) -> int:
        """Return how many elements of a kind are to be seen."""
        return self._chromium.wait_for(self._page.locator(f"{selector}:visible").count())

    @property
    def text(self) -> str:
        """What is to be read."""
        return self._chromium.wait_for(self._page.locator("body").inner_text())

    def screenshot(self, path: Path) -> None:
        self._chromium.wait_for(self._page.screenshot(path=path))

    def close(self) -> None:
        self._chromium.wait_for(self._context.close())
