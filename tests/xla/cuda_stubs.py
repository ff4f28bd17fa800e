"""Let torch be imported where it was installed without the libraries of CUDA. Called by `make test-xla`.

PyPI's builds of torch for Linux are linked with CUDA, and torch_xla fits no others. For each library of CUDA that torch
asks for and that is not there, this compiles one with the same names, beside those of torch. Each function answers
with an error number, so that torch finds no GPU. Needs gcc and readelf.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path

LIBRARIES = re.compile(r"NEEDED.*\[((?:libcu|libnccl|libnvshmem|libnvrtc|libnvJitLink|libnvToolsExt)[^\]]*)\]")
FUNCTIONS = re.compile(r"(?:__cuda|cu|nccl|nvshmem|nvrtc|nvJitLink)")

HOMES = {
    "cudnn": "libcudnn.so",
    "cusparseLt": "libcusparseLt.so",
    "cuFile": "libcufile.so",
    "nccl": "libnccl.so",
    "nvshmem": "libnvshmem_host.so",
}
"""Beginnings of names without a version, and of the library that they are looked for in."""

NO_DEVICE = 100
"""cudaErrorNoDevice."""

SPECIAL = {
    "__cudaRegisterFatBinary": "static void *handle; void **__cudaRegisterFatBinary(void *p) { return &handle; }",
    "cudaGetDeviceCount": f"int cudaGetDeviceCount(int *n) {{ *n = 0; return {NO_DEVICE}; }}",
}
TEXTS = re.compile(r"Get(?:Error|Status)(?:String|Name|Description)|_get_last_error|(?<!cuda)GetLastError$")


def main() -> None:
    """Write the libraries that torch of this Python lacks."""
    for program in ("gcc", "readelf"):
        if shutil.which(program) is None:
            sys.exit(f"make test-xla needs {program}. On Debian: apt-get install gcc binutils")
    folder = Path(sysconfig.get_paths()["platlib"]) / "torch" / "lib"
    if not folder.is_dir():
        sys.exit(f"torch is not installed: there is no {folder}")
    needed, versions, plain = wanted(folder)
    for library in sorted(needed):
        of_library = {
            version: names
            for version, names in versions.items()
            if version == library or (version == "NVSHMEM" and library.startswith("libnvshmem"))
        }
        starts = tuple(start for start, home in HOMES.items() if library.startswith(home))
        unversioned = {name for name in plain if starts and name.startswith(starts)}
        compile_stub(folder / library, of_library, unversioned)
    print(f"{len(needed)} libraries of CUDA are stubs")


def wanted(folder: Path) -> tuple[set[str], dict[str, set[str]], set[str]]:
    """Return the libraries that are missing, the names that torch looks for by version, and those without one."""
    needed: set[str] = set()
    versions: defaultdict[str, set[str]] = defaultdict(set)
    plain: set[str] = set()
    defined: set[str] = set()
    for file in sorted(folder.glob("*.so*")):
        if file.is_symlink():
            continue
        needed |= {name for name in LIBRARIES.findall(readelf("-d", file)) if name != "libcuda.so.1"}
        for line in readelf("--dyn-syms", file).splitlines():
            fields = line.split()
            if len(fields) < 8 or not fields[0].endswith(":"):
                continue
            name, _, version = fields[7].replace("@@", "@").partition("@")
            if fields[6] != "UND":
                defined.add(name)
            elif FUNCTIONS.match(name):
                (versions[version] if version else plain).add(name)
    return {name for name in needed if not (folder / name).exists()}, dict(versions), plain - defined


def readelf(what: str, file: Path) -> str:
    return subprocess.run(["readelf", "--wide", what, file], check=True, capture_output=True, text=True).stdout


def compile_stub(file: Path, versions: dict[str, set[str]], plain: set[str]) -> None:
    """Compile one library with these functions.

    Args:
        file: to write.
        versions: names by their version in the library.
        plain: names without a version.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder) / "stubs.c", Path(folder) / "versions.map"
        names = sorted(plain.union(*versions.values()))
        source.write_text("\n".join(map(function, names)) + "\n")
        command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{file.name}", "-o", file, source]
        if versions:
            script.write_text(
                "\n".join(
                    f"{version} {{ global: {'; '.join(sorted(of))}; }};" for version, of in sorted(versions.items())
                )
            )
            command.append(f"-Wl,--version-script,{script}")
        subprocess.run(command, check=True)


def function(name: str) -> str:
    if name in SPECIAL:
        return SPECIAL[name]
    if TEXTS.search(name):
        return f'const char *{name}() {{ return "there is no CUDA here"; }}'
    return f"int {name}() {{ return {NO_DEVICE}; }}"


if __name__ == "__main__":
    main()
