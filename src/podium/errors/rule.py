"""Rules: what is wrong with a run, each written once as a row of a table, and the one function that applies them.

`GRPOConfig` applies those that need settings alone, before anything is built; the reader of recipes adds the line;
`podium check` applies all; the trainer raises the errors among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from podium.errors import ConfigError, Finding, PodiumError, Severity
from podium.errors.texts import as_lines, plain


class Settings(dict[str, Any]):
    """Values of settings by name; each is an attribute as well.

    >>> settings = Settings(temperature=0.5)
    >>> settings.temperature, settings["temperature"]
    (0.5, 0.5)
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a run. A fact that is not known yet is None, and rules that need it are skipped.

    A check knows more of them: `podium.checks.setup.Setup`.
    """

    settings: Any = None
    """`Settings`, or a `GRPOConfig`."""
    machine: Any = None
    """`podium.trainer.machine.Machine`: the device and the processes."""
    adapter: bool | None = None
    """Whether an adapter is trained."""
    evaluates: bool | None = None
    """Whether there are rows to evaluate on."""
    stream: str | None = None
    """The rows that are a stream: `train` or `evaluation`."""
    written: Mapping[str, Any] | None = None
    """The keys of a recipe whose values could be read."""
    data: Any = None
    """`podium.data.rows.DataSpec`: where the rows come from."""
    rewards: Any = None
    """The reward functions: a recipe's `RewardSpec`s, or a check's `Reward`s."""


Cure = str | Mapping[str, Any] | tuple[str, Mapping[str, Any]]
"""The cure of a finding: words to type, settings to change, or a pair of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule. Its functions are called with the facts that it `needs` and `wants`, in their order."""

    code: str = ""
    """Empty: what `when` returns has its own."""
    needs: tuple[str, ...] = ("settings",)
    """Names of facts. Where one of them is None, the rule is skipped."""
    wants: tuple[str, ...] = ()
    """Names of further facts, which may be None."""
    when: Callable[..., Any]
    """Whether it is broken. A mapping has further facts, which `says`, `cure` and `about` get by name; an error or a
    finding is itself what there is to say; a list or an iterator of them is one finding for each."""
    says: Callable[..., str] | str | None = None
    """The sentence with the evidence; of a text, with the further facts in braces. None: `when` gives errors or
    findings."""
    why: Callable[..., str] | str = ""
    cure: Callable[..., Cure] | Cure = ""
    about: Callable[..., tuple[str, ...]] | tuple[str, ...] = ()
    """The settings that it is about, the first of them its cause; a tuple is also of errors that name none."""
    severity: Severity = "error"


def broken(rule: Rule, facts: Facts) -> Iterator[Finding]:
    """The findings of one rule.

    >>> rule = Rule(
    ...     code="C030",
    ...     when=lambda settings: settings.sync_ref_model and not settings.beta,
    ...     says=lambda settings: f"beta is {settings.beta:g}, so there is no reference to move.",
    ...     cure={"beta": 0.04},
    ... )
    >>> [each.what for each in broken(rule, Facts(settings=Settings(sync_ref_model=True, beta=0.0)))]
    ['beta is 0, so there is no reference to move.']
    >>> list(broken(rule, Facts()))
    []
    """
    parts = [getattr(facts, name) for name in rule.needs]
    if any(part is None for part in parts):
        return
    parts += [getattr(facts, name) for name in rule.wants]
    found = rule.when(*parts)
    for item in found if isinstance(found, (list, Iterator)) else [found]:
        if isinstance(item, Finding):
            yield item
        elif isinstance(item, PodiumError):
            yield of_error(item, rule)
        elif item:
            yield _made(rule, parts, item)


def _made(rule: Rule, parts: list[Any], found: Any) -> Finding:
    """The finding of a broken rule, in its own words."""
    assert rule.says is not None
    named = dict(found) if isinstance(found, Mapping) else {}
    cure = rule.cure(*parts, **named) if callable(rule.cure) else rule.cure
    changes: Mapping[str, Any] = {}
    if isinstance(cure, tuple):
        fix, changes = cure
    elif isinstance(cure, str):
        fix = cure
    else:
        fix = as_lines(cure)
        changes = cure
    return Finding(
        code=rule.code,
        severity=rule.severity,
        what=rule.says.format(**named) if isinstance(rule.says, str) else rule.says(*parts, **named),
        why=rule.why(*parts, **named) if callable(rule.why) else rule.why,
        fix=fix,
        changes=dict(changes),
        settings=rule.about(*parts, **named) if callable(rule.about) else rule.about,
        facts={name: plain(value) for name, value in named.items()},
    )


def of_error(error: PodiumError, rule: Rule | None = None) -> Finding:
    """The finding that an error is: of a rule, or raised."""
    about = rule.about if rule and isinstance(rule.about, tuple) else ()
    return Finding(
        code=error.code or (rule.code if rule else ""),
        severity=rule.severity if rule else "error",
        what=error.what,
        why=rule.why if rule and isinstance(rule.why, str) else "",
        fix=error.fix,
        changes=error.changes,
        settings=error.settings or about,
        facts={name: plain(value) for name, value in error.facts.items()},
    )


def findings(rules: Iterable[Rule], facts: Facts) -> Iterator[Finding]:
    """The findings of rules, in the order of the table."""
    for rule in rules:
        yield from broken(rule, facts)


def raised(check: Callable[..., object], *args: Any, **kwargs: Any) -> PodiumError | None:
    """The error that a call raises, or None."""
    try:
        check(*args, **kwargs)
    except PodiumError as error:
        return error
    return None


def error_of(finding: Finding, kind: type[PodiumError] = ConfigError) -> PodiumError:
    """The error that raises a finding."""
    return kind(
        finding.what,
        code=finding.code,
        fix=finding.fix,
        changes=finding.changes,
        settings=finding.settings,
        **finding.facts,
    )
