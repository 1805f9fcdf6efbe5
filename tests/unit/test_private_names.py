"""Names with a leading underscore of other libraries are listed here, and are in the installed release."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import podium

PACKAGE = Path(podium.__file__).parent
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
DOCUMENTED = ("_asdict", "_fields")
"""Python's own, of named tuples."""

PRIVATE: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("transformers.Trainer", "5.23.0"): (
        "_determine_best_metric",
        "_get_grad_norm",
        "_get_output_dir",
        "_load_best_model",
        "_load_from_checkpoint",
        "_load_optimizer_and_scheduler",
        "_load_rng_state",
        "_load_scaler",
        "_maybe_log_save_evaluate",
        "_push_from_checkpoint",
        "_save",
        "_save_checkpoint",
        "_save_optimizer_and_scheduler",
        "_save_rng_state",
        "_save_scaler",
    ),
    ("transformers.TrainingArguments", "5.23.0"): ("_n_gpu",),
    ("transformers.PreTrainedConfig", "5.23.0"): ("_name_or_path",),
    ("transformers.PreTrainedModel", "5.23.0"): (
        "_from_config",
        "_keys_to_ignore_on_load_unexpected",
        "_no_split_modules",
        "_supports_attention_backend",
    ),
    ("transformers.AutoModelForCausalLM", "5.23.0"): ("_model_mapping",),
    ("trl.SFTTrainer", "1.16.0"): ("_total_train_tokens",),
    ("accelerate.Accelerator", "1.15.0"): ("_is_accelerate_prepared",),
    ("accelerate.state.GradientState", "1.15.0"): ("_set_sync_gradients",),
    ("accelerate.state.PartialState", "1.15.0"): ("_shared_state",),
    ("torch.Tensor", "2.13.0"): (
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
    ),
    ("torch.nn.Module", "2.13.0"): (
        "_forward_hooks",
        "_forward_pre_hooks",
    ),
    ("torch.optim.lr_scheduler.LRScheduler", "2.13.0"): ("_last_lr",),
    ("torch.ops.aten", "2.13.0"): (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    ("torch.ops.mkldnn", "2.13.0"): (
        "_linear_pointwise",
        "_reorder_linear_weight",
    ),
    ("torch.distributed.distributed_c10d", "2.13.0"): ("_set_pg_timeout",),
    ("torch.utils", "2.13.0"): ("_pytree",),
    ("bitsandbytes.functional", "0.50.0"): ("_convert_weight_packed_for_cpu_inverse",),
}
"""By module or class, and the release in which they were read: names that are used, and may change in any release."""


def private(name: object) -> bool:
    return isinstance(name, str) and re.match(r"_[^_]", name) is not None and name not in DOCUMENTED


def listed() -> dict[tuple[str, str], str]:
    """(where, name) -> the release in which it was read."""
    return {(where, name): release for (where, release), names in PRIVATE.items() for name in names}


def defined_here() -> set[str]:
    """Functions, classes, variables and attributes of the package's own."""
    names = set()
    for node in (node for tree in TREES.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


def imported(tree: ast.Module) -> dict[str, str]:
    """Name in a module -> what another library calls it."""
    found = {}
    for node in ast.walk(tree):
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            if (module or alias.name).split(".")[0] not in ("podium", *sys.stdlib_module_names):
                found[alias.asname or (alias.name if module else alias.name.split(".")[0])] = f"{module}{alias.name}"
    return found


def written(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Private names that a module imports or looks up, and that the package does not define."""
    names = imported(tree)
    yield from (part for full in names.values() for part in full.split(".") if private(part))
    plain = {name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in (a.name for a in node.names)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            root = ast.unparse(node.value).split(".")[0]
            if root in names or (root not in plain & sys.stdlib_module_names and node.attr not in own):
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = getattr(node.args[1], "value", None) if len(node.args) > 1 else None
            if private(name) and name not in own:
                yield name


def classes_of_others() -> Iterator[type]:
    """The package's classes that inherit from another library's."""
    known: set[str] = set()
    for _ in range(4):  # as deep as classes inherit from each other
        for tree in TREES.values():
            foreign = set(imported(tree)) | known
            for node in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
                if any(re.split(r"[.\[]", ast.unparse(base))[0] in foreign for base in node.bases):
                    known.add(node.name)
    for path, tree in TREES.items():
        if any(isinstance(node, ast.ClassDef) and node.name in known for node in tree.body):
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
            yield from (x for x in vars(module).values() if inspect.isclass(x) and x.__module__ == module.__name__)


def of_self(kind: type) -> set[str]:
    """Private names that a class defines, or that its methods read or set on `self`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError):  # a class without a source, as of an extension
        return set(filter(private, vars(kind)))
    nodes = list(ast.walk(tree))
    names = [n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"]
    names += [n.name for n in nodes if isinstance(n, ast.FunctionDef)]
    names += [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return set(filter(private, names))


def inherited() -> Iterator[str]:
    """Private names of other libraries' classes that classes of the package override, read or set."""
    for kind in classes_of_others():
        for base in kind.__mro__[1:]:
            if base.__module__.split(".")[0] not in ("podium", *sys.stdlib_module_names):
                yield from of_self(kind) & of_self(base)


@pytest.mark.slow
def test_all_that_are_used_are_listed() -> None:
    own = defined_here()
    used = {name for tree in TREES.values() for name in written(tree, own)} | set(inherited())
    assert used == {name for _, name in listed()}


@pytest.mark.versions
@pytest.mark.parametrize(("where", "name"), sorted(listed()))
def test_they_are_there(where: str, name: str) -> None:
    pytest.importorskip(where.split(".")[0])
    owner: Any = resolve(where)
    assert hasattr(owner, name) or name in inspect.getsource(owner), "an attribute that a method sets"


def resolve(where: str) -> Any:
    """The module or class of that name."""
    try:
        return importlib.import_module(where)
    except ImportError:
        owner, _, name = where.rpartition(".")
        return getattr(resolve(owner), name)
