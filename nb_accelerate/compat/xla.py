"""Install torch_xla on Colab."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

from nb_accelerate.base.config.versions import is_installed

_WHEELS = (
    "https://storage.googleapis.com/libtpu-releases/index.html",
    "https://storage.googleapis.com/libtpu-wheels/index.html",
)


def install_xla(upgrade: bool = False) -> None:
    """Install the torch_xla that fits torch, on Google Colab. Restart the runtime afterwards.

    Args:
        upgrade: upgrade torch first.

    Raises:
        RuntimeError: this is not Colab, where packages belong to the user and not to us.
        CalledProcessError: pip failed; it says why.
    """
    if not is_installed("google.colab"):
        raise RuntimeError(
            "install_xla was called outside of Google Colab. Install torch_xla as the rest of your environment: "
            f"pip install {_requirement()}."
        )
    if upgrade:
        _pip("--upgrade", "torch")
    _pip(_requirement(), *(word for page in _WHEELS for word in ("--find-links", page)))


def _requirement() -> str:
    """Return what to install: torch_xla has the version of the torch that it is for."""
    major, minor = importlib.metadata.version("torch").split("+")[0].split(".")[:2]
    return f"torch_xla[tpu]~={major}.{minor}.0"


def _pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", *words], check=True)
