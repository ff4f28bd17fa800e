"""A Jupyter server of its own: settings, tokens, history and notebooks lie in one temporary folder."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any, Literal

import psutil

if TYPE_CHECKING:
    from pathlib import Path

    from fixtures.python_template import PythonTemplate

Where = Literal["lab", "nb7"]
Theme = Literal["light", "dark"]

THEMES: dict[Theme, str] = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}

_START = 90.0
_STOP = 20.0
_SETTINGS: dict[str, dict[str, Any]] = {
    # Cells outside the window are in the page too, so that a test can look at them.
    "notebook-extension/tracker": {"windowingMode": "none"},
    # A question about Jupyter news would lie over the notebook.
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}


class JupyterServer:
    """Serves JupyterLab and Notebook 7 on loopback.

    Args:
        folder: where its files are.
        template: what kernels are forked from, if they are no new interpreters.
    """

    def __init__(self, folder: Path, template: PythonTemplate | None = None) -> None:
        self._folder = folder
        self.notebooks = folder / "notebooks"
        self.notebooks.mkdir()
        for name, values in _SETTINGS.items():
            self._set(name, values)
        if template is not None:
            kernels = folder / "kernels" / "kernels" / "python3"
            kernels.mkdir(parents=True)
            parent = f"--IPKernelApp.parent_handle={template.pid}"  # a kernel ends when that has ended
            command = [str(template.program), "-m", "ipykernel_launcher", "-f", "{connection_file}", parent]
            kernel = {"argv": command, "display_name": "Python 3 (ipykernel)", "language": "python"}
            (kernels / "kernel.json").write_text(json.dumps(kernel), encoding="utf-8")
        self._token = secrets.token_hex(16)
        self._log = (folder / "server.log").open("wb")
        self._process, self._url = self._start()

    def _start(self) -> tuple[subprocess.Popen[bytes], str]:
        folder = self._folder
        own = {
            "HOME": folder,
            "TMPDIR": folder,
            "IPYTHONDIR": folder / "ipython",
            "JUPYTER_CONFIG_DIR": folder / "config",
            "JUPYTER_DATA_DIR": folder / "data",
            "JUPYTER_PATH": folder / "kernels",  # it comes before the kernels of the environment
            "JUPYTER_RUNTIME_DIR": folder / "runtime",
            "JUPYTERLAB_SETTINGS_DIR": folder / "settings",
            "JUPYTERLAB_WORKSPACES_DIR": folder / "workspaces",
        }
        # With this variable ipykernel believes to run in its own tests, and does not capture what C code prints.
        inherited = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = {
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.port": port,
            "ServerApp.port_retries": 0,
            "ServerApp.root_dir": self.notebooks,
            "ServerApp.open_browser": False,
            "ServerApp.allow_root": True,
            "IdentityProvider.token": self._token,
            "LabApp.news_url": None,
            "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
            # These two put `window.jupyterapp` into the page, which runs commands as menus do.
            "LabApp.expose_app_in_browser": True,
            "JupyterNotebookApp.expose_app_in_browser": True,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in options.items())],
            env=inherited | {name: str(path) for name, path in own.items()},
            cwd=self.notebooks,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + _START
        while not self._answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                process.wait()
                raise RuntimeError(f"the Jupyter server did not start:\n{(folder / 'server.log').read_text()}")
            time.sleep(0.1)  # a server that is not there yet has no event to wait for
        return process, url

    def _answers(self, url: str) -> bool:
        try:
            with self._request(f"{url}/api/status"):
                return True
        except OSError:
            return False

    def _request(self, url: str, method: str = "GET") -> Any:
        headers = {"Authorization": f"token {self._token}"}
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers, method=method), timeout=20)

    def _set(self, name: str, values: dict[str, Any]) -> None:
        path = self._folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))

    def use_theme(self, theme: Theme) -> None:
        """How pages look that are opened from now on."""
        self._set("apputils-extension/themes", {"theme": THEMES[theme], "adaptive-theme": False})

    def address(self, name: str, where: Where) -> str:
        """Where a notebook of `notebooks` is shown: in JupyterLab without side bars, or in Notebook 7."""
        path = {"lab": f"doc/tree/{name}?reset&", "nb7": f"notebooks/{name}?"}[where]
        return f"{self._url}/{path}token={self._token}"

    def kernel_of(self, name: str) -> psutil.Process:
        """The kernel of a notebook that is open: the child of the server that was given its connection file."""
        with self._request(f"{self._url}/api/sessions") as answer:
            (identity,) = (one["kernel"]["id"] for one in json.load(answer) if one["path"] == name)
        (kernel,) = (
            child
            for child in psutil.Process(self._process.pid).children()
            if any(identity in argument for argument in _arguments(child))
        )
        return _forked_for(kernel)

    def end_kernels(self, seconds: float = 10.0) -> list[str]:
        """End all kernels as the front ends do; returns what of them, or of what they started, is still there."""
        kernels = [_forked_for(child) for child in psutil.Process(self._process.pid).children()]
        family = [process for kernel in kernels for process in (kernel, *kernel.children(recursive=True))]
        with self._request(f"{self._url}/api/kernels") as answer:
            identities = [one["id"] for one in json.load(answer)]
        for identity in identities:
            self._request(f"{self._url}/api/kernels/{identity}", "DELETE").close()
        _, alive = psutil.wait_procs(family, timeout=seconds)
        left = []
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.append(f"{process.pid} {process.name()}")
                process.kill()
        return left

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def _forked_for(process: psutil.Process) -> psutil.Process:
    """Return the interpreter for which a process stands, which may be itself: see `PythonTemplate`."""
    kind, _, pid = process.name().partition("-")
    return psutil.Process(int(pid)) if kind == "python" and pid else process


def _arguments(process: psutil.Process) -> list[str]:
    """What a process was started with; nothing if it has ended since it was listed."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
