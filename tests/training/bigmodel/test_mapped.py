"""Weights as views of safetensors files."""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import mmap
import os
import pickle
import re
import struct
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.bigmodel import mapped
from nb_accelerate.training.bigmodel.mapped import WeightFiles, files_of, make_present

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which pages are in memory")


def weights(count: int = 4, size: int = 1000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layers.{number}.weight": torch.randn(size, 3, generator=generator) for number in range(count)}


def saved(folder: Path, tensors: dict[str, torch.Tensor] | None = None, name: str = "model.safetensors") -> Path:
    save_file(weights() if tensors is None else tensors, folder / name)
    return folder / name


def written(file: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


def drop(file: Path) -> None:
    """Take a file out of the page cache."""
    descriptor = os.open(file, os.O_RDWR)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def on(monkeypatch: pytest.MonkeyPatch, kind: str, folder: Path) -> None:
    """Pretend that a folder is on a file system of some kind."""
    mounted = [SimpleNamespace(mountpoint=point, fstype=at) for point, at in (("/", "ext4"), (str(folder), kind))]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: mounted)


@pytest.mark.parametrize("maps", [True, False, None])
def test_every_dtype_is_as_the_library_reads_it(tmp_path: Path, maps: bool | None) -> None:
    dtypes = [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    ]  # fmt: skip
    tensors = {str(dtype): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in dtypes}
    tensors |= {"number": torch.tensor(7), "none": torch.empty(0, 4), "odd": torch.tensor([1, 2, 3], dtype=torch.uint8)}
    file = saved(tmp_path, tensors)
    files = WeightFiles([file], mmap=maps)
    assert files.keys() == tensors.keys()
    with safe_open(file, framework="pt") as theirs:
        for name in theirs.keys():  # noqa: SIM118
            there = theirs.get_tensor(name)
            assert (files[name].dtype, files[name].shape) == (there.dtype, there.shape), name
            assert bytes_of(files[name]) == bytes_of(there), name
            assert files.nbytes([name]) == there.numel() * there.element_size()


def test_numbers_of_less_than_a_byte_are_as_the_library_reads_them(tmp_path: Path) -> None:
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no numbers of 4 bits")
    header = {
        "half": {"dtype": "F4", "shape": [2, 6], "data_offsets": [0, 6]},
        "scale": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [6, 8]},
    }
    file = written(tmp_path / "four.safetensors", header, bytes(range(8)))
    files, theirs = WeightFiles([file]), load_file(file)
    for name in header:
        assert (files[name].dtype, files[name].shape) == (theirs[name].dtype, theirs[name].shape)
        assert bytes_of(files[name]) == bytes_of(theirs[name])


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_weights_of_several_files_are_one_mapping(tmp_path: Path) -> None:
    tensors = weights()
    names = list(tensors)
    parts = [
        saved(tmp_path, {name: tensors[name] for name in part}, f"{part[0]}.safetensors")
        for part in (names[:1], names[1:])
    ]
    files = WeightFiles(parts)
    assert len(files) == 4
    assert files.entry(names[0]).file == parts[0]
    entry = files.entry(names[2])
    assert (entry.file, entry.dtype, entry.shape, entry.end - entry.start) == (
        parts[1],
        torch.float32,
        (1000, 3),
        12000,
    )
    files.fetch(names)
    assert all(torch.equal(files[name], tensors[name]) for name in names)
    assert "layers.9.weight" not in files


@pytest.mark.parametrize("maps", [True, False])
def test_a_weight_is_in_the_same_memory_each_time_and_the_file_never_changes(tmp_path: Path, maps: bool) -> None:
    file = saved(tmp_path)
    before, files = file.read_bytes(), WeightFiles([file], mmap=maps)
    name = "layers.1.weight"
    assert files[name].data_ptr() == files[name].data_ptr()
    assert files[name].untyped_storage().nbytes() == files.nbytes([name])
    files[name].fill_(3)
    assert (files[name] == 3).all()
    assert torch.equal(files["layers.2.weight"], weights()["layers.2.weight"])
    assert file.read_bytes() == before


def test_weights_at_odd_places_are_read(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
        "c": {"dtype": "F32", "shape": [], "data_offsets": [11, 15]},
    }
    data = bytes([1, 2, 3]) + struct.pack("<3f", 0.5, -1.5, 7.0)
    for spaces in range(4):  # in JSON, which moves all places
        text = json.dumps(header).encode() + b" " * spaces
        files = WeightFiles([written(tmp_path / "odd.safetensors", text, data)], mmap=True)
        assert files["a"].tolist() == [1, 2, 3]
        assert files["b"].tolist() == [0.5, -1.5]
        assert files["c"].item() == 7
        assert files["b"].data_ptr() % 4 == files["c"].data_ptr() % 4 == 0
        assert files_of(files["b"]) is files


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGE: dict[str, tuple[Any, bytes, int | None]] = {
    "no header": (b"", b"", None),
    "not JSON": (b"{'a'}", b"", None),
    "no names": ([], b"", None),
    "deep": (b"[" * 100_000, b"", None),
    "a header that is longer than the file": ({"a": ONE}, bytes(8), 5000),
    "a header that is longer than any": ({"a": ONE}, bytes(8), 1 << 60),
    "no fields": ({"a": {}}, b"", None),
    "a field that is none": ({"a": 3}, b"", None),
    "no dtype": ({"a": {**ONE, "dtype": "F6_E9"}}, bytes(8), None),
    "a dtype that is none": ({"a": {**ONE, "dtype": []}}, bytes(8), None),
    "a negative shape": ({"a": {**ONE, "shape": [-2]}}, bytes(8), None),
    "a broken shape": ({"a": {**ONE, "shape": [2.0]}}, bytes(8), None),
    "another shape": ({"a": {**ONE, "shape": [3]}}, bytes(8), None),
    "overlapping": ({"a": ONE, "b": ONE}, bytes(8), None),
    "half overlapping": ({"a": ONE, "b": {**ONE, "data_offsets": [4, 12]}}, bytes(12), None),
    "a gap": ({"a": ONE, "b": {**ONE, "data_offsets": [12, 20]}}, bytes(20), None),
    "cut off": ({"a": ONE}, bytes(7), None),
    "too long": ({"a": ONE}, bytes(9), None),
    "of another framework": ({"__metadata__": {"format": "tf"}, "a": ONE}, bytes(8), None),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_is_named(tmp_path: Path, what: str) -> None:
    header, data, length = DAMAGE[what]
    with pytest.raises(CheckpointError, match=r"broken\.safetensors"):
        WeightFiles([written(tmp_path / "broken.safetensors", header, data, length=length)])


def test_every_part_of_a_file_that_is_cut_off_is_damaged(tmp_path: Path) -> None:
    whole = saved(tmp_path, {"a": torch.arange(3.0)}).read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut.safetensors").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
            WeightFiles([tmp_path / "cut.safetensors"])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.safetensors cannot be opened"):
        WeightFiles([tmp_path / "none.safetensors"])
    with pytest.raises(CheckpointError, match="cut off or damaged"):
        WeightFiles([tmp_path])


def is_present(tensor: torch.Tensor) -> bool:
    """Whether all pages of a tensor are in memory."""
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = (ctypes.c_ubyte * ((end - begin) // mmap.PAGESIZE))()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), flags)
    return all(flag & 1 for flag in flags)


@LINUX
def test_opening_reads_no_weight_and_fetching_reads_those_that_are_asked_for(tmp_path: Path) -> None:
    file = saved(tmp_path, weights(8, 1 << 20))  # 12 MiB each, more than a system reads ahead
    drop(file)
    files = WeightFiles([file], mmap=True)
    kept = [files[name] for name in files]
    if all(map(is_present, kept)):
        pytest.skip("this file system is memory")
    assert not any(map(is_present, kept[2:]))
    files.fetch(["layers.2.weight", "layers.6.weight"])
    assert is_present(files["layers.2.weight"])
    assert is_present(files["layers.6.weight"])
    assert not is_present(files["layers.4.weight"])
    files.fetch(files)
    assert all(map(is_present, kept))
    assert all(torch.equal(tensor, value) for tensor, value in zip(kept, weights(8, 1 << 20).values(), strict=True))


CUT_OFF = """
import os, sys
from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.bigmodel import mapped
file = sys.argv[1]
files = mapped.WeightFiles([file], mmap=True)
names = list(files)
files.fetch(names[:1])
os.truncate(file, 20_000)
for look in (files.check, files.fetch):
    try:
        look(names[2:])
    except CheckpointError as error:
        print(error)
    else:
        print("nothing was said")
mapped._File.check = lambda *_: None  # as if it were cut off after it was checked
try:
    files.fetch(names)
except CheckpointError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_file_that_is_cut_off_is_an_error_and_no_signal(tmp_path: Path) -> None:
    file = saved(tmp_path, weights(4, 10_000))
    size = file.stat().st_size
    ended = subprocess.run([sys.executable, "-c", CUT_OFF, file], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, (ended.returncode, ended.stderr)
    first, second, third = ended.stdout.splitlines()
    assert first == second
    assert re.search(rf"{file} .*{size} to 20000 .*layers\.2\.weight", first)
    assert str(file) in third


def test_a_file_that_is_changed_is_an_error(tmp_path: Path) -> None:
    file = saved(tmp_path)
    files = WeightFiles([file], mmap=True)
    files.check(files)
    with file.open("r+b") as opened:
        opened.seek(-4, os.SEEK_END)
        opened.write(b"1234")
    os.utime(file, ns=(0, 0))
    with pytest.raises(CheckpointError, match=r"model\.safetensors.* and layers\.0\.weight"):
        files.check(["layers.0.weight"])
    with pytest.raises(CheckpointError, match="was changed"):
        files.fetch(["layers.3.weight"])


@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("what", ["removed", "replaced"])
def test_a_file_that_is_removed_or_replaced_is_used_as_it_was(tmp_path: Path, what: str, maps: bool) -> None:
    file = saved(tmp_path)
    files = WeightFiles([file], mmap=maps)
    if what == "removed":
        file.unlink()
    else:
        other = saved(tmp_path, {name: tensor + 1 for name, tensor in weights().items()}, "other")
        other.replace(file)
    files.fetch(files)
    assert all(torch.equal(files[name], tensor) for name, tensor in weights().items())


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "CIFS", "9p"])
def test_files_on_a_network_are_read_when_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(mapped, "_BLOCK", 1000)  # 12 for each weight
    here = tmp_path / "here"
    here.mkdir()
    link = tmp_path / "link.safetensors"  # as in a cache of downloads
    link.symlink_to(saved(here))
    on(monkeypatch, kind, here)
    files = WeightFiles([link])
    first, second, third, last = files
    assert files._files[0]._unread == {first, second, third, last}
    files.fetch([first, second])
    assert files._files[0]._unread == {third, last}
    assert torch.equal(files[third], weights()[third])
    os.truncate(here / "model.safetensors", 100)
    files.check([first, second, third])  # what is in memory stays
    assert all(torch.equal(files[name], weights()[name]) for name in (first, second, third))
    with pytest.raises(CheckpointError, match=rf"cut off .* and {last}"):
        files[last]


def test_files_on_a_network_are_mapped_if_they_do_not_fit_into_memory_or_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = saved(tmp_path)
    on(monkeypatch, "nfs", tmp_path)
    assert is_mapped(WeightFiles([file], mmap=True))
    assert not is_mapped(WeightFiles([file]))
    monkeypatch.setattr(mapped, "CPU", SimpleNamespace(memory_left=lambda ranks: 20_000))
    assert is_mapped(WeightFiles([file]))
    on(monkeypatch, "ext4", tmp_path)
    assert is_mapped(WeightFiles([file]))
    assert not is_mapped(WeightFiles([file], mmap=False))


def is_mapped(files: WeightFiles) -> bool:
    return bool(files._files[0]._mapped)


def test_threads_that_ask_for_one_weight_get_it_whole(tmp_path: Path) -> None:
    value = torch.arange(5 << 20, dtype=torch.int32)  # 20 MiB, in three blocks
    files = WeightFiles([saved(tmp_path, {"a": value})], mmap=False)
    equal: list[bool] = []
    threads = [threading.Thread(target=lambda: equal.append(torch.equal(files["a"], value))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 4


@pytest.mark.parametrize("maps", [True, False])
def test_a_tensor_knows_its_files_and_keeps_them(tmp_path: Path, maps: bool) -> None:
    file = saved(tmp_path)
    files = WeightFiles([file], mmap=maps)
    parameter = torch.nn.Parameter(files["layers.2.weight"])
    part = parameter.data[10:20].t()
    assert files_of(parameter) is files_of(part) is files
    assert files.name_of(parameter) == files.name_of(part) == "layers.2.weight"
    for other in (parameter.detach().clone(), torch.empty(0), torch.empty(3, device="meta"), torch.eye(2).to_sparse()):
        assert files_of(other) is None
    alive = weakref.ref(files)
    del files, part
    gc.collect()
    kept = files_of(parameter)
    assert kept is alive()
    assert kept is not None
    kept.fetch(["layers.2.weight"])
    assert torch.equal(parameter, weights()["layers.2.weight"])
    del kept, parameter
    gc.collect()
    assert alive() is None
    if sys.platform == "linux":
        assert str(file) not in Path("/proc/self/maps").read_text()
        assert str(file) not in {os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}


def test_files_are_opened_again_by_a_copy_and_by_another_process(tmp_path: Path) -> None:
    files = WeightFiles([saved(tmp_path)], mmap=True)
    files["layers.0.weight"].zero_()
    for again in (copy.deepcopy(files), pickle.loads(pickle.dumps(files))):
        assert again is not files
        assert all(torch.equal(again[name], tensor) for name, tensor in weights().items())


@LINUX
def test_a_file_may_be_larger_than_the_memory(tmp_path: Path) -> None:
    numbers = (psutil.virtual_memory().total + psutil.swap_memory().total + (1 << 30)) // 4
    header = json.dumps({"a": {"dtype": "F32", "shape": [numbers], "data_offsets": [0, 4 * numbers]}}).encode()
    file = written(tmp_path / "large.safetensors", header + b" " * (-len(header) % 8))
    os.truncate(file, file.stat().st_size + 4 * numbers)  # nothing of it is on the disk
    assert WeightFiles([file], mmap=True)["a"][-1] == 0


@LINUX
def test_pages_that_no_file_has_any_more_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(4 * mmap.PAGESIZE))
    with file.open("rb") as opened:
        memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    pages = torch.frombuffer(memory, dtype=torch.uint8)
    make_present(pages.data_ptr(), pages.data_ptr() + 4 * mmap.PAGESIZE)
    assert is_present(pages)
    os.truncate(file, 0)
    with pytest.raises(OSError, match="Bad address"):
        make_present(pages.data_ptr(), pages.data_ptr() + 4 * mmap.PAGESIZE)
