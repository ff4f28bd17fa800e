"""The flags of accelerate's ``launch`` as a page: which are the same here, which differ, which are refused.

``python tests/cli/flags_page.py`` writes it after a change of the flags.
"""

from __future__ import annotations

from pathlib import Path

from nb_accelerate.cli.flags import GROUPS, REFUSED

PAGE = Path(__file__).parents[2] / "nb_accelerate" / "cli" / "flags.md"

HEAD = """\
# Flags of `nb-accelerate launch`

Every flag of `accelerate launch` (1.15) is understood, with underscores or dashes. This page is made from the flags
themselves by `python tests/cli/flags_page.py`.
"""


def render() -> str:
    """The page."""
    flags = [flag for _, group in GROUPS for flag in group]
    lines = [HEAD]
    lines += ["## The same", ""]
    lines += [f"- `--{flag.name}`: {flag.help}" for flag in flags if not flag.differs and not flag.is_ours]
    lines += ["", "## Different", ""]
    lines += [f"- `--{flag.name}`: {flag.differs}" for flag in flags if flag.differs]
    lines += ["", "## Only here", ""]
    lines += [f"- `--{flag.name}`: {flag.help}" for flag in flags if flag.is_ours]
    lines += ["", "## Refused, with the reason", ""]
    for refused in REFUSED:
        names = ", ".join(f"`--{name}`" for name in f"{refused.switches} {refused.valued}".split())
        lines.append(f"- {refused.reason}: {names}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
