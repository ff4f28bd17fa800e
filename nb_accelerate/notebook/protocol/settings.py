"""What a process is set to, beside its variables: ranks are set to what the notebook is.

::

    kernel   settings_here: {("torch", "default_dtype"): torch.float64, ("mine", "LR"): 0.1 ...}
             |-- with `Setup`: all of them; before a cell: settings that have changed since
             v   pack_settings: one pickle for each module
    rank     use_settings: at once, or when it has imported that module; what it has already is not set again

A setting has the name of the module that has it, and is read from modules only that are imported here. Its own name is
a row of the table below, or else the path of an attribute: what a cell has assigned to, or a variable of the user's
module that is not as in its file (`notebook.protocol.changed_modules`).
"""

from __future__ import annotations

import contextlib
import decimal
import functools
import gc
import importlib
import io
import locale
import logging
import operator
import os
import pickle
import re
import resource
import sys
import time
import types
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from nb_accelerate.base.devices import DEVICE_KINDS
from nb_accelerate.base.imported import imported, when_imported
from nb_accelerate.notebook.protocol.shipping import ValuePickler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger("nb_accelerate")

Key = tuple[str, str]  # the name of a module, and a row of the table or the path of an attribute


class Row(NamedTuple):
    """How a setting is read, and how it is set. Both are given the module."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]


def _calls(getter: str, setter: str, *, unpacks: bool = False) -> Row:
    """Return the row of a setting that has two functions; the second may take what the first returns as keywords."""
    get, put = operator.attrgetter(getter), operator.attrgetter(setter)
    if unpacks:
        return Row(lambda module: get(module)(), lambda module, values: put(module)(**values))
    return Row(lambda module: get(module)(), lambda module, value: put(module)(value))


def _switch(getter: str, on: str, off: str) -> Row:
    return Row(operator.methodcaller(getter), lambda module, value: getattr(module, on if value else off)())


# How settings are read and set that are more than two functions.


_SMALLEST = sys.float_info.min


def _threads(torch: Any) -> int | None:
    """Return how many threads somebody has asked for; None for the number that torch begins with."""
    num_threads: int = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Torch begins with a thread for each physical core: half of them, where each is counted twice.
    is_default = num_threads in (cores, cores // 2) or str(num_threads) == os.environ.get("OMP_NUM_THREADS")
    return None if is_default else num_threads


def _autocast(device: str) -> Row:
    def write(torch: Any, value: tuple[bool, Any]) -> None:
        torch.set_autocast_enabled(device, value[0])
        torch.set_autocast_dtype(device, value[1])

    return Row(lambda torch: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)), write)


def _changed_config(module: Any) -> dict[str, Any]:
    overrides = {}
    for name, entry in module._config.items():  # noqa: SLF001 - its own ways to read it take half a millisecond
        value = entry.user_override
        value = value.get() if hasattr(value, "get") and hasattr(value, "reset") else value  # a ContextVar, from 2.12
        if type(value) is not object and name != "_save_config_ignore":
            overrides[name] = value
    return overrides


def _set_all(owner: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def _log_state(internal: Any) -> tuple[dict[str, Any], set[str]]:
    return dict(internal.log_state.log_qname_to_level), set(internal.log_state.artifact_names)


def _set_log_state(internal: Any, value: tuple[dict[str, Any], set[str]]) -> None:
    internal.log_state.log_qname_to_level, internal.log_state.artifact_names = value
    internal._init_logs()  # noqa: SLF001 - there is no other way, but by names of loggers


_REGISTERED: dict[str, list[Any]] = {}


def _hooks(of: str, register: str) -> Row:
    def write(module: Any, hooks: list[Any]) -> None:
        for handle in _REGISTERED.pop(of, ()):
            handle.remove()
        _REGISTERED[of] = [getattr(module, register)(hook) for hook in hooks]

    return Row(lambda module: list(getattr(module, of).values()), write)


def _registry(path: str) -> Row:
    """Return the row of a dictionary in which a library keeps what is registered: what the notebook has defined."""
    entries = operator.attrgetter(path)
    return Row(
        lambda module: {key: value for key, value in entries(module).items() if _is_of_notebook(value)},
        lambda module, value: entries(module).update(value),
    )


def _is_of_notebook(value: Any) -> bool:
    if type(value) is types.FunctionType:  # most are
        return value.__module__ == "__main__"
    entry = getattr(value, "entry_point", None)  # of an environment of gymnasium: a class, or where it is
    if isinstance(entry, str):
        return not entry.startswith("gymnasium.")
    return "__main__" in (getattr(entry or value, "__module__", None), type(value).__module__)


# For each option of pandas: the dictionary that has it, its key there, its default, its name.
_pandas_entries: list[tuple[dict[str, Any], str, Any, str]] = []


def _pandas_options(pandas: Any) -> dict[str, Any]:
    config = pandas._config.config  # noqa: SLF001 - describe_option only prints them, get_option warns of deprecated ones
    options = config._registered_options  # noqa: SLF001
    if len(_pandas_entries) != len(options):
        _pandas_entries.clear()
        for name, option in options.items():
            *sections, key = name.split(".")
            owner = functools.reduce(operator.getitem, sections, config._global_config)  # noqa: SLF001
            _pandas_entries.append((owner, key, option.defval, name))
    return {
        name: owner[key]
        for owner, key, default, name in _pandas_entries
        if owner[key] is not default and owner[key] != default
    }


def _set_quietly(update: Callable[..., object], values: Mapping[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the notebook has shown those about deprecated options already
        for name, value in values.items():
            update(name, value)


# All parameters when they were last read, and those of them that are not the default.
_rc_read: list[dict[str, Any]] = [{}, {}]


def _rc_params(matplotlib: Any) -> dict[str, Any]:
    if not dict.__eq__(matplotlib.rcParams, _rc_read[0]):
        defaults = matplotlib.rcParamsDefault
        now = dict(dict.items(matplotlib.rcParams))  # its own items() resolve the backend, and warn
        changed = {name: value for name, value in now.items() if dict.get(defaults, name) != value}
        _rc_read[:] = now, {name: value for name, value in changed.items() if "backend" not in name}
    return _rc_read[1]


def _safe_globals(torch: Any) -> list[Any]:
    # What a module has is sent by its name, because unpickling the object would import that module on each rank.
    safe = []
    for allowed in torch.serialization.get_safe_globals():
        module = getattr(allowed, "__module__", "__main__")
        safe.append(allowed if module == "__main__" else (module, allowed.__qualname__))
    return safe


def _add_safe_globals(torch: Any, values: list[Any]) -> None:
    def add(path: str, module: Any) -> None:
        torch.serialization.add_safe_globals([operator.attrgetter(path)(module)])

    for value in values:
        if isinstance(value, tuple) and isinstance(value[0], str):
            when_imported(value[0], functools.partial(add, value[1]))
        else:
            torch.serialization.add_safe_globals([value])


_WRITES_FILES = ("svg", "pdf", "ps", "pgf", "cairo")


def _file_backend(matplotlib: Any) -> str | None:
    backend = dict.get(matplotlib.rcParams, "backend")
    return backend if isinstance(backend, str) and backend.lower() in _WRITES_FILES else None


def _decimal(_: Any) -> dict[str, Any]:
    context = decimal.getcontext()
    return {name: getattr(context, name) for name in ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")}


def _umask(_: Any) -> int:
    # Only setting the mask returns it. A file that another thread makes meanwhile had better be too private than open.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


_LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}


def _set_limits(_: Any, values: dict[int, tuple[int, int]]) -> None:
    for limit, value in values.items():
        if resource.getrlimit(limit) != value:
            resource.setrlimit(limit, value)


def _set_environ(_: Any, changes: dict[str, tuple[str | None, str | None]]) -> None:
    """Set variables to the second value of each pair, where this rank has the first: others are its own."""
    for name, (old, new) in changes.items():
        if os.environ.get(name) != old:
            continue
        os.environ.pop(name, None)
        if new is not None:
            os.environ[name] = new
        if name == "TZ":
            time.tzset()


def _folder(_: Any) -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - it is read before each cell
    except FileNotFoundError:
        return None


def _list(of: str) -> Row:
    def write(module: Any, entries: list[str]) -> None:
        getattr(module, of)[:] = entries

    return Row(lambda module: list(getattr(module, of)), write)


# Loggers, and filters of warnings.


class _OnStream(NamedTuple):
    """In the place of a `logging.StreamHandler` of the notebook: one on the rank's stream of that name."""

    stream: str
    level: int
    formatter: Any
    filters: tuple[Any, ...]


class _OnFile(NamedTuple):
    """In the place of a `logging.FileHandler`: ranks append to the same file."""

    path: str
    encoding: str | None
    level: int
    formatter: Any
    filters: tuple[Any, ...]


def _handlers(owner: logging.Logger) -> tuple[Any, ...]:
    handlers: list[Any] = []
    for handler in owner.handlers:
        common = handler.level, handler.formatter, tuple(handler.filters)
        if type(handler) is logging.FileHandler:
            handlers.append(_OnFile(handler.baseFilename, handler.encoding, *common))
        elif type(handler) is logging.StreamHandler:
            stream = handler.stream
            standard = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
            if stream in standard or type(stream).__name__ == "OutStream":
                is_out = stream is sys.stdout or "stdout" in str(getattr(stream, "name", ""))
                handlers.append(_OnStream("stdout" if is_out else "stderr", *common))
    return tuple(handlers)


_LOGGERS = "loggers"
_made_handlers: dict[str, list[logging.Handler]] = {}


def _set_loggers(module: Any, values: dict[str, tuple[Any, ...]]) -> None:
    unset = _made_handlers.keys() - values.keys() if module is logging else ()
    values = values | dict.fromkeys(unset, (logging.NOTSET, True, False, ()))
    for name, (level, propagates, is_disabled, handlers) in values.items():
        is_new = name != "root" and name not in logging.root.manager.loggerDict
        owner = logging.getLogger(name)
        if is_new:
            owner.level = level  # setLevel clears a cache of each logger, which in a fork copies their pages
        elif owner.level != level:
            owner.setLevel(level)
        owner.propagate, owner.disabled = propagates, is_disabled
        made_before = _made_handlers.pop(name, [])
        for old in made_before:
            owner.removeHandler(old)
        if owner.handlers:  # the module that the logger is for has made handlers here
            continue
        for sent in handlers:
            handler: logging.Handler
            if isinstance(sent, _OnFile):
                handler = logging.FileHandler(sent.path, "a", sent.encoding, delay=True)
            else:
                handler = logging.StreamHandler(getattr(sys, sent.stream))
            handler.setLevel(sent.level)
            handler.setFormatter(sent.formatter)
            handler.filters = [*sent.filters]
            owner.addHandler(handler)
            _made_handlers.setdefault(name, []).append(handler)


def _loggers() -> dict[Key, Any]:
    """Return level, whether it propagates or is disabled, and handlers of each logger, by the module it is of."""
    # Handlers of a library's loggers are left out: it makes them as it is imported.
    by_module: dict[Key, Any] = {}
    for owner in [logging.root, *logging.root.manager.loggerDict.values()]:
        if isinstance(owner, logging.PlaceHolder) or not (owner.level or owner.handlers or owner.disabled):
            continue
        name = owner.name
        module = name.partition(".")[0]
        is_library = imported(module) is not None and module != "__main__" and owner is not logging.root
        handlers = () if is_library else _handlers(owner)
        if is_library or owner.level or owner.disabled or handlers:
            key = (module if is_library else "logging", _LOGGERS)
            by_module.setdefault(key, {})[name] = owner.level, owner.propagate, owner.disabled, handlers
    return by_module


_Filter = tuple[Any, ...]
_sent_filters: list[_Filter] = []


def _set_filters(_: Any, forms: tuple[_Filter, ...]) -> None:
    """Put filters before those of this process, which has filters of its own."""
    own_by_form = {_form_of(entry): entry for entry in warnings.filters}
    filters: list[_Filter] = []
    for form in forms:
        if form in own_by_form:
            filters.append(own_by_form[form])
            continue
        kind, message, (module, name), origin, line = form
        if imported(module) is None:
            when_imported(module, lambda _: _set_filters(None, forms))
            continue
        try:
            category = operator.attrgetter(name)(imported(module)) if isinstance(name, str) else name
        except AttributeError:  # in another version of the library, which cannot give that warning
            continue
        texts = [text and (re.compile(*text) if isinstance(text, tuple) else text) for text in (message, origin)]
        filters.append((kind, texts[0], category, texts[1], line))
    others = [entry for entry in warnings.filters if entry not in _sent_filters and entry not in filters]
    _sent_filters[:] = filters
    warnings.filters[:] = [*filters, *others]  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]  # noqa: SLF001 - or what was shown once stays hidden


def _form_of(entry: _Filter) -> _Filter:
    """Return a filter as it is sent: expressions as text, since each rank would compile them, and classes by name."""
    kind, message, category, origin, line = entry
    module = category.__module__
    named = (module, category if module == "__main__" else category.__qualname__)  # reading it would import its module
    texts = [(text.pattern, text.flags) if isinstance(text, re.Pattern) else text for text in (message, origin)]
    return kind, texts[0], named, texts[1], line


# The table.

# Settings that are attributes: paths from the module.
_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "PIL.Image": ("MAX_IMAGE_PIXELS",),
    "PIL.ImageFile": ("LOAD_TRUNCATED_IMAGES",),
    "ssl": ("_create_default_https_context",),
    "torch": (
        *("backends.cudnn.enabled", "backends.cudnn.benchmark", "backends.cudnn.deterministic"),
        *("backends.cuda.matmul.allow_tf32", "backends.cudnn.allow_tf32"),
        # From 2.9 on. Who sets these cannot read the two above, nor the precision; who sets those has set these.
        *("backends.fp32_precision", "backends.cuda.matmul.fp32_precision"),
        *("backends.cudnn.conv.fp32_precision", "backends.cudnn.rnn.fp32_precision"),
        "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
        "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
        *("backends.opt_einsum.enabled", "backends.opt_einsum.strategy"),
        *("utils.deterministic.fill_uninitialized_memory", "hub._hub_dir"),
    ),
    "torch._dynamo.eval_frame": ("_stance",),
    "torch.distributions.distribution": ("Distribution._validate_args",),
    "torch.utils.checkpoint": ("_checkpoint_debug_enabled", "_enable_checkpoint_early_stop"),
}

# Settings that are read and set by functions, in this order: torch's precision before its flags.
_ROWS: dict[str, dict[str, Row]] = {
    "sys": {
        "path": _list("path"),
        "argv": _list("argv"),
        "folder": Row(_folder, lambda _, folder: os.chdir(folder or ".")),
        "environ": Row(lambda _: os.environ._data.copy(), _set_environ),  # type: ignore[attr-defined]  # noqa: SLF001
        "limits": Row(lambda _: {number: resource.getrlimit(number) for number in set(_LIMITS.values())}, _set_limits),
        "umask": Row(_umask, lambda _, value: os.umask(value)),
        "cores": Row(lambda _: os.sched_getaffinity(0), lambda _, value: os.sched_setaffinity(0, value)),
        "recursion": _calls("getrecursionlimit", "setrecursionlimit"),
        "switches": _calls("getswitchinterval", "setswitchinterval"),
        "digits": _calls("get_int_max_str_digits", "set_int_max_str_digits"),
        "collects": Row(lambda _: gc.isenabled(), lambda _, value: gc.enable() if value else gc.disable()),
        "collects_at": Row(lambda _: gc.get_threshold(), lambda _, value: gc.set_threshold(*value)),
        "locale": Row(
            lambda _: locale.setlocale(locale.LC_ALL), lambda _, value: locale.setlocale(locale.LC_ALL, value)
        ),
    },
    "copyreg": {"registered": _registry("dispatch_table")},
    "csv": {"limit": _calls("field_size_limit", "field_size_limit")},
    "datasets": {
        "bars": _switch("are_progress_bars_disabled", "disable_progress_bars", "enable_progress_bars"),
        "caches": _switch("is_caching_enabled", "enable_caching", "disable_caching"),
    },
    "decimal": {"context": Row(_decimal, lambda _, values: _set_all(decimal.getcontext(), values))},
    "gymnasium.envs.registration": {"registered": _registry("registry")},
    "huggingface_hub.utils": {
        "bars": _switch("are_progress_bars_disabled", "disable_progress_bars", "enable_progress_bars")
    },
    "logging": {
        "disabled": Row(lambda _: logging.root.manager.disable, lambda _, value: logging.disable(value)),
        "captures": Row(
            lambda _: logging._warnings_showwarning is not None,  # type: ignore[attr-defined]  # noqa: SLF001
            lambda _, value: logging.captureWarnings(value),
        ),
    },
    "matplotlib": {
        "parameters": Row(_rc_params, lambda module, values: _set_quietly(module.rcParams.__setitem__, values)),
        "backend": Row(_file_backend, lambda module, value: value and module.use(value)),
    },
    "multiprocessing": {
        "starts": Row(
            lambda module: module.get_start_method(allow_none=True),
            lambda module, value: module.set_start_method(value, force=True),
        )
    },
    "numpy": {
        "errors": _calls("geterr", "seterr", unpacks=True),
        "printing": _calls("get_printoptions", "set_printoptions", unpacks=True),
    },
    "pandas": {
        "options": Row(_pandas_options, lambda module, values: _set_quietly(module.set_option, values)),
        "bars": Row(
            lambda module: hasattr(module.Series, "progress_apply"),
            lambda _, is_wanted: is_wanted and importlib.import_module("tqdm").tqdm.pandas(),
        ),
    },
    "sklearn": {"config": _calls("get_config", "set_config", unpacks=True)},
    "socket": {"timeout": _calls("getdefaulttimeout", "setdefaulttimeout")},
    "torch": {
        "default_dtype": _calls("get_default_dtype", "set_default_dtype"),
        "default_device": Row(
            # torch.get_default_device() makes a tensor, and so would touch a GPU in the kernel.
            lambda torch: getattr(getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None), "device", None),  # noqa: SLF001
            lambda torch, device: torch.set_default_device(device),
        ),
        "precision": _calls("get_float32_matmul_precision", "set_float32_matmul_precision"),
        "deterministic": _calls("get_deterministic_debug_mode", "set_deterministic_debug_mode"),
        "grad": _calls("is_grad_enabled", "set_grad_enabled"),
        "anomaly": Row(
            lambda torch: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda torch, value: torch.autograd.set_detect_anomaly(*value),
        ),
        "warns": _calls("is_warn_always_enabled", "set_warn_always"),
        "denormal": Row(lambda _: _SMALLEST * 0.5 == 0.0, lambda torch, value: torch.set_flush_denormal(value)),
        "threads": Row(_threads, lambda torch, number: number is not None and torch.set_num_threads(number)),
        # torch has no device type "tpu", and says so in 17 microseconds.
        **{f"autocast_{kind.name}": _autocast(kind.name) for kind in DEVICE_KINDS if kind.name != "tpu"},
        "mkldnn": _calls("_C._get_mkldnn_enabled", "_C._set_mkldnn_enabled"),
        "safe_globals": Row(_safe_globals, _add_safe_globals),
        "printing": Row(
            lambda torch: vars(torch._tensor_str.PRINT_OPTS).copy(),  # noqa: SLF001 - nothing else returns them
            lambda torch, value: vars(torch._tensor_str.PRINT_OPTS).update(value),  # noqa: SLF001 - see above
        ),
        **{
            f"sdp_{kind}": _calls(f"backends.cuda.{kind}_sdp_enabled", f"backends.cuda.enable_{kind}_sdp")
            for kind in ("flash", "mem_efficient", "math", "cudnn")
        },
    },
    "torch._dynamo.config": {"changed": Row(_changed_config, _set_all)},
    "torch._logging._internal": {"state": Row(_log_state, _set_log_state)},
    "torch.distributions.kl": {"registered": _registry("_KL_REGISTRY")},
    "torch.multiprocessing": {"sharing": _calls("get_sharing_strategy", "set_sharing_strategy")},
    "torch.nn.modules.module": {
        "before": _hooks("_global_forward_pre_hooks", "register_module_forward_pre_hook"),
        "after": _hooks("_global_forward_hooks", "register_module_forward_hook"),
        "backward": _hooks("_global_backward_hooks", "register_module_full_backward_hook"),
    },
    "transformers.models.auto.configuration_auto": {"registered": _registry("CONFIG_MAPPING._extra_content")},
    "transformers.utils.logging": {
        "bars": _switch("is_progress_bar_enabled", "enable_progress_bar", "disable_progress_bar")
    },
    "warnings": {"filters": Row(lambda module: tuple(module.filters), _set_filters)},
    "yaml": {"registered": _registry("SafeLoader.yaml_constructors")},
}

_GETTERS: dict[str, list[tuple[Key, Callable[[Any], Any]]]] = {
    module: [((module, name), row.read) for name, row in _ROWS.get(module, {}).items()]
    + [((module, path), operator.attrgetter(path)) for path in _ATTRIBUTES.get(module, ())]
    for module in {**_ROWS, **_ATTRIBUTES}
}


def settings_here() -> dict[Key, Any]:
    values = _loggers()
    for module_name, getters in _GETTERS.items():
        module = imported(module_name)
        if module is None:
            continue
        for key, read in getters:
            # Reading fails for some versions of a library, while a thread imports it, or if torch's flags contradict.
            try:  # noqa: SIM105 - contextlib.suppress takes as long as reading it
                values[key] = read(module)
            except Exception:  # noqa: S110 - see above
                pass
    return values


def is_same(value: Any, other: Any) -> bool:
    """Return whether two values are one, or are equal and of one type."""
    try:
        return value is other or (type(value) is type(other) and bool(value == other))
    except Exception:  # raised by classes of users, or by arrays, which are neither true nor false
        return False


class Part(NamedTuple):
    """Entries that are added to a dictionary or list."""

    entries: dict[Any, Any] | list[Any]


def pack(values: Mapping[Key, Any]) -> dict[str, bytes]:
    """Return settings of one process for another, by module. Raises what pickling one of them raises."""
    by_module: dict[str, dict[str, Any]] = {}
    for (module, name), value in values.items():
        is_filters = (module, name) == ("warnings", "filters")
        by_module.setdefault(module, {})[name] = tuple(map(_form_of, value)) if is_filters else value
    packed = {}
    for module, settings in by_module.items():
        file = io.BytesIO()
        _SettingsPickler(file, protocol=5).dump(settings)
        packed[module] = file.getvalue()
    return packed


_values_at_start: dict[Key, Any] = {}  # what this rank was set to before it was sent settings

_received_keys: set[Key] = set()
_originals: dict[Key, Any] = {}


def note_fresh() -> None:
    """Note what this process is set to. A server does so for all ranks that it forks: in each it costs milliseconds."""
    _values_at_start.update(settings_here())


def begin_settings(packed: Mapping[str, bytes]) -> None:
    """Set a new rank to what the notebook is; a fork of the notebook, or the rank of a script, is sent nothing."""
    if packed and not _values_at_start:
        note_fresh()
    use_settings(packed)


def use_settings(packed: Mapping[str, bytes]) -> None:
    """Set this rank to what has changed in the notebook. The kernel sends this in a `Call`, too."""
    for name, pickled in packed.items():
        when_imported(name, functools.partial(_use, name, pickled))
    # A pickled optimizer has lost the mark by which its scheduler knows `step`; torch takes it for the user's own.
    warnings.filterwarnings("ignore", message=r"Seems like `optimizer\.step\(\)` has been overridden")


def _use(module_name: str, pickled: bytes, module: Any) -> None:
    try:
        settings = pickle.loads(pickled)
    except Exception as error:  # it must not fail the import of the module
        logger.warning("what the notebook has set in %s could not be set here: %s", module_name, error)
        return
    for name, value in settings.items():
        key, row = (module_name, name), _ROWS.get(module_name, {}).get(name)
        if name == _LOGGERS:
            row = Row(lambda _: None, _set_loggers)
        # A value that is sent for the first time may be a default of a library that the notebook has just imported:
        # it does not undo what cells have set here.
        is_news = key in _received_keys or not (key in _values_at_start and is_same(_values_at_start[key], value))
        _received_keys.add(key)
        if not is_news:
            continue
        try:
            current = row.read(module) if row else operator.attrgetter(name)(module)
        except Exception:  # it has no such attribute yet, or in this version
            current = None
        if is_same(current, value):
            continue
        try:
            if row is not None:
                row.write(module, value)
            else:
                _assign(module, name, value, current)
        except Exception as error:  # the system, or a version of a library, is another one here
            logger.warning("%s of the notebook (%s) could not be set here: %s", name, module_name, error)


def _assign(module: Any, path: str, value: Any, current: Any) -> None:
    holder, _, name = path.rpartition(".")
    if isinstance(value, Part):
        if isinstance(current, dict):
            current.update(value.entries)
        else:
            current += [entry for entry in value.entries if entry not in current]
    elif type(value) is type(current) and type(value) in (dict, set):  # in place, for all who have it
        current.clear()
        current.update(value)
    elif type(value) is type(current) is list:
        current[:] = value
    else:
        _originals.setdefault((module.__name__, path), current)
        setattr(operator.attrgetter(holder)(module) if holder else module, name, value)


class _SettingsPickler(ValuePickler):
    """Refers to what a notebook has replaced in a module as to the original there."""

    def reducer_override(self, obj: Any) -> Any:
        module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
        if isinstance(module, str) and isinstance(name, str) and callable(obj) and module != "__main__":
            with contextlib.suppress(AttributeError, KeyError):
                if operator.attrgetter(name)(imported(module)) is not obj:
                    return _original, (module, name)
        return super().reducer_override(obj)


def _original(module: str, path: str) -> Any:
    return _originals.get((module, path)) or operator.attrgetter(path)(importlib.import_module(module))
