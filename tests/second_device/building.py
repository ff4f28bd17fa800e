"""Build the library of simgpu, once for each version of torch and of its sources, with g++ and nothing else."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
    if not hasattr(torch, "accelerator") or tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        return f"simgpu needs torch 2.13, and this is {torch.__version__}"
    return ""


def build() -> Path:
    """Return the folder of the library for this torch and these sources; builds it if it is not there yet."""
    folder = BUILDS / f"{_torch_and_python()}-{_hash_of_sources()}"
    if (folder / LIBRARY).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # several workers of pytest-xdist come here at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / LIBRARY).exists():
            _compile(folder)
    return folder


def _torch_and_python() -> str:
    import torch

    return f"torch-{torch.__version__}-cp{sys.version_info.major}{sys.version_info.minor}"


def _hash_of_sources() -> str:
    digest = hashlib.sha256(repr(_FLAGS).encode())
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _compile(folder: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    include = [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda file: file.stat().st_size, reverse=True)

    def compile_one(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        began = time.monotonic()
        _run("g++", *_FLAGS, *include, "-c", str(source), "-o", str(target))
        if os.environ.get("SIMGPU_BUILD_TIMES"):
            print(f"{source.name}: {time.monotonic() - began:.1f} s", file=sys.stderr)
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(compile_one, sources))
    torch_libraries = [option for path in library_paths() for option in (f"-L{path}", f"-Wl,-rpath,{path}")]
    unfinished = folder / f"{LIBRARY}.unfinished"
    _run(
        *("g++", "-shared", *objects, *torch_libraries, "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
        *("-o", str(unfinished)),
    )
    for file in objects:
        Path(file).unlink()
    unfinished.rename(folder / LIBRARY)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


if __name__ == "__main__":
    print(obstacle() or build())
