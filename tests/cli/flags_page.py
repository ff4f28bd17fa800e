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


DIFFERENT = {
    "multi_gpu": "one GPU is enough",
    "num_cpu_threads_per_process": "without it the cores are shared out, where accelerate sets one thread",
    "gradient_accumulation_steps": "it counts with every setup, not with DeepSpeed alone",
    "rdzv_backend": "etcd is refused",
    "same_network": "it has no effect",
    "use_fsdp": "with --cpu too, where accelerate trains without FSDP",
    "fsdp_version": "2 by default, not 1",
    "use_parallelism_config": "without --use_fsdp too: sizes above 1 ask for what they need",
    "use_deepspeed": "with --cpu too; on several machines this command is started on each",
    "main_training_function": "it has no effect: every process runs the whole script",
    "monitor_interval": "failures are events here and need no interval",
    "debug": "errors show the stacks of all processes without it",
    "quiet": "it also hides the progress of the processes",
}
"""How a flag differs from accelerate's of the same name."""

OURS = ("timeout", "rehearse", "rehearse_device", "rehearse_memory")


def render() -> str:
    """The page."""
    flags = [flag for group in GROUPS for flag in group.flags]
    lines = [HEAD]
    lines += ["## The same", ""]
    lines += [f"- `--{flag.name}`: {flag.help}" for flag in flags if flag.name not in {*DIFFERENT, *OURS}]
    lines += ["", "## Different", ""]
    lines += [f"- `--{flag.name}`: {DIFFERENT[flag.name]}" for flag in flags if flag.name in DIFFERENT]
    lines += ["", "## Only here", ""]
    lines += [f"- `--{flag.name}`: {flag.help}" for flag in flags if flag.name in OURS]
    lines += ["", "## Refused, with the reason", ""]
    for patterns, reason in REFUSED.items():
        names = ", ".join(f"`--{pattern}`" for pattern in patterns.split() if len(pattern) > 1)
        lines.append(f"- {reason}: {names}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
