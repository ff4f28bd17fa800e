"""What travels between processes arrives as it was, and what cannot travel is named."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nb_accelerate.errors import ShippingError
from nb_accelerate.notebook.protocol.shipping import pack, unpack


def round_trip(value: Any) -> Any:
    with pack(value) as packed:
        return unpack(packed.parcel, tuple(os.dup(fd) for fd in packed.fds))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor(3),
        torch.empty(0),
        torch.randn(5).bfloat16(),
        torch.arange(100_000),
        torch.randn(1000, requires_grad=True),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64),
        torch.arange(3.0).to_sparse(),
    ],
    ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}",
)
def test_a_tensor_arrives_as_it_was(tensor: torch.Tensor) -> None:
    arrived = round_trip(tensor)
    assert arrived.dtype == tensor.dtype
    assert arrived.requires_grad == tensor.requires_grad
    assert arrived.stride() == tensor.stride() if tensor.layout == torch.strided else True
    assert torch.equal(arrived.to_dense(), tensor.to_dense())


def test_two_views_of_one_storage_still_share_it() -> None:
    whole = torch.arange(1000.0)
    part = whole[10:20]
    arrived, arrived_part = round_trip((whole, part))
    arrived[12] = -1
    assert arrived_part[2] == -1
    assert part[2] == 12  # and not with what was sent


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_arrays_and_tensors_can_be_written_to_and_are_nobody_elses(size: int) -> None:
    array, tensor = np.zeros(size), torch.zeros(size)
    with pack((array, tensor)) as packed:
        first, second = (unpack(packed.parcel, tuple(map(os.dup, packed.fds))) for _ in range(2))
    first[0][0] = first[1][0] = 7
    assert second[0][0] == second[1][0] == array[0] == tensor[0] == 0


def test_a_module_keeps_its_tied_weights() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
    model[1].weight = model[0].weight
    arrived = round_trip(model)
    assert arrived[1].weight is arrived[0].weight
    assert isinstance(arrived[0].weight, torch.nn.Parameter)


@dataclasses.dataclass
class Holder:
    content: object


def hidden_rows() -> object:
    rows = (x for x in ())
    return lambda: rows


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, Holder(x for x in ())]}, "value['a'][1].content"),
        (hidden_rows(), "value -> variable 'rows' of the enclosing function"),
        ((Holder(hidden_rows()),), "value[0].content -> variable 'rows' of the enclosing function"),
    ],
)
def test_an_error_names_the_part_that_cannot_be_pickled(value: object, path: str) -> None:
    with pytest.raises(ShippingError, match=r"generator") as caught:
        pack(value)
    assert caught.value.path == path
    assert path in str(caught.value)


@pytest.mark.parametrize("mode", ["w", "a+", "wb", "r+b"])
def test_a_file_that_is_written_is_refused_with_its_path(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("1,2")
    with path.open(mode) as file, pytest.raises(ShippingError) as caught:
        pack({"rows": [file]}, name="args")
    assert str(caught.value).startswith("args['rows'][0] cannot be sent")
    assert f"send its path, {str(path)!r}" in str(caught.value)
    assert caught.value.is_final  # forked ranks would read from one position, all of them


def test_a_standard_stream_is_the_one_where_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.dup(1), "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert round_trip(stream) is stream


def test_text_in_memory_arrives_as_it_was() -> None:
    assert round_trip(io.StringIO("1,2")).read() == "1,2"


def test_large_things_cost_no_name_in_shared_memory_and_no_descriptor_afterwards() -> None:
    value = torch.zeros(1 << 20)
    arrived = round_trip(value)  # the leak check watches
    assert arrived.shape == value.shape


def test_code_keeps_the_name_of_its_file() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def outer():\n    def inner(): raise KeyError\n    return inner", "cell 7", "exec"), names)
    arrived = round_trip(names["outer"])
    assert arrived.__code__.co_filename == "cell 7"
    assert arrived().__code__.co_filename == "cell 7"


SCRIPT = """
import multiprocessing, sys

class Point:
    def __init__(self, x):
        self.x = x

class OwnError(ValueError):
    pass

def doubled(point):
    return Point(point.x * 2)

def fails(point):
    raise OwnError(point.x)

def launch(method, answers):
    from nb_accelerate import notebook_launcher

    options = dict(start_method=method, progress="off", timeout=40)
    values = notebook_launcher(doubled, (Point(3),), 2, **options)
    answers.put([(type(value) is Point, value.x) for value in values])
    try:
        notebook_launcher(fails, (Point(3),), 2, **options)
    except OwnError as error:
        answers.put(error.args)

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.SimpleQueue()
    process = spawn.Process(target=launch, args=(sys.argv[1], answers))
    process.start()
    process.join()
    print(answers.get(), answers.get())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["forkserver", *(pytest.param(one, marks=pytest.mark.slow) for one in ("fork", "spawn"))]
)
def test_a_process_that_multiprocessing_has_spawned_launches_what_its_script_defines(
    method: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, script, method], capture_output=True, text=True, timeout=55, check=False)
    assert ran.stdout == "[(True, 6), (True, 6)] (3,)\n", ran.stderr
