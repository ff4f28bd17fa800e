"""Debian's Chromium, driven through Playwright.

Playwright's event loop runs in a thread of its own::

    a test (main thread)                         thread "browser"
    page.evaluate(...)  -> Chromium.wait_for ->  Playwright -> its driver -> Chromium
            ^                                          |
            +------------ the answer, or TimeoutError -+

so the main thread stays free to be interrupted by a test's time limit, and a page that no longer answers is seen.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import pytest
from playwright.async_api import async_playwright

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from playwright.async_api import Browser, BrowserContext, Page, Playwright

T = TypeVar("T")

_ANSWER = 60.0
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


class Chromium:
    """One browser. Its pages reach nothing but this machine."""

    def __init__(self, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        # Files are written in a thread: in this one, which is there before a test begins.
        self._loop.set_default_executor(ThreadPoolExecutor(1, "browser files"))
        self._thread = threading.Thread(target=self._loop.run_forever, name="browser")
        self._thread.start()
        before = set(psutil.Process().children())
        try:
            self._playwright, self._browser = self.wait_for(self._start(folder))
        except BaseException:
            self._end_thread()  # it would keep this process from ending
            raise
        finally:
            self.processes = [one for one in psutil.Process().children() if one not in before]
            """What was started here. What these start comes and goes with their pages."""

    async def _start(self, folder: Path) -> tuple[Playwright, Browser]:
        executable = shutil.which("chromium")
        if executable is None:
            raise RuntimeError("the browser tests need Chromium. On Debian: apt-get install chromium")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", str(folder))  # the driver takes it from here; the usual folder is watched
            playwright = await async_playwright().start()
            await self._loop.run_in_executor(None, os.getpid)
        environment = os.environ | {"HOME": str(folder), "TMPDIR": str(folder)}
        browser = await playwright.chromium.launch(
            executable_path=executable, args=_ARGUMENTS, env=dict(environment), headless=True
        )
        return playwright, browser

    def wait_for(self, coroutine: Coroutine[Any, Any, T], timeout: float = _ANSWER) -> T:
        """What a call of Playwright returns.

        Raises:
            TimeoutError: it took longer than `timeout` seconds.
        """
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, timeout), self._loop).result()

    def open(self, width: int, height: int) -> tuple[BrowserContext, Page]:
        """An empty page that shares nothing with other pages."""
        return self.wait_for(self._open(width, height))

    async def _open(self, width: int, height: int) -> tuple[BrowserContext, Page]:
        context = await self._browser.new_context(viewport={"width": width, "height": height})
        return context, await context.new_page()

    def close(self) -> None:
        family = [process for one in self.processes for process in (one, *one.children(recursive=True))]
        try:
            self.wait_for(self._browser.close())
            self.wait_for(self._playwright.stop())
            self.wait_for(self._loop.shutdown_default_executor())
        finally:
            self._end_thread()
            _, alive = psutil.wait_procs(family, timeout=10)
            for process in alive:
                process.kill()
            psutil.wait_procs(alive, timeout=5)

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
