"""What the notebook is set to, ranks are set to: in launches, and in cells before and after ranks have started."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest
from fixtures.kernels import Kernel

ROWS = {
    "torch.set_default_dtype(torch.float64)": "str(torch.get_default_dtype())",
    "torch.backends.cudnn.deterministic = True": "torch.backends.cudnn.deterministic",
    "torch.set_float32_matmul_precision('high')": "torch.get_float32_matmul_precision()",
    "torch.use_deterministic_algorithms(True, warn_only=True)": "torch.get_deterministic_debug_mode()",
    "torch.set_grad_enabled(False)": "torch.is_grad_enabled()",
    "torch.set_printoptions(precision=2)": "str(torch.tensor([1 / 3]))",
    "torch.backends.cuda.enable_flash_sdp(False)": "torch.backends.cuda.flash_sdp_enabled()",
    "np.seterr(all='raise')": "np.geterr()['divide']",
    "logging.basicConfig(level=15, format='MINE %(message)s', force=True)": (
        "logging.root.level, [handler.formatter._fmt for handler in logging.root.handlers]"
    ),
    "logging.getLogger('mine').setLevel(10)": "logging.getLogger('mine').level",
    "warnings.filterwarnings('ignore', 'mine')": "any(f[1] and f[1].pattern == 'mine' for f in warnings.filters)",
    "os.umask(0o077)": "(lambda mask: (os.umask(mask), mask)[1])(os.umask(0))",
    "os.environ['MINE'] = '1'; os.environ.pop('GONE', None)": "os.environ.get('MINE'), os.environ.get('GONE')",
    "os.chdir('folder')": "os.path.basename(os.getcwd())",
    "sys.argv = ['mine', '--lr']": "sys.argv",
    "sys.setrecursionlimit(4321)": "sys.getrecursionlimit()",
    "torch.load = functools.partial(torch.load, weights_only=False)": "type(torch.load).__name__",
    "F.cross_entropy = lambda *args: (original, 'mine')[1]": "F.cross_entropy.__name__",
    "np.float = float": "hasattr(np, 'float')",
    "torch.serialization.add_safe_globals([os.DirEntry])": "os.DirEntry in torch.serialization.get_safe_globals()",
    "own.LR = 3": "own.LR",
    "own.TAGS.append('x')": "own.TAGS",
    "own.Args.epochs = 5": "own.Args.epochs",
    "own.register(type('Net', (), {'__module__': '__main__'}))": "list(own.REGISTRY)",
    "own.loss = lambda: 'mine'": "own.loss()",
}
IMPORTS = """
import functools, logging, os, sys, warnings
import numpy as np, torch, torch.nn.functional as F
import own
"""
OWN = """
import os
RANK = os.environ.get("RANK")
LR = 1
RATE = 0.1
TAGS = []
REGISTRY = {}
class Args:
    epochs = 1
def register(cls):
    REGISTRY[cls.__name__] = cls
def loss():
    return "file"
"""


def values(notebook: Kernel, code: str) -> list[object]:
    """Return what an expression of the notebook is, as text."""
    found: list[object] = ast.literal_eval(notebook.run(code).ok().value)
    return found


@pytest.mark.slow
def test_ranks_are_set_to_what_the_notebook_is(kernel: Kernel, tmp_path: Path):
    read = f"[{', '.join(f'({query})' for query in ROWS.values())}, own.RANK]"
    tmp_path.joinpath("folder").mkdir()
    tmp_path.joinpath("own.py").write_text(OWN)
    kernel.run(f"import os, sys\nos.chdir({str(tmp_path)!r})\nsys.path.append({str(tmp_path)!r})").ok()
    kernel.run(f"import os\nos.environ['GONE'] = '1'\n%load_ext nb_accelerate\n{IMPORTS}").ok()
    kernel.run(f"def read():\n{textwrap.indent(IMPORTS, '    ')}\n    return {read}").ok()
    kernel.run("original = F.cross_entropy").ok()
    cell = f"%%distributed --out found\n{IMPORTS}\n{read}"
    kernel.run(cell).ok()
    before = values(kernel, "found[1]")

    for setting in ROWS:
        kernel.run(f"{setting};").ok()
    *here, _ = values(kernel, "read()")
    unset = [name for name, was, now in zip(ROWS, before, here, strict=False) if was == now]
    assert unset == []
    wanted = [*here, "1"]

    def differing(found: list[object]) -> dict[str, object]:
        names = [*ROWS, "own.RANK"]
        return {name: value for name, value, right in zip(names, found, wanted, strict=True) if value != right}

    kernel.run(cell).ok()
    assert differing(values(kernel, "found[1]")) == {}
    kernel.run("%distributed restart").ok()
    kernel.run(cell).ok()
    assert differing(values(kernel, "found[1]")) == {}
    for method in ("forkserver", "spawn", "fork"):
        kernel.run("from nb_accelerate import notebook_launcher").ok()
        kernel.run(f"found = notebook_launcher(read, num_processes=2, start_method={method!r})").ok()
        expected = {"own.RANK": None} if method == "fork" else {}
        assert differing(values(kernel, "found[1]")) == expected

    # What ranks have set themselves stays until the notebook sets that again.
    kernel.run("%%distributed\nown.LR = 7; torch.set_default_dtype(torch.float16)").ok()
    kernel.run("own.RATE = 0.5").ok()
    kernel.run("%%distributed --out found\n[own.LR, own.RATE, str(torch.get_default_dtype())]").ok()
    assert values(kernel, "found[1]") == [7, 0.5, "torch.float16"]
    kernel.run("%distributed stop").ok()


@pytest.mark.slow
def test_ranks_read_variables_at_import_and_reload_modules_as_the_notebook_has(kernel: Kernel, tmp_path: Path):
    module = tmp_path / "edited.py"
    module.write_text("LR = 1\ndef version():\n    return 'first'\n")
    kernel.run(f"import importlib, os, sys\nsys.path.insert(0, {str(tmp_path)!r})\n%load_ext nb_accelerate").ok()
    kernel.run("os.environ['TORCH_COMPILE_DISABLE'] = '1'\nimport torch, edited\nedited.LR = 2").ok()
    kernel.run(
        "def read():\n"
        "    import torch._dynamo.config\n"
        "    return torch._dynamo.config.disable, edited.version(), edited.LR\n"
        "from nb_accelerate import notebook_launcher\n"
        "launched = lambda: notebook_launcher(read, num_processes=2, progress='off')[1]"
    ).ok()
    cell = "%%distributed --out found\nread()"
    kernel.run(cell).ok()
    assert values(kernel, "[found[1], launched()]") == [(True, "first", 2)] * 2
    module.write_text("LR = 30\ndef version():\n    return 'second'\n")
    kernel.run("importlib.reload(edited)").ok()
    kernel.run(cell).ok()
    assert values(kernel, "[found[1], launched()]") == [(True, "second", 30)] * 2

    told = kernel.run("import codecs\ncodecs.register(lambda name: None)\nlaunched()").ok().stderr
    assert "codecs.register of this notebook" in told
    assert "codecs" not in kernel.run("launched()").ok().stderr
    kernel.run("%distributed stop").ok()


CHANGES = {
    "a cell": "os.environ['MINE'] = '{value}'",
    "a widget's callback": "",
    "a loop around cells": "for word in ('1', '{value}'):\n    os.environ['MINE'] = word\n"
    "    get_ipython().run_cell('%%distributed --out found\\nos.environ.get(\"MINE\")')",
    "a cell magic in a loop": "for word in ('1', '{value}'):\n    os.environ['MINE'] = word\n"
    "    get_ipython().run_cell_magic('distributed', '--out found', 'os.environ.get(\"MINE\")')",
}


@pytest.mark.slow
def test_what_has_run_in_the_notebook_is_followed_and_nothing_is_read_between_cells_of_ranks(shared_kernel: Kernel):
    notebook = shared_kernel
    notebook.run("%load_ext nb_accelerate\n%distributed start -n 1").ok()
    slider = notebook.run("import comm, os\nslider = comm.create_comm('none')\nslider.comm_id").ok().value.strip("'")
    notebook.run("slider.on_msg(lambda message: os.environ.update(MINE=message['content']['data']))").ok()
    notebook.run("%%distributed --out found\nimport os").ok()
    for number, (name, change) in enumerate(CHANGES.items()):
        value = f"value {number}"
        if change:
            notebook.run(change.format(value=value)).ok()
        else:
            client = notebook.client
            moved = client.session.msg("comm_msg", {"comm_id": slider, "data": value})
            client.shell_channel.send(moved)
            notebook.finish(moved["header"]["msg_id"])
        notebook.run("%%distributed --out found\nos.environ.get('MINE')").ok()
        assert notebook.run("found").ok().value == f"['{value}']", name

    notebook.run(
        "from nb_accelerate.notebook.pool.pool import Pool\nread = []\nfollow = Pool.follow_settings\n"
        "Pool.follow_settings = lambda pool: (read.append(1), follow(pool))"
    ).ok()
    for _ in range(3):
        notebook.run("%%distributed\npass").ok()
    assert notebook.run("Pool.follow_settings = follow\nlen(read)").ok().value == "1"
    notebook.run("%distributed stop\n%unload_ext nb_accelerate").ok()
