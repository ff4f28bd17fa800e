"""Build the library of simgpu, once for each version of torch and of its sources, with g++ and nothing else."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SOURCES = Path(__file__).parent / "device" / "csrc"
BUILDS = Path(__file__).parents[2] / "build" / "second_device"
LIBRARY = "_simgpu.so"

_FLAGS = ("-std=c++20", "-O0", "-fPIC", "-fvisibility=hidden", "-w", "-DUSE_C10D_GLOO")
"""Kernels are torch's own, so optimizing what calls them would only make the build slower."""


def obstacle() -> str:
    """Say why it cannot be built here, or ""."""
    import torch

    if sys.platform != "linux":
        return "simgpu is built on Linux only"
    if shutil.which("g++") is None:
        return "simgpu needs a C++ compiler: apt-get install g++"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "simgpu needs the headers of Python: apt-get install python3-dev"
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        return f"simgpu needs torch 2.13 or newer, and this is {torch.__version__}"
    return ""


def build() -> Path:
    """Return the folder of the library for this torch and these sources; builds it if it is not there yet."""
    cache = BUILDS / f"torch-{_torch_version()}-cp{sys.version_info.major}{sys.version_info.minor}"
    folder = cache / _hash_of(SOURCES.iterdir())
    if not (folder / LIBRARY).exists():
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "lock").open("w") as lock:  # several workers of pytest-xdist come here at once
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / LIBRARY).exists():
                folder.mkdir(exist_ok=True)
                _compile(folder)
    return folder


def _torch_version() -> str:
    import torch

    return torch.__version__


def _hash_of(files: Iterable[Path]) -> str:
    digest = hashlib.sha256(repr(_FLAGS).encode())
    for file in sorted(files):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _compile(folder: Path) -> None:
    """Compile all sources as one: nearly all the time goes into torch's headers, which are then read once."""
    from torch.utils.cpp_extension import include_paths, library_paths

    include = [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    torch_libraries = [option for path in library_paths() for option in (f"-L{path}", f"-Wl,-rpath,{path}")]
    libraries = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")
    source, unfinished = folder / "simgpu.cpp", folder / f"{LIBRARY}.unfinished"
    source.write_text("".join(f'#include "{path}"\n' for path in sorted(SOURCES.glob("*.cpp"))))
    _run("g++", *_FLAGS, *include, "-shared", str(source), *torch_libraries, *libraries, "-o", str(unfinished))
    unfinished.rename(folder / LIBRARY)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


if __name__ == "__main__":
    print(obstacle() or build())
