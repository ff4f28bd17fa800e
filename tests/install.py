"""Install into an environment with uv, which takes a tenth of pip's time, or with pip where uv cannot be had or fails.

Both ask the indexes that pip is set up with. Neither compiles modules: Python does, when one is first imported.

    python tests/install.py ENVIRONMENT [ARGUMENTS OF PIP INSTALL ...]
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / ".venv-uv"
PIN = "uv==0.13.9"

SETTINGS = {
    "cert": "SSL_CERT_FILE",
    "constraint": "UV_CONSTRAINT",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
}
"""Settings of pip, and the variables that tell uv."""


def install(environment: Path, *arguments: str | Path) -> None:
    """Install what the arguments name, as pip and uv both understand them."""
    python = environment / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check"]
    uv = TOOLS / "bin" / "uv"
    if not uv.exists():
        subprocess.run([*pip, "install", "--quiet", "--target", TOOLS, PIN], check=False)
    if uv.exists():
        # As pip does, take the best version of all indexes.
        command = [uv, "pip", "install", "--python", python, "--index-strategy", "unsafe-best-match", *arguments]
        listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=True).stdout
        with subprocess.Popen(
            command, env=os.environ | variables(listed), stderr=subprocess.PIPE, text=True
        ) as running:
            for line in running.stderr or ():
                if not line.startswith((" + ", " - ", " ~ ")):  # a line a package
                    print(line, end="", file=sys.stderr, flush=True)
        if running.returncode == 0:
            return
    subprocess.run([*pip, "install", "--no-compile", *arguments], check=True)


def variables(listed: str) -> dict[str, str]:
    """Return the variables of uv for what ``pip config list`` printed."""
    found = {}
    for line in reversed(listed.splitlines()):  # the first lines, those of the environment, have the last word
        setting, _, value = line.partition("=")
        if name := SETTINGS.get(setting.rpartition(".")[2]):
            separator = "," if name == "UV_FIND_LINKS" else " "
            found[name] = separator.join(ast.literal_eval(value).split())
    return found


if __name__ == "__main__":
    install(Path(sys.argv[1]), *sys.argv[2:])
