"""Notebooks as people write them, who have never seen this package: their first cells, retyped small.

Each is run by plain Python, launched with ranks that are sent the function and with forks, and run in a cell. A row is
what stands above the training; its ``train`` returns what has to be the same everywhere.
"""

from __future__ import annotations

import pytest
from fixtures.kernels import Kernel

SEED = """
import os, random, numpy as np, torch, torch.nn as nn, torch.nn.functional as F
def seed_everything(seed=42):
    random.seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
seed_everything()
"""

NOTEBOOKS = {
    "competition: CFG, logger and seeds": """
import logging, warnings, gc, math, time
warnings.filterwarnings("ignore")
class CFG:
    debug, seed, epochs, lr, model = False, 42, 2, 1e-2, "net"
    folds = [0, 1]
def get_logger(filename="train"):
    logger = logging.getLogger(filename)
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
    return logger
LOGGER = get_logger()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
def train():
    seed_everything(CFG.seed)
    net = nn.Linear(2, 1).to(device)
    LOGGER.debug("weights")
    return [round(v, 4) for v in net.weight.flatten().tolist()], LOGGER.level, len(LOGGER.handlers), CFG.folds
""",
    "competition: AverageMeter and timeSince": """
import time, math
class AverageMeter(object):
    def __init__(self): self.reset()
    def reset(self): self.val = self.avg = self.sum = self.count = 0
    def update(self, val, n=1):
        self.val = val; self.sum += val * n; self.count += n; self.avg = self.sum / self.count
def asMinutes(s):
    m = math.floor(s / 60)
    return "%dm %ds" % (m, s - m * 60)
def timeSince(since, percent):
    s = 90
    return "%s (remain %s)" % (asMinutes(s), asMinutes(s / percent - s))
losses = AverageMeter()
def train():
    meter = AverageMeter()
    for i in range(4): meter.update(i, 2)
    losses.update(1.0)
    return meter.avg, losses.count, timeSince(time.time(), 0.5)
""",
    "get_device with mps": """
def get_device():
    if torch.cuda.is_available(): return torch.device("cuda")
    if torch.backends.mps.is_available() and torch.backends.mps.is_built(): return torch.device("mps")
    return torch.device("cpu")
DEVICE = get_device()
def train(): return str(get_device()), str(DEVICE)
""",
    "dataset with classes and transforms": """
class Compose:
    def __init__(self, transforms): self.transforms = transforms
    def __call__(self, x):
        for t in self.transforms: x = t(x)
        return x
class Images(torch.utils.data.Dataset):
    def __init__(self, transform=None):
        self.classes = ["cat", "dog"]; self.class_to_idx = {c: i for i, c in enumerate(self.classes)}
        self.transform = transform
    def __len__(self): return 6
    def __getitem__(self, i):
        x = torch.full((2,), float(i))
        return (self.transform(x) if self.transform else x), i % 2
train_data = Images(Compose([lambda x: x / 2, lambda x: x + 1]))
train_dataloader = torch.utils.data.DataLoader(train_data, batch_size=4)
class_names = train_data.classes
def train(): return [x.sum().item() for x, _ in train_dataloader], len(train_data.classes), class_names
""",
    "nanoGPT: globals as configuration": """
batch_size, block_size, learning_rate = 4, 8, 3e-4
config_keys = [k for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, bool, str))]
exec("learning_rate = 1e-3")
from contextlib import nullcontext
from dataclasses import dataclass
@dataclass
class GPTConfig:
    n_layer: int = 2
    n_embd: int = 8
    bias: bool = True
ctx = nullcontext()
text = "hello world"
chars = sorted(set(text)); stoi = {c: i for i, c in enumerate(chars)}; itos = {i: c for c, i in stoi.items()}
encode = lambda s: [stoi[c] for c in s]
decode = lambda l: "".join(itos[i] for i in l)
data = torch.tensor(encode(text))
@torch.no_grad()
def estimate():
    with ctx: return data.float().mean().item()
def train(): return decode(encode("hello")), learning_rate, GPTConfig(n_layer=3), round(estimate(), 3)
""",
    "argparse in a notebook": """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--name", default="run")
args = parser.parse_args([])
args.extra = [1, 2]
opt = vars(args)
def train(): return args.lr, opt["name"], args.extra
""",
    "EasyDict and namedtuple": """
from collections import namedtuple, OrderedDict, defaultdict, Counter
class EasyDict(dict):
    def __getattr__(self, k): return self[k]
    def __setattr__(self, k, v): self[k] = v
cfg = EasyDict(lr=0.1, net=EasyDict(width=3))
Transition = namedtuple("Transition", ("state", "reward"))
history = defaultdict(list)
history["loss"].append(1.5)
def train():
    t = Transition(1, 2)
    return cfg.lr, cfg.net.width, t._asdict(), dict(history), Counter("aab").most_common(1)
""",
    "d2l: Accumulator and add_to_class": """
def add_to_class(Class):
    def wrapper(obj): setattr(Class, obj.__name__, obj)
    return wrapper
class A:
    def __init__(self): self.b = 1
@add_to_class(A)
def do(self): return self.b + 1
class Accumulator:
    def __init__(self, n): self.data = [0.0] * n
    def add(self, *args): self.data = [a + float(b) for a, b in zip(self.data, args)]
    def __getitem__(self, i): return self.data[i]
def train():
    m = Accumulator(2); m.add(1, 2)
    return A().do(), m[1]
""",
    "timm: a registry filled by a decorator": """
_models = {}
def register_model(fn):
    _models[fn.__name__] = fn
    return fn
@register_model
def small(**kw): return nn.Linear(2, kw.get("n", 1))
@register_model
def large(**kw): return nn.Linear(4, kw.get("n", 1))
def create_model(name, **kw): return _models[name](**kw)
def train(): return sorted(_models), sum(p.numel() for p in create_model("large", n=2).parameters())
""",
    "EMA, early stopping and deepcopy": """
import copy
class EMA:
    def __init__(self, model, decay=0.9):
        self.decay, self.shadow = decay, copy.deepcopy(model)
    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow.parameters(), model.parameters()): s.mul_(self.decay).add_(p, alpha=1 - self.decay)
class EarlyStopping:
    def __init__(self, patience=2): self.patience, self.best, self.counter = patience, None, 0
    def __call__(self, score):
        if self.best is None or score > self.best: self.best, self.counter = score, 0
        else: self.counter += 1
        return self.counter >= self.patience
model = nn.Linear(1, 1); nn.init.ones_(model.weight); ema = EMA(model); stopper = EarlyStopping()
def train():
    nn.init.zeros_(model.weight); ema.update(model)
    return round(ema.shadow.weight.item(), 3), [stopper(s) for s in (1, 0, 0)]
""",
    "collate functions and partial": """
from functools import partial
def collate(batch, pad): return torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=pad)
rows = [torch.arange(n) for n in (1, 2, 3)]
loader = torch.utils.data.DataLoader(rows, batch_size=3, collate_fn=partial(collate, pad=-1))
def train(): return next(iter(loader)).tolist()
""",
    "timers and decorators": """
import time, functools
from contextlib import contextmanager
@contextmanager
def timer(name):
    t0 = time.time(); yield; times[name] = time.time() - t0
times = {}
def timeit(f):
    @functools.wraps(f)
    def inner(*a, **k):
        with timer(f.__name__): return f(*a, **k)
    return inner
@timeit
def work(n): return sum(range(n))
def train(): return work(10), list(times), work.__name__
""",
    "enum and typing": """
import enum
from typing import Optional, List, Dict, Union, TypeVar, NewType, Callable
T = TypeVar("T"); UserId = NewType("UserId", int)
class Split(str, enum.Enum):
    TRAIN, TEST = "train", "test"
class Mode(enum.IntFlag):
    A = 1; B = 2
def pick(x: Optional[List[T]], default: Union[int, None] = None) -> Dict[str, T]: return {"x": x or default}
def train(): return Split("train").value, int(Mode.A | Mode.B), pick([1]), UserId(3)
""",
    "a cached tokenizer": """
import functools, re
class Tokenizer:
    def __init__(self): self.vocab = {"a": 0, "b": 1}
    @functools.lru_cache(maxsize=100)
    def tokens(self, word): return tuple(self.vocab.get(c, -1) for c in word)
    @functools.cached_property
    def size(self): return len(self.vocab)
tokenizer, pattern = Tokenizer(), re.compile(r"\\w+")
def train(): return [tokenizer.tokens(w) for w in pattern.findall("ab ba c")], tokenizer.size
""",
    "a replay buffer with a lock": """
import threading, collections, random
class ReplayBuffer:
    def __init__(self, n): self.memory, self.lock = collections.deque([], maxlen=n), threading.Lock()
    def push(self, *x):
        with self.lock: self.memory.append(x)
    def sample(self, k): return random.Random(0).sample(self.memory, k)
memory = ReplayBuffer(3)
for i in range(5): memory.push(i, i * i)
def train():
    memory.push(9, 9)
    return len(memory.memory), memory.sample(1)
""",
    "AMP, scaler and a scheduler": """
scaler = torch.amp.GradScaler("cuda", enabled=torch.cuda.is_available())
net = nn.Linear(1, 1); nn.init.ones_(net.weight); nn.init.zeros_(net.bias)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: 0.5 ** e)
criterion = nn.MSELoss()
def train():
    for _ in range(2):
        with torch.autocast("cpu", enabled=False): loss = criterion(net(torch.ones(1, 1)), torch.zeros(1, 1))
        optimizer.zero_grad(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(); scheduler.step()
    return round(net.weight.item(), 4), optimizer.param_groups[0]["lr"], scaler.is_enabled()
""",
    "a patched torch.load": """
import io
_load = torch.load
def load_unsafe(*a, **k):
    k.setdefault("weights_only", False)
    return _load(*a, **k)
buffer = io.BytesIO(); torch.save({"x": {1, 2}}, buffer)
def train():
    buffer.seek(0)
    return sorted(load_unsafe(buffer)["x"])
""",
    "folds by hand and pandas": """
import pandas as pd
pd.set_option("display.max_columns", 50)
df = pd.DataFrame({"id": range(6), "label": list("ababab")})
df["fold"] = -1
for n in range(3): df.loc[df.index % 3 == n, "fold"] = n
def train():
    return [(len(df[df.fold != f]), df[df.fold == f].label.tolist()) for f in range(2)]
""",
    "memory cleaner by ctypes": """
import ctypes, gc
libc = ctypes.CDLL("libc.so.6")
def clean_memory():
    gc.collect(); libc.malloc_trim(0)
    if torch.cuda.is_available(): torch.cuda.empty_cache()
def train():
    clean_memory()
    return "clean"
""",
    "tqdm around everything": """
from tqdm.auto import tqdm, trange
progress_bar = tqdm(range(3), disable=True)
def train():
    total = 0
    for i in tqdm(range(3), desc="epoch", leave=False): total += i
    progress_bar.update(1)
    return total
""",
    "pathlib and glob": """
from pathlib import Path
ROOT = Path.cwd(); DATA = ROOT / "data"
FILES = sorted(ROOT.glob("*.no_such_kind"))
def train(): return DATA.relative_to(ROOT).as_posix(), FILES, Path.cwd() == ROOT, DATA.with_suffix(".csv").name
""",
    "a Lightning-like module": """
class LightningModule(nn.Module):
    def save_hyperparameters(self, **hp): self.hparams = type("HP", (dict,), {"__getattr__": dict.__getitem__})(hp)
class Lit(LightningModule):
    def __init__(self, lr=0.1):
        super().__init__(); self.save_hyperparameters(lr=lr); self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)
    def training_step(self, batch): return self.layer(batch).sum()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
def train():
    lit = Lit(0.5); opt = lit.configure_optimizers()
    lit.training_step(torch.ones(2, 1)).backward(); opt.step()
    return lit.layer.weight.item()
""",
    "a learner with callbacks": """
class Callback:
    order = 0
    def __getattr__(self, name): return getattr(self.learn, name)
class Recorder(Callback):
    def after_batch(self): self.learn.log.append(self.learn.loss)
class Learner:
    def __init__(self, cbs):
        self.log, self.loss, self.cbs = [], 0.0, cbs
        for cb in cbs: object.__setattr__(cb, "learn", self)
    def __call__(self, name):
        for cb in sorted(self.cbs, key=lambda c: c.order):
            if hasattr(type(cb), name): getattr(cb, name)()
    def fit(self, n):
        for i in range(n): self.loss = i / 2; self("after_batch")
        return self.log
def train(): return Learner([Recorder()]).fit(3)
""",
    "gradient hooks and weight init": """
def init_weights(m):
    if isinstance(m, nn.Linear): nn.init.constant_(m.weight, 0.5); m.bias.data.fill_(0.01)
activation = {}
def get_activation(name):
    def hook(module, inputs, output): activation[name] = output.detach()
    return hook
net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)); net.apply(init_weights)
net[1].register_forward_hook(get_activation("relu"))
def train():
    net(torch.ones(1, 2))
    return [round(v, 2) for v in activation["relu"].flatten().tolist()]
""",
    "custom autograd function": """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x); return x * x
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors; return 2 * x * g
def train():
    x = torch.tensor(3.0, requires_grad=True); Square.apply(x).backward()
    return x.grad.item()
""",
    "samplers and iterable datasets": """
class Balanced(torch.utils.data.Sampler):
    def __init__(self, labels): self.labels = labels
    def __iter__(self):
        zeros = [i for i, l in enumerate(self.labels) if l == 0]
        ones = [i for i, l in enumerate(self.labels) if l == 1]
        return iter([i for pair in zip(zeros, ones) for i in pair])
    def __len__(self): return 4
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self): yield from range(3)
def train():
    a = torch.utils.data.DataLoader(list("uvwxyz"), sampler=Balanced([0, 0, 1, 1, 1, 1]), batch_size=2)
    return list(a), [b.tolist() for b in torch.utils.data.DataLoader(Stream(), batch_size=2)]
""",
    "abstract classes and properties": """
from abc import ABC, abstractmethod
class Metric(ABC):
    registry = {}
    @property
    @abstractmethod
    def name(self): ...
    @classmethod
    def make(cls, name): return cls.registry[name]()
    @staticmethod
    def rounded(v): return round(v, 2)
class Accuracy(Metric):
    @property
    def name(self): return "acc"
    def __call__(self, p, t): return self.rounded((p == t).float().mean().item())
Metric.registry["acc"] = Accuracy
def train():
    m = Metric.make("acc")
    return m.name, m(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 0]))
""",
    "matplotlib styles and NumPy options": """
import matplotlib; matplotlib.use("agg")
import matplotlib.pyplot as plt
plt.style.use("ggplot"); plt.rcParams["figure.figsize"] = (6, 4)
np.set_printoptions(precision=3, suppress=True)
def plot(values):
    fig, ax = plt.subplots(); ax.plot(values); plt.close(fig); return len(ax.lines)
def train(): return plot([1, 2]), np.arange(3).tolist()
""",
    "a closure that counts": """
def make_counter():
    count = 0
    def inc(by=1):
        nonlocal count
        count += by
        return count
    return inc
counter = make_counter(); counter()
def train(): return [counter() - counter(0) + 1, counter.__name__]
""",
    "data classes with fields": """
from dataclasses import dataclass, field, asdict, replace
@dataclass
class TrainingArguments:
    output_dir: str = "out"
    lr: float = field(default=5e-5, metadata={"help": "rate"})
    layers: list = field(default_factory=lambda: [1, 2])
training_args = replace(TrainingArguments(), lr=0.1)
def train(): return asdict(training_args)
""",
}


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Kernel:
    shared_kernel.run("%load_ext nb_accelerate\nfrom nb_accelerate import notebook_launcher").ok()
    shared_kernel.run("%distributed config --progress off").ok()
    shared_kernel.run("%distributed start -n 2").ok()
    return shared_kernel


FAST = ("get_device with mps", "EMA, early stopping and deepcopy", "a patched torch.load", "a cached tokenizer")
"""Others are alike in what is sent: a function, and what it uses."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in NOTEBOOKS]
)
def test_a_strangers_notebook_gives_the_same_everywhere(notebook: Kernel, name: str) -> None:
    notebook.run(SEED + NOTEBOOKS[name]).ok()
    cell = notebook.run("%%distributed\ntrain()").ok()
    for method in ("forkserver", "fork"):
        launch = f"notebook_launcher(train, num_processes=2, start_method={method!r})"
        notebook.run(f"{method} = {{*map(repr, {launch})}}").ok()
    plain = notebook.run("plain = train()\nplain").ok()
    shown = [each["text/plain"] for each in cell.displays]
    assert [text for text in shown if not text.startswith("net was trained")] == [plain.value]
    assert notebook.run("forkserver, fork").ok().value == notebook.run("{repr(plain)}, {repr(plain)}").ok().value
