"""A notebook that is open in JupyterLab or Notebook 7, used as a person uses it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from axe_playwright_python.async_playwright import Axe

from browser.server import THEMES

if TYPE_CHECKING:
    import psutil
    from playwright.async_api import BrowserContext, Dialog, Page

    from browser.chromium import Chromium
    from browser.server import JupyterServer, Theme, Where

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"

_OPEN = 90.0
# JupyterLab scrolls inside its own panel, so a screenshot shows only what a window of this height shows.
_WIDTH, _HEIGHT = 1200, 1700

IDLE = """() => {
    const shown = window.jupyterapp && window.jupyterapp.shell.currentWidget;
    const kernel = shown && shown.sessionContext && shown.sessionContext.session
        && shown.sessionContext.session.kernel;
    return Boolean(kernel) && kernel.connectionStatus === 'connected' && kernel.status === 'idle';
}"""
# The command's promise is kept when the last cell has ended: the kernel's status says idle while a cell runs.
_RUN = """([command, cell]) => {
    const app = window.jupyterapp;
    if (cell !== null) {
        app.shell.currentWidget.content.activeCellIndex = cell;
    }
    window.runsUnderWay = (window.runsUnderWay || 0) + 1;
    app.commands.execute(command).finally(() => { window.runsUnderWay -= 1; });
}"""
# A notebook that has just been opened may not have this cell yet, nor the cell its output.
_OUTPUT = "document.querySelectorAll('.jp-Notebook .jp-Cell')[{cell}]?.querySelector('.jp-Cell-outputArea')"


async def _leave(question: Dialog) -> None:
    """Answer JupyterLab's question whether to leave what is not saved."""
    await question.accept()


async def _answer_questions(page: Page) -> None:
    """Listen to dialogs. Playwright sends this to its driver at once, so it belongs in the thread of its event loop."""
    page.on("dialog", _leave)


class Notebook:
    """A page with a notebook in it. Cells are counted from 0."""

    def __init__(self, server: JupyterServer, chromium: Chromium, name: str, where: Where, theme: Theme) -> None:
        self._server, self._chromium = server, chromium
        self.name, self._where, self._theme = name, where, theme
        self._context: BrowserContext
        self._page: Page
        self._open()

    def _open(self) -> None:
        self._server.use_theme(self._theme)
        self._context, self._page = self._chromium.open(_WIDTH, _HEIGHT)
        address = self._server.address(self.name, self._where)
        self._chromium.wait_for(self._page.goto(address, wait_until="domcontentloaded"), _OPEN)
        self.wait_until("() => document.querySelector('.jp-Notebook .jp-CodeCell') !== null", timeout=_OPEN)
        self.wait_until(IDLE, timeout=_OPEN)

    @property
    def kernel(self) -> psutil.Process:
        """The process of its kernel."""
        return self._server.kernel_of(self.name)

    def evaluate(self, function: str, argument: Any = None, timeout: float = 30.0) -> Any:
        """What a JavaScript function returns in the page."""
        return self._chromium.wait_for(self._page.evaluate(function, argument), timeout)

    def wait_until(self, condition: str, argument: Any = None, timeout: float = 30.0) -> None:
        """Wait until a JavaScript function returns something true in the page."""
        waiting = self._page.wait_for_function(condition, arg=argument, timeout=timeout * 1000)
        self._chromium.wait_for(waiting, timeout + 5)

    def run_all(self) -> None:
        """Start all cells; `wait_until_done` waits for them."""
        self.evaluate(_RUN, ["notebook:run-all-cells", None])

    def run(self, cell: int) -> None:
        """Start one cell."""
        self.evaluate(_RUN, ["notebook:run-cell", cell])

    def wait_until_done(self, timeout: float = 45.0) -> None:
        """Wait until nothing that was started runs any more."""
        self.wait_until("() => window.runsUnderWay === 0", timeout=timeout)

    def is_done(self) -> bool:
        return bool(self.evaluate("() => window.runsUnderWay === 0"))

    def interrupt(self) -> None:
        """Press the button with the square."""
        self.click("[data-command='notebook:interrupt-kernel']")

    def click(self, selector: str, timeout: float = 10.0) -> None:
        self._chromium.wait_for(self._page.locator(selector).first.click(), timeout)

    def press_button(self, cell: int, title: str, timeout: float = 10.0) -> None:
        """Press a button under a cell."""
        area = self._page.locator(".jp-Notebook .jp-Cell").nth(cell).locator(".jp-Cell-outputArea")
        self._chromium.wait_for(area.get_by_role("button", name=title).click(), timeout)

    def press(self, key: str) -> None:
        self._chromium.wait_for(self._page.keyboard.press(key))

    def output(self, cell: int) -> str:
        """The text that is to be read under a cell."""
        return str(self.evaluate(f"() => {_OUTPUT.format(cell=cell)}?.innerText ?? ''"))

    def wait_for_output(self, cell: int, text: str, timeout: float = 30.0) -> str:
        """Wait until `text` is to be read under a cell; returns all that is."""
        try:
            self.wait_until(
                f"text => {_OUTPUT.format(cell=cell)}?.innerText.includes(text)", argument=text, timeout=timeout
            )
        except Exception as error:  # Playwright's says nothing of what was there instead
            raise AssertionError(f"{text!r} did not appear; there was {self.output(cell)!r}") from error
        return self.output(cell)

    def count(self, cell: int, selector: str) -> int:
        """How many elements of a kind are under a cell."""
        return int(
            self.evaluate(f"selector => {_OUTPUT.format(cell=cell)}.querySelectorAll(selector).length", selector)
        )

    def change_theme(self, theme: Theme) -> None:
        """Change how this page looks, as the menu does."""
        name = THEMES[theme]
        change = "name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})"
        self.evaluate(change, name)
        # While a theme is loaded, a picture of Jupyter lies over the page.
        shown = "document.body.dataset.jpThemeName === name && document.getElementById('jupyterlab-splash') === null"
        self.wait_until(f"name => {shown}", name)

    def scroll_to(self, cell: int) -> None:
        self.evaluate(f"() => {_OUTPUT.format(cell=cell)}.scrollIntoView({{block: 'center'}})")

    def save(self) -> nbformat.NotebookNode:
        """Save as the menu does; returns what lies on the disk then."""
        self.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
        path = self._server.notebooks / self.name
        saved: nbformat.NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
        return saved

    def reopen(self) -> None:
        """Close the page, end the kernel, and open what was saved."""
        self.close()
        self._server.end_kernels()
        self._open()

    def screenshot(self, name: str, cell: int | None = None, height: int = _HEIGHT) -> Path:
        """A picture in build/screenshots: of the window, or of what is under one cell."""
        path = SCREENSHOTS / f"{name}.png"
        if cell is None:
            size = self._page.set_viewport_size({"width": _WIDTH, "height": height})
            self._chromium.wait_for(size)
            self.evaluate("() => { document.querySelector('.jp-WindowedPanel-outer').scrollTop = 0; }")
            self._chromium.wait_for(self._page.screenshot(path=path))
        else:
            area = self._page.locator(".jp-Notebook .jp-Cell").nth(cell).locator(".jp-Cell-outputArea")
            self._chromium.wait_for(area.screenshot(path=path))
        return path

    def resize(self, width: int, height: int = _HEIGHT) -> None:
        """Give the window another size, in pixels."""
        self._chromium.wait_for(self._page.set_viewport_size({"width": width, "height": height}))

    def clear(self, cell: int) -> None:
        """Remove the output of a cell, as the menu does."""
        clear = "app.commands.execute('notebook:clear-cell-output')"
        choose = "app.shell.currentWidget.content.activeCellIndex = cell"
        self.evaluate(f"cell => {{ const app = window.jupyterapp; {choose}; return {clear}; }}", cell)

    def hide_sidebar(self) -> None:
        """Hide JupyterLab's list of files, as its menu does."""
        self.evaluate(
            "() => { const app = window.jupyterapp; if (!app.shell.leftCollapsed) { app.shell.collapseLeft?.(); } }"
        )

    def reload(self) -> None:
        """Load the page again, also while a cell runs; the kernel goes on."""
        self._chromium.wait_for(_answer_questions(self._page))
        self._chromium.wait_for(self._page.reload(wait_until="domcontentloaded"), _OPEN)
        self.wait_until("() => document.querySelector('.jp-Notebook .jp-CodeCell') !== null", timeout=_OPEN)

    def restart(self) -> None:
        """Restart the kernel, as the menu does once it was confirmed."""
        self.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")

    def violations(self, *selectors: str) -> list[str]:
        """What axe-core finds serious or critical in elements of these kinds, one line each."""
        there = [one for one in selectors if self.evaluate("one => document.querySelector(one) !== null", one)]
        found = self._chromium.wait_for(Axe().run(self._page, {"include": [[one] for one in there]}))
        return [
            f"{one['id']}: {node['target']} {node['failureSummary']} {node['html'][:300]}"
            for one in found.response["violations"]
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"]
        ]

    def close(self) -> None:
        self._chromium.wait_for(self._context.close())
