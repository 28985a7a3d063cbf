"""Declaring config keys: each once, as a field of a frozen dataclass next to the code that it configures.

    @dataclass(frozen=True, kw_only=True)
    class ReduceKeys(Section):
        sync_steps: int = key(
            1,
            "average the parameters after every N updates",
            positive,
            names=("horovod_param_sync_step", "torch_distributed.param_sync_step"),
        )

`names` are the spellings in a config, if they differ from the field's name: keys, or entries of dicts. The last one given wins.
The field's annotation is the key's type. `convert` (convert.py) checks a value against it; `text_value` parses one
from the command line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar, get_type_hints

from hvdtrain.errors import Problem, ProblemRule

S = TypeVar("S")

REQUIRED: Any = dataclasses.MISSING
"""The default of a key that every config must set."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A condition on values of the right type, in words and as a function.

    Attributes:
        is_choice: the words list all values, so messages need not name the type.
    """

    words: str
    holds: Callable[[Any], bool]
    is_choice: bool = False

    def broken_by(self, value: Any) -> ProblemRule:
        """The kind of problem of a value that breaks the rule."""
        if self.is_choice:
            return "unknown-value"
        return "wrong-format" if isinstance(value, str) else "out-of-range"


positive = Rule("a positive number", lambda value: value > 0)
not_negative = Rule("zero or a positive number", lambda value: value >= 0)
share = Rule("a number between 0 and 1", lambda value: 0 <= value <= 1)


def one_of(names: Iterable[str]) -> Rule:
    """The rule of a string that names an entry of a table.

    >>> one_of({"grad": 1, "param": 2}).words
    "'grad' or 'param'"
    """
    key_names = tuple(names)
    return Rule(" or ".join(map(repr, key_names)), lambda value: value in key_names, is_choice=True)


def parsed_by(parse: Callable[[Any], Any]) -> Callable[[Any], bool]:
    """A condition for a `Rule`: `parse` accepts the value, that is, raises nothing of the kind."""

    def holds(value: Any) -> bool:
        try:
            parse(value)
        except (ValueError, TypeError, AttributeError):
            return False
        return True

    return holds


@dataclasses.dataclass(frozen=True)
class Key:
    """A declared key, as `--help`, `docs/keys.md` and the checks need it.

    Attributes:
        name: the first of its spellings in a config; the documentation lists the key under it.
        field: its attribute in the section.
        names: all spellings; an entry of a dict is spelled with a dot.
        needs: the frameworks (values of `backend`) that support the key; empty: all.
        instead: what to do with another framework; of a key that all support, with a value of another type.
        signature: the parameters of a function that is the key's value, as in its `def`.
    """

    name: str
    type: Any
    default: Any
    doc: str
    rule: Rule | None
    section: str
    field: str
    names: tuple[str, ...]
    needs: tuple[str, ...] = ()
    instead: str = ""
    signature: str = ""

    @property
    def required(self) -> bool:
        return self.default is REQUIRED


def key(
    default: Any,
    doc: str,
    rule: Rule | None = None,
    *,
    names: tuple[str, ...] = (),
    needs: str | tuple[str, ...] = (),
    instead: str = "",
    signature: str = "",
) -> Any:
    """Declare a key as a dataclass field, with its default (or REQUIRED), one line of documentation and optionally a rule.

    Args:
        names: its spellings in a config, the one that wins last; empty: the field's name.
        needs: the framework or frameworks that support the key; with any other, it must keep its default.
        instead: as of `Key`, for the error message.
        signature: the parameters of a function that may be the value, such as "*, epoch, **_"; hvdtrain calls it with these. It
            replaces "{signature}" in the documentation.
    """
    needed = (needs,) if isinstance(needs, str) else needs
    metadata = {
        "names": names,
        "doc": doc.replace("{signature}", f"({signature})"),
        "rule": rule,
        "needs": needed,
        "instead": instead,
        "signature": signature,
    }
    if isinstance(default, (dict, list)):
        copied = default
        return dataclasses.field(default_factory=lambda: type(copied)(copied), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declared_keys(section: type) -> tuple[Key, ...]:
    """The keys that a section class declares, in the order of declaration."""
    return _declared_keys(section)  # which callers cannot call themselves: to mypy, a class of sections is not hashable


@cache  # evaluating annotations is slow
def _declared_keys(section: type) -> tuple[Key, ...]:
    hints = get_type_hints(section)
    keys = []
    for field in dataclasses.fields(section):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        names = field.metadata["names"] or (field.name,)
        options = {**field.metadata, "names": names, "field": field.name}
        keys.append(Key(names[0], hints[field.name], default, section=section.__name__, **options))
    return tuple(keys)


def spellings(declared_key: Key, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a config gives a key, by spelling; the last one wins. None as an entry of a dict counts as not given."""
    spelled: dict[str, Any] = {}
    for name in declared_key.names:
        outer, dot, entry = name.partition(".")
        inside = values.get(outer)
        if dot and isinstance(inside, dict) and inside.get(entry) is not None:
            spelled[name] = inside[entry]
        elif not dot and name in values:
            spelled[name] = values[name]
    return spelled


class Sections:
    """The valid sections of a config, by class.

    Args:
        values: of the config, from which the spelling of its keys is taken.
    """

    def __init__(self, built: Mapping[type, Any], values: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._built = built
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        """The valid sections."""
        return (section for section in self._built.values() if section is not None)

    def get(self, kind: type[S]) -> S | None:
        """The section; None if it does not exist, or if one of its keys is invalid, which is already reported."""
        section: S | None = self._built.get(kind)
        return section

    def spelling(self, kind: type, field: str) -> str:
        """The name under which the config sets a section's key, for messages; the first spelling if it does not set the key."""
        [wanted] = [declared_key for declared_key in declared_keys(kind) if declared_key.field == field]
        return [wanted.name, *spellings(wanted, self._values)][-1]


ALONE = Sections({})


class Section:
    """Base class of a group of keys.

    Attributes:
        changes_results: of a plug-in's section: whether another value of its keys changes the results of a training.
        varies: of a plug-in's section: whether its keys may have another value in an epoch.
        dicts: by key that is a dict, the class with its entries.
    """

    changes_results = False
    varies = False
    dicts: ClassVar[Mapping[str, type]] = {}

    @property
    def measures(self) -> Mapping[str, str | list[str] | None]:
        """By key, the score that it names, or several of which the first existing one is used; None: it names none."""
        return {}

    @property
    def compares_all_scores(self) -> str | None:
        """The key by which the best epochs by each score are chosen, also by scores that no key names; None: no key does."""
        return None

    def changes_with(self, num_epochs: int) -> bool:
        """Whether what its keys say is something else with another last epoch."""
        return False

    def resolved(self, sections: Sections) -> Self:
        """The section with values that follow from other sections."""
        return self

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        """Conflicts among the keys of this section, or with other sections; each ends up in a ConfigError."""
        return []

    def require_packages(self) -> None:
        """Check what a training, or a dry run of it, will import on rank 0, before data is opened. Raises: ConfigError."""
