"""Two users on one machine: what one of them plants, opens, sends and signals is nothing to the other one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures.users import User

import nb_accelerate
from nb_accelerate import notebook_launcher

pytestmark = [pytest.mark.slow, pytest.mark.limit(300)]

_TESTS = Path(__file__).parents[1]
_ROOT = Path(nb_accelerate.__file__).parents[1]

PLANTED = """
import os
try:
    file = open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "ran"), "a")
    print(__name__, os.getuid(), file=file)
except OSError:
    pass
raise ImportError("planted")
"""

NAMES = ("cloudpickle", "torch", "sitecustomize", "usercustomize", "nb_accelerate", "numpy", "psutil", "json", "socket")

TRAIN = """
def train(folder, names):
    import hashlib, os, torch
    from nb_accelerate import Accelerator
    from nb_accelerate.errors import CheckpointError
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 8, num_workers=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for a, b in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.mse_loss(model(a), b))
            optimizer.step()
    refused = []
    for name in sorted(names):
        try:
            accelerator.save_state(f"{folder}/{name}")
        except CheckpointError as error:
            refused.append(name)
        else:
            accelerator.load_state(f"{folder}/{name}")
    group = torch.distributed.new_group([0, 1])
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.distributed.all_reduce(weights, group=group)
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest(), refused
"""

VICTIM = """
import hashlib, json, os, sys, time
from pathlib import Path

shared, root, methods = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
names = {"linked", "foreign", "own"}
sys.path[:0] = [root, f"{root}/tests"]
home = os.getcwd()
os.chdir(shared)
from nb_accelerate import notebook_launcher
from fixtures.kernels import WAIT_FOR_SERVER
import torch._dynamo  # ranks that are forked have it from here

exec(WAIT_FOR_SERVER)
exec(TRAIN)
found = {"values": {}, "refused": {}, "seconds": {}}
for method in methods:
    began = time.monotonic()
    values = notebook_launcher(train, (f"{shared}", names), 2, start_method=method, progress="off", timeout=100)
    found["seconds"][method] = time.monotonic() - began
    found["values"][method] = [value for value, _ in values]
    found["refused"][method] = values[0][1]

from fixtures.kernels import Kernel
os.chdir(home)  # a kernel itself is started with python -m, which begins with the folder it is in
kernel = Kernel()
kernel.wait_for_server()
kernel.run(f"import os, sys\\nsys.path.insert(0, {root!r})\\n%load_ext nb_accelerate\\nos.chdir({str(shared)!r})").ok()
began = time.monotonic()
kernel.run("%distributed start -n 2").ok()
cell = kernel.run("%%distributed\\n" + TRAIN + f"print(train({str(shared)!r}, {names!r})[0])").ok()
found["values"]["pool"] = cell.stdout.split()[-1:] * 2
long = kernel.run("%%distributed\\nfor i in range(6000): print(f'secret {i}')").ok()
found["log"] = [word.rstrip(".") for one in long.displays for word in one["text/plain"].split() if ".log" in word][:1]
kernel.run("%distributed stop").ok()
found["seconds"]["pool"] = time.monotonic() - began
kernel.close()
from nb_accelerate.notebook.launch.servers import close_warm_server
close_warm_server()
print(json.dumps(found))
"""

STRANGER = """
import json, os, shutil, signal, socket, struct, sys, threading, time
import encodings.idna
from pathlib import Path

victim, name, home = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
temporary, shared = Path(sys.argv[4]), Path(sys.argv[5])
sources = json.loads(sys.argv[6])
got = set()  # what succeeded, and should not have
done = {"connections": 0, "signals": 0, "opened": 0, "moved": 0}
os.umask(0)

def plant(path, kind):
    try:
        if kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(home / "private")
        else:
            path.write_text("planted")
    except OSError:
        pass

PLANTS = [
    (temporary / "nb-ranks-planted0", "folder"), (temporary / "nb-ranks-planted0" / "0", "link"),
    (temporary / "nb-ranks-planted0" / ".nb_accelerate-ranks", "file"), (temporary / "nb-ranks-planted1", "link"),
    (temporary / "pymp-planted0", "link"), (temporary / f"torchinductor_{name}", "folder"),
    (shared / "linked", "link"), (shared / "foreign", "folder"), (shared / "foreign" / "model.safetensors", "link"),
    (shared / ".own.nb_accelerate-0123456789abcdef", "folder"),
    (shared / ".own.nb_accelerate-0123456789abcdef" / "0", "link"), (shared / ".nb_accelerate-state-1", "link"),
]
for path, kind in PLANTS:
    plant(path, kind)
for folder in (temporary, shared):
    for module, source in sources.items():
        (folder / f"{module}.py").write_text(source)
    (folder / "nb_accelerate").mkdir()
    (folder / "nb_accelerate" / "__init__.py").write_text(sources["torch"])
print("ready", flush=True)

def owned(folder):
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        try:
            if entry.stat(follow_symlinks=False).st_uid == victim:
                yield entry
        except OSError:
            pass

def attempt(what, act):
    try:
        act()
    except OSError:
        return
    got.add(what)

def files():
    for folder in (temporary, Path("/dev/shm")):
        for entry in owned(folder):
            done["opened"] += 1
            attempt(f"read {entry.path}", lambda: os.listdir(entry.path) if entry.is_dir() else open(entry.path))
    for folder in (temporary, shared, Path("/dev/shm")):
        for entry in owned(folder):
            done["moved"] += 1
            attempt(f"moved {entry.path}", lambda: os.rename(entry.path, f"{entry.path}-moved"))
            attempt(f"removed {entry.path}", lambda: os.unlink(entry.path))
            attempt(f"wrote {entry.path}", lambda: os.open(entry.path, os.O_WRONLY))
            for name in ("model.safetensors", "checkpoint.json", "optimizer.bin"):
                attempt(f"wrote {entry.path}/{name}", lambda: os.open(f"{entry.path}/{name}", os.O_WRONLY))
    for path, kind in PLANTS:
        if not os.path.lexists(path):
            plant(path, kind)
    # Comes and goes while somebody looks through the folder.
    for number in range(20):
        path = shared / f".own.nb_accelerate-{number:016x}"
        path.mkdir()
        path.rmdir()

def processes():
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid != victim:
                    continue
            except OSError:
                continue
            done["signals"] += 1
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGCONT):
                attempt(f"signal {signum}", lambda: os.kill(int(entry.name), signum))
            for part in ("mem", "environ", "fd/0", "fd/3"):
                attempt(f"opened /proc/*/{part}", lambda: open(f"{entry.path}/{part}", "rb"))

kept, tried = [], {}
KEY = struct.pack("<I", 0x3C85F7CE) + b"\\x00" + struct.pack("<Q", 1) + b"k" + struct.pack("<Q", 1) + b"v"
SENT = [struct.pack("<q", number) for number in range(8)] + [b"", KEY, os.urandom(64), b"GET / HTTP/1.0\\r\\n\\r\\n"]

def ports():
    for table, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        for line in open(table).readlines()[1:]:
            words = line.split()
            if words[3] != "0A" or int(words[7]) != victim or tried.get(words[9], 0) > 1:
                continue
            tried[words[9]] = tried.get(words[9], 0) + 1
            for number, text in enumerate(SENT):
                try:
                    one = socket.socket(family)
                    one.settimeout(0.2)
                    one.connect(("127.0.0.1" if family == socket.AF_INET else "::1", int(words[1][-4:], 16)))
                    one.sendall(text)
                    one.setblocking(False)
                    done["connections"] += 1
                    if len(tried) % 3:
                        kept.append(one)
                    else:
                        one.close()
                except OSError:
                    pass
    for one in kept[:-400]:
        one.close()
        kept.remove(one)
    for line in open("/proc/net/unix").readlines()[1:]:
        words = line.split()
        if len(words) == 8 and words[5] == "01" and words[7].startswith(("@", str(temporary))):
            with socket.socket(socket.AF_UNIX) as one:
                one.settimeout(0.2)
                try:
                    one.connect(words[7].replace("@", "\\0", 1))
                    _, uid, _ = struct.unpack("3i", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                    if uid == victim:
                        got.add(f"connected to {words[7]}")
                except OSError:
                    pass

over = threading.Event()
def again(act, pause):
    while not over.wait(pause):
        act()
threads = [threading.Thread(target=again, args=one) for one in ((files, 0.03), (processes, 0.5), (ports, 0.02))]
for thread in threads:
    thread.start()
sys.stdin.read()
over.set()
for thread in threads:
    thread.join()
print(json.dumps({"got": sorted(got), "done": done, "alive": len(threads)}))
"""


def start(user: User, code: str, arguments: list[str], folder: Path, temporary: Path) -> subprocess.Popen[str]:
    mount_point = folder / f"mount-{len(list(folder.iterdir()))}"
    mount_point.mkdir()
    program = user.home / "program.py"
    program.write_text(code)
    return subprocess.Popen(
        user.command([sys.executable, str(program), *arguments], mount_point),
        env=user.environ(temporary),
        cwd=user.home,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # within one, anybody may send SIGCONT
    )


def sticky(path: Path) -> Path:
    path.mkdir()
    path.chmod(0o1777)
    return path


def work(user: User, folder: Path, shared: Path, temporary: Path, *methods: str) -> dict[str, Any]:
    with start(user, f"TRAIN = {TRAIN!r}\n{VICTIM}", [str(shared), str(_ROOT), *methods], folder, temporary) as process:
        out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def test_a_stranger_changes_reads_runs_and_removes_nothing(public_folder: Path, two_users: tuple[User, User]) -> None:
    user, stranger = two_users
    names: dict[str, Any] = {"__name__": "__main__"}  # so that it travels with its code
    exec(TRAIN, names)
    of_ranks = notebook_launcher(
        names["train"], (str(public_folder), {"alone"}), 2, start_method="forkserver", progress="off"
    )
    expected = [value for value, _ in of_ranks]

    shared, temporary = sticky(public_folder / "shared"), sticky(public_folder / "temporary")
    private = user.home / "private"
    private.mkdir()
    (private / "model.safetensors").write_text("precious")
    (private / "notes.txt").write_text("precious")
    for path in (private, *private.iterdir()):
        os.chown(path, user.uid, user.gid)
    before = {path: path.read_text() for path in private.iterdir()}
    sources = json.dumps(dict.fromkeys(NAMES, PLANTED))
    arguments = [str(user.uid), user.name, str(user.home), str(temporary), str(shared), sources]
    with start(stranger, STRANGER, arguments, public_folder, temporary) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n", other.communicate()
        mine = work(user, public_folder, shared, temporary, "forkserver", "fork", "spawn")
        out, err = other.communicate(timeout=30)
    assert other.returncode == 0, err
    assert err == ""
    report = json.loads(out)
    print(mine, report)

    assert mine["values"] == dict.fromkeys(("forkserver", "fork", "spawn", "pool"), expected)
    assert mine["refused"] == {method: ["foreign", "linked"] for method in ("forkserver", "fork", "spawn")}
    assert max(mine["seconds"].values()) < 60
    assert report["got"] == []
    assert min(report["done"].values()) > 50
    for folder in (shared, temporary, user.home):
        assert not (folder / "ran").exists()
    assert {path: path.read_text() for path in private.iterdir()} == before
    # The log is the user's alone, where everything else has been tidied up.
    (log,) = map(Path, mine["log"])
    assert "secret 0\n" in log.read_text()
    assert "secret 5999\n" in log.read_text()
    assert (log.stat().st_mode & 0o777, log.stat().st_uid) == (0o600, user.uid)
    theirs = [path for path in temporary.iterdir() if path.lstat().st_uid == user.uid]
    assert theirs == [log]
    assert {path.name for path in shared.iterdir() if path.lstat().st_uid == user.uid} == {"own"}
    assert user.processes() == []
