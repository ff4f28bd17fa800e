"""Compare what this notebook and the Python of another machine are: what keeps ranks from running there. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Differences(NamedTuple):
    """Differences between this notebook and another machine, each as a sentence.

    Attributes:
        obstacles: with these, what is sent cannot be read there, or ranks do not understand one another.
        warnings: with these, results may differ.
    """

    obstacles: tuple[str, ...]
    warnings: tuple[str, ...]


def compare(here: Mapping[str, str], there: Mapping[str, str], *, python: str = "python3") -> Differences:
    """Compare the software of this notebook with another machine's.

    Args:
        here: ``"python"``, ``"torch"`` and ``"package"``: their versions; "" for a torch that is not installed.
        there: the same of the machine.
        python: the command that starts Python there, for what users are told to write.
    """
    obstacles: list[str] = []
    warnings: list[str] = []
    if _release(here["python"]) != _release(there["python"]):
        wanted = _release(here["python"])
        obstacles.append(
            f"it has Python {there['python']}, and this notebook {here['python']}: functions are sent as bytecode, "
            f"which only Python {wanted} reads. Write remote_python='python{wanted}', or another one of that version"
        )
    if here["package"] != there["package"]:
        obstacles.append(
            f"it has nb_accelerate {there['package']}, and this notebook {here['package']}. Install this notebook's "
            f"version there: in a clone of its repository, {python} -m pip install ."
        )
    if not there["torch"]:
        wanted = f"torch=={_plain(here['torch'])}" if here["torch"] else "torch"
        also = "" if here["torch"] else ", nor has this notebook: the same version has to be on both"
        obstacles.append(f"it has no PyTorch{also}. Write there: {python} -m pip install {wanted}")
    elif not here["torch"]:
        obstacles.append(
            f"it has PyTorch {there['torch']}, and this notebook has none, which it needs to read values that ranks "
            f"return. Write here: %pip install torch=={_plain(there['torch'])}"
        )
    elif _plain(here["torch"]) != _plain(there["torch"]):
        is_near = _release(here["torch"]) == _release(there["torch"])
        (warnings if is_near else obstacles).append(
            f"it has PyTorch {there['torch']}, and this notebook {here['torch']}. Write there: {python} -m pip install "
            f"torch=={_plain(here['torch'])}"
        )
    return Differences(tuple(obstacles), tuple(warnings))


def _release(version: str) -> str:
    """Return ``"2.13"`` of ``"2.13.0+cpu"``."""
    return ".".join(version.split(".")[:2])


def _plain(version: str) -> str:
    """Return a version without what it was built for: machines may have different GPUs."""
    return version.partition("+")[0]
