"""The moving picture of the README: a run in JupyterLab, pictured again and again while it goes on.

`make picture` writes `notebooks/images/run.webp`. First a run on two ranks to its end; then one of which a rank hangs
until the cell is interrupted.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from browser.chromium import Chromium
from browser.conftest import notebook_of
from browser.notebook import Notebook
from browser.server import JupyterServer

PICTURE = Path(__file__).parents[2] / "notebooks" / "images" / "run.webp"
_WIDTH, _HEIGHT = 960, 600
_EVERY = 0.25
"""Seconds between two pictures of the page."""

_MOST_BYTES = 1_000_000
_LAST = 3000
"""Milliseconds for which the last picture of a scene is shown."""

SETUP = """\
%load_ext nb_accelerate
import time, torch
from torch.utils.data import DataLoader, TensorDataset
from nb_accelerate import Accelerator, notebook_launcher

x = torch.linspace(-1, 1, 1600).unsqueeze(1)
data = TensorDataset(x, 3 * x + 2)
notebook_launcher(torch.get_num_threads, num_processes=2)  # so that the picture does not begin with imports"""

TRAIN = """\
def train(hangs=False):
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16, shuffle=True))
    for epoch in range(3):
        for step, (x, y) in enumerate(loader):
            if hangs and step == 20 and accelerator.process_index == 1:
                time.sleep(600)
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.03)"""

GOOD = "notebook_launcher(train, num_processes=2)"
HANGING = "notebook_launcher(train, args=(True,), num_processes=2)"


def pictures(notebook: Notebook, cell: int, *, until: Callable[[], bool]) -> list[Image.Image]:
    """Return pictures of the window, with a cell in its middle, until something is so, and one of what is seen then."""
    frames = []
    while True:
        ended = until()
        notebook.scroll_to(cell)
        frames.append(_picture(notebook))
        if ended:
            return frames
        time.sleep(_EVERY)


def _picture(notebook: Notebook) -> Image.Image:
    content = notebook._chromium.wait_for(notebook._page.screenshot())
    return Image.open(io.BytesIO(content)).convert("RGB")


def record(server: JupyterServer, chromium: Chromium) -> list[tuple[Image.Image, int]]:
    """Return the frames, each with the milliseconds for which it is shown."""
    (server.notebooks / "run.ipynb").write_text(notebook_of([SETUP, TRAIN, GOOD, HANGING]), encoding="utf-8")
    notebook = Notebook(server, chromium, "run.ipynb", "lab", "light")
    notebook.resize(_WIDTH, _HEIGHT)
    notebook.hide_sidebar()
    for cell in (0, 1):
        notebook.run(cell)
        notebook.wait_until_done(90)
    notebook.run(2)
    good = pictures(notebook, 2, until=notebook.is_done)
    notebook.run(3)
    hanging = pictures(notebook, 3, until=lambda: "Rank 1 has not moved for 6 s" in notebook.output(3))
    notebook.interrupt()
    ended = pictures(notebook, 3, until=notebook.is_done)
    notebook.close()
    return [*timed(good), *timed(hanging), *timed(ended)]


def timed(frames: list[Image.Image]) -> list[tuple[Image.Image, int]]:
    """Join neighbouring frames that are equal, and show the last one longer."""
    joined: list[tuple[Image.Image, int]] = []
    for frame in frames:
        before = joined.pop() if joined and joined[-1][0].tobytes() == frame.tobytes() else (frame, 0)
        joined.append((frame, before[1] + int(_EVERY * 1000)))
    return [*joined[:-1], (joined[-1][0], _LAST)]


def main() -> None:
    """Record it, and write the file."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("jupyter", "chromium"):
            Path(folder, name).mkdir()
        with contextlib.ExitStack() as stack:
            server = JupyterServer(Path(folder, "jupyter"))
            stack.callback(server.close)
            stack.callback(server.end_kernels)
            chromium = Chromium(Path(folder, "chromium"))
            stack.callback(chromium.close)
            frames = record(server, chromium)
    (first, _), *others = frames
    first.save(
        PICTURE,
        save_all=True,
        append_images=[frame for frame, _ in others],
        duration=[milliseconds for _, milliseconds in frames],
        loop=0,
        quality=70,
        method=6,
        minimize_size=True,
    )
    size = PICTURE.stat().st_size
    print(f"{PICTURE}: {len(frames)} frames, {size / 1000:.0f} kB")
    assert size < _MOST_BYTES, f"more than {_MOST_BYTES} bytes"


if __name__ == "__main__":
    main()
