"""Fixtures every test may use: the tiny tokenizer and a factory of tiny models."""

from __future__ import annotations

import collections
import functools
import gc
import importlib.util
import inspect
import io
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# One thread for each worker, and for the processes that tests start: threads of several processes wait for each other.
# Read when torch is imported.
for _name, _value in (("OMP_NUM_THREADS", "1"), ("TOKENIZERS_PARALLELISM", "false"), ("HF_HUB_OFFLINE", "1")):
    os.environ.setdefault(_name, _value)

import dill
import pytest
import torch
import typer.testing
from accelerate.utils import memory
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from podium.models import devices, forward, precision
from podium.rewards import from_file
from podium.rewards.from_file import FileReward
from podium.runs import environment
from podium.tester import pretest as pretests
from podium.testing import KINDS, tiny_model, tiny_tokenizer


def pytest_configure() -> None:
    """Ctrl-C and the end of a terminal reach the processes that tests start, also behind an `&` or `nohup`."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # `torch.manual_seed` keeps every seed for devices that are not there, each with its stack: 1 ms, at each call of a
    # reward function.
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = lambda seed: None
    # Every use of the command line in a test would read the signatures of all commands again: 40 ms.
    typer.main.get_command = typer.testing._get_command = functools.cache(typer.main.get_command)
    memory.gc = SimpleNamespace(collect=_collect_what_is_young)
    # What every run records of its environment takes 0.2 s: which statements of a file a reward needs, the commit of
    # this repository by two processes, and the versions of the libraries.
    environment.used_digest = from_file.used_digest = functools.cache(environment.used_digest)
    environment._version = functools.cache(environment._version)
    environment._git = _commit_read_once(environment._git)


def _commit_read_once(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    known = functools.cache(read)
    return lambda folder: known(folder) if folder == ROOT else read(folder)


ROOT = Path(__file__).parents[1]
DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds of every file on a quiet core. `PODIUM_DURATIONS=1 make test` writes it anew."""


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give tests of defects their line; skip examples of an optional package without it.

    Where workers take the tests file by file, long files come first, so that all workers end together.
    """
    if hasattr(config, "workerinput"):
        seconds = json.loads(DURATIONS.read_text())
        items.sort(key=lambda item: -seconds.get(_file(item.nodeid), 5.0))
    _thin_out(items)
    for item in items:
        for marker in item.iter_markers("defect"):
            item.user_properties.append(("defect", ": ".join(marker.args)))
    if importlib.util.find_spec("reasoning_gym") is None:
        for item in items:
            if item.nodeid.endswith("podium.agents.adapters.reasoning_gym.gym_rows"):
                item.add_marker(pytest.mark.skip(reason="reasoning-gym is not installed"))


def _thin_out(items: list[pytest.Item]) -> None:
    """Of a product of parameters that is marked `diagonal`, leave every value once; the rest is slow.

    Of a test that is marked `cases(n)` leave n of its cases, from the first to the last.
    """
    products: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("diagonal"):
            products[item.nodeid.partition("[")[0]].append(item)
    for product in products.values():
        values = [[*dict.fromkeys(axis)] for axis in zip(*map(_values, product), strict=True)]
        longest = max(range(len(values)), key=lambda axis: len(values[axis]))
        for item in product:
            places = [axis.index(value) for axis, value in zip(values, _values(item), strict=True)]
            if any(place != places[longest] % len(axis) for place, axis in zip(places, values, strict=True)):
                item.add_marker(pytest.mark.slow)
    of_a_test: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("cases") and not item.get_closest_marker("slow"):
            of_a_test[item.nodeid.partition("[")[0]].append(item)
    for cases in of_a_test.values():
        [count] = cases[0].get_closest_marker("cases").args  # type: ignore[union-attr]
        kept = {round(i * (len(cases) - 1) / max(count - 1, 1)) for i in range(count)}
        for i, item in enumerate(cases):
            if i not in kept:
                item.add_marker(pytest.mark.slow)


def _values(item: Any) -> list[str]:
    """The values of each `parametrize` of a test; pytest's own indices count all combinations since 9.2."""
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    split = [name.replace(" ", "").split(",") if isinstance(name, str) else name for name in names]
    return [repr([item.callspec.params[name] for name in each]) for each in split]


def _file(node_id: str) -> str:
    return node_id.partition("::")[0]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """More skipped tests than `PODIUM_TESTS_SKIPPED` allows are a failure: something is missing on this machine."""
    allowed = os.environ.get("PODIUM_TESTS_SKIPPED")
    if allowed and not hasattr(session.config, "workerinput") and len(_skipped(session.config)) > int(allowed):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What was skipped, by reason, and whether it is too much."""
    reasons = collections.Counter(report.longrepr[2].removeprefix("Skipped: ") for report in _skipped(config))
    for reason, number in reasons.most_common():
        terminalreporter.line(f"{number} skipped: {reason}")
    allowed = os.environ.get("PODIUM_TESTS_SKIPPED")
    if allowed and reasons.total() > int(allowed):
        terminalreporter.line(f"{reasons.total()} are skipped, {allowed} may be (.ci/run)", red=True)
    if os.environ.get("PODIUM_DURATIONS"):
        seconds: collections.Counter[str] = collections.Counter()
        for report in itertools.chain(*terminalreporter.stats.values()):
            seconds[_file(getattr(report, "nodeid", ""))] += getattr(report, "duration", 0.0)
        by_file = {file: round(value, 1) for file, value in sorted(seconds.items()) if value >= 0.05}
        DURATIONS.write_text(json.dumps(by_file, indent=1) + "\n")


def _skipped(config: pytest.Config) -> list[Any]:
    return config.pluginmanager.get_plugin("terminalreporter").stats.get("skipped", [])


def _collect_what_is_young() -> None:
    """In place of the whole collection that ends `Trainer.train`, 20 ms: a tiny model holds no memory of a GPU."""
    gc.collect(1)


def forget_garbage() -> None:
    """Collect what is garbage, and leave everything else out of later collections.

    `Trainer.train` ends with a collection. Over all that is imported here it takes 0.2 s, longer than the training of
    a tiny model.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _without_old_objects() -> None:
    forget_garbage()
    _choose_methods_once()


_choices: dict[Any, Any] = {}
"""How models compute log-probabilities, as trials of their equals have shown."""


def _choose_methods_once() -> None:
    """The trial of a tiny model's forward is a tenth of its training: it is made once for models of one structure."""
    for name in ("podium.trainer.assembly", "podium.trainer.teacher"):
        loaded = sys.modules.get(name)
        if loaded is not None and loaded.choose_method is forward.choose_method:
            loaded.choose_method = _chosen_once


def _chosen_once(model: torch.nn.Module, example: Any = None) -> Any:
    key = _structure(model) if example is None else None
    if key is None:
        return forward.choose_method(model, example)
    if key not in _choices:
        _choices[key] = forward.choose_method(model)
    return _choices[key]


def _structure(model: torch.nn.Module) -> Any:
    """What the trial depends on, but for the weights; None for a model that a test has made or changed by hand."""
    modules = list(model.modules())
    for module in modules:
        own = type(module).__module__.startswith(("transformers.", "torch.", "peft."))
        if not own or "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
            return None
    config = forward.unwrap(model).config
    settings = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
    return (
        tuple((type(module), type(module).forward) for module in modules),
        tuple((name, p.shape, p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters()),
        json.dumps(settings, sort_keys=True, default=repr),
        getattr(config, "_attn_implementation", None),
        devices.KINDS["cpu"],
    )


@pytest.fixture
def tried_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the trial of a forward, or of a fault that it would see: no result of another model is taken."""
    for name in ("podium.trainer.assembly", "podium.trainer.teacher"):
        monkeypatch.setattr(f"{name}.choose_method", forward.choose_method)


_pretests = {name: getattr(pretests, name) for name in ("_tested", "_answers")}


@pytest.fixture(autouse=True, scope="session")
def _pretest_once() -> Iterator[None]:
    """The tests of a run's rewards, 0.2 s in forked processes, once for the same functions, weights and rows."""
    for name, pretest in _pretests.items():
        setattr(pretests, name, _once(pretest))
    yield
    for name, pretest in _pretests.items():
        setattr(pretests, name, pretest)


def _once(pretest: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[bytes, Any] = {}

    def tested(*arguments: Any, **named: Any) -> Any:
        try:
            key = io.BytesIO()
            _ByContent(key).dump((arguments, named))
        except Exception:  # noqa: BLE001  what cannot be pickled is tested each time
            return pretest(*arguments, **named)
        if key.getvalue() not in known:
            known[key.getvalue()] = pretest(*arguments, **named)
        return known[key.getvalue()]

    return tested


class _ByContent(dill.Pickler):
    """A function in a file is its code, wherever the file lies."""

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, FileReward):
            return None
        sources = {Path(path).name: text for path, text in value._sources.items()}
        return value.attribute, value.where, value.settings, value.row_wise, value.env, sources


@pytest.fixture(autouse=True, scope="session")
def _environment_once() -> Iterator[None]:
    """What every run writes down of this checkout and its libraries: two processes of git, a file a library."""
    git, version, digest = environment._git, environment._version, environment.used_digest
    checkout = Path(__file__).parents[1]
    of_checkout = functools.cache(lambda: git(checkout))
    environment._git = lambda folder: of_checkout() if folder == checkout else git(folder)
    environment._version = functools.cache(version)
    environment.used_digest = functools.cache(digest)
    yield
    environment._git, environment._version, environment.used_digest = git, version, digest


@pytest.fixture
def pretest_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the test itself: no result of another test is taken."""
    for name, pretest in _pretests.items():
        monkeypatch.setattr(pretests, name, pretest)


@pytest.fixture
def tested_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`podium test` plays in this process, and not in one of its own, which takes 2 s to start."""
    from podium.tester import environments

    def examined(
        target: str, rows: Any, *, oracle: str = "", folder: Path | None = None, settings: Any
    ) -> environments.EnvironmentReport:
        request = {"target": target, "rows": rows, "oracle": oracle, "folder": folder or Path(), "settings": settings}
        [reply] = environments.answer(request, lambda _: None)
        return environments.EnvironmentReport.from_plain(reply)

    monkeypatch.setattr(environments, "examine_source", examined)


@pytest.fixture(scope="session")
def _trainer_loaded() -> None:
    import podium.trainer.trainer  # noqa: F401  seconds, which most unit tests do not need

    forget_garbage()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a ChatML template."""
    return tiny_tokenizer()


@pytest.fixture
def now(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """`now(text)`: what happens now, for the table that `python -m tests.defects` prints."""
    return lambda text: record_property("now", text)


@pytest.fixture
def tiny_llama() -> Callable[..., PreTrainedModel]:
    """`tiny_llama(**overrides)`: a fresh two-layer Llama."""
    return lambda **overrides: tiny_model("llama", **overrides)


@pytest.fixture
def refuse_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's operators for packed weights raise, as they do on a processor without AVX-512."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("mkldnn_reorder_linear_weight: bf16 path needs the cpu support avx_ne_convert or avx512bw")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", SimpleNamespace(default=refuse))
    monkeypatch.setattr(precision, "_packable", {})


@pytest.fixture(params=["cpu", pytest.param("as if cuda", marks=pytest.mark.slow)])
def both_devices(request: pytest.FixtureRequest) -> None:
    """The test twice: as a CPU computes, and as a GPU does by default, in bfloat16 by autocast."""
    if request.param != "cpu":
        request.getfixturevalue("as_if_cuda")


@pytest.fixture(params=["cpu", "as if cuda"])
def both_devices_in_float32(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test twice: as a CPU computes, and by a GPU's branches without autocast, to the tolerances of float32."""
    if request.param != "cpu":
        from podium import GRPOConfig

        request.getfixturevalue("as_if_cuda")
        monkeypatch.setattr(GRPOConfig, "_choose_half", lambda args: setattr(args, "bf16", bool(args.bf16)))


@pytest.fixture
def as_if_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU computes as a GPU does: the table's row for CUDA stands under `cpu`.

    So autocast in place of our own products, attention in half precision without the CPU's joined kernel, rows that are
    looked at every eighth token, a GPU's blocks and limits. float16 gets the scaler that accelerate makes for GPUs.
    """
    from accelerate import Accelerator

    monkeypatch.setitem(devices.KINDS, "cpu", devices.KINDS["cuda"])
    original = Accelerator.__init__

    def with_scaler(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.mixed_precision == "fp16":
            self.scaler, self.native_amp = torch.amp.GradScaler("cpu"), True

    monkeypatch.setattr(Accelerator, "__init__", with_scaler)


ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 4) for b in range(4)]
"""Twelve prompts of four tokens."""


def digits(completions: list[str], **_: Any) -> list[float]:
    """Rewards that differ within most groups of random bytes."""
    return [sum(c.isdigit() for c in text) + len(text) / 10 for text in completions]


MakeTrainer = Callable[..., Any]


@pytest.fixture
def make_trainer(
    tmp_path: Path, _trainer_loaded: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> MakeTrainer:
    """`make_trainer(rewards, **settings)`: a trainer of a tiny Llama on twelve sums, four prompts of four a step.

    Its rewards are called nowhere but in training, unless a test asks for `pretest_each_time` or the proof. Besides the
    fields of `GRPOConfig`: `model`, `rows`, `eval_rows` (rows, a dict of them or datasets) and the other
    arguments of `GRPOTrainer` by their names.
    """
    from podium import GRPOConfig
    from podium.trainer import assembly
    from podium.trainer.trainer import GRPOTrainer

    if "pretest_each_time" not in request.fixturenames:  # 0.1 s in a forked process, for each reward
        monkeypatch.setattr(assembly, "refuse_shapes", lambda *_, **__: None)

    def make(
        rewards: Any = digits, *, model: Any = "llama", rows: Any = ROWS, eval_rows: Any = None, **given: Any
    ) -> Any:
        known = inspect.signature(GRPOTrainer.__init__).parameters
        arguments = {name: given.pop(name) for name in list(given) if name in known}
        arguments.setdefault("processing_class", tiny_tokenizer())
        settings = {
            "num_generations": 4,
            "per_device_train_batch_size": 16,
            "max_completion_length": 8,
            "max_steps": 2,
            "learning_rate": 0.1,
            "optim": "sgd",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "prove_first_batch": False,  # tests/invariants/test_proof.py; elsewhere its forwards would be counted
            **given,
        }
        return GRPOTrainer(
            model=tiny_model(model) if model in KINDS else model,
            reward_funcs=rewards,
            args=GRPOConfig(str(tmp_path / "run"), **settings),
            train_dataset=_dataset(rows),
            eval_dataset={k: _dataset(v) for k, v in eval_rows.items()}
            if isinstance(eval_rows, dict)
            else _dataset(eval_rows),
            **arguments,
        )

    return make


def _dataset(rows: Any) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows) if isinstance(rows, list) else rows


@pytest.fixture
def count_trained_tokens() -> Callable[[Any], list[int]]:
    """`count_trained_tokens(trainer)`: trained tokens of every pack that goes through it, appended as it does."""

    def count(trainer: Any) -> list[int]:
        sizes: list[int] = []
        inner = trainer.step._backward

        def counted(packed: Any, *others: Any) -> Any:
            sizes.append(packed.num_tokens)
            return inner(packed, *others)

        trainer.step._backward = counted
        return sizes

    return count
