"""Values of keys: converting them to a declared type, and checking functions."""

from __future__ import annotations

import ast
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

from hvdtrain.config.keys import Key, Rule
from hvdtrain.errors import ProblemRule


class Mismatch(Exception):
    """A value does not have the key's type, or violates its rule. The message says what was expected.

    Attributes:
        rule: the rule that it violates, as in a `Problem`.
        got: the value and its place, for the message; empty: the value as it is.
    """

    def __init__(self, expected: str, rule: ProblemRule = "wrong-type", got: str = "") -> None:
        super().__init__(expected)
        self.rule = rule
        self.got = got


def convert(value: Any, declared_key: Key) -> Any:
    """Convert `value` to the key's type. Raises: Mismatch."""
    try:
        result = _convert_to(value, declared_key.type)
    except Mismatch as mismatch:
        if declared_key.rule is None or not declared_key.rule.is_choice:
            raise
        raise Mismatch(declared_key.rule.words, declared_key.rule.broken_by(value)) from mismatch
    if declared_key.rule is not None and result is not None and not _holds(declared_key.rule, result):
        raise Mismatch(declared_key.rule.words, declared_key.rule.broken_by(result))
    if declared_key.signature and callable(result) and (wrong := signature_error(result, declared_key.signature)):
        raise Mismatch(f"def {declared_key.name}({declared_key.signature})", "wrong-signature", wrong)
    return result


def may_take(function: Callable[..., Any], name: str) -> bool:
    """Whether a function of the config reads the argument `name`: one that has `**_` in place of it does not."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    others = [one.name for one in parameters.values() if one.kind is one.VAR_KEYWORD]
    return name in parameters or others not in ([], ["_"])


def signature_error(function: Callable[..., Any], signature: str) -> str:
    """Why a function cannot be called with the parameters of a signature, with its name and place; empty if it can.

    Args:
        signature: such as "*, model, extern_data, **_": called with these by name; without the star, by position.

    >>> signature_error(lambda model, **_: None, "*, model, **_"), signature_error(lambda rate: rate, "learning_rate")
    ('', '')
    """
    names = [name for name in signature.split(", ") if not name.startswith("*")]
    try:
        # What a decorator returns is called, so its parameters count, not those of the function inside.
        actual = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return ""  # written in C
    try:
        actual.bind(**dict.fromkeys(names)) if signature.startswith("*") else actual.bind(*names)
    except TypeError as error:
        code = getattr(inspect.unwrap(function), "__code__", None)
        line_text = "" if code is None else f" in {code.co_filename}, line {code.co_firstlineno}"
        return f"{getattr(function, '__name__', type(function).__name__)}{actual}{line_text} ({error})"
    return ""


def text_value(text: str, expected: Any = Any) -> Any:
    """Parse a value from the command line: a Python literal, `true`, `false`, `none`, or text. For a str key, the text itself.

    >>> text_value("0.5"), text_value("true"), text_value("2G"), text_value("3", str)
    (0.5, True, '2G', '3')
    """
    if expected is str:
        return text
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def words_of(expected: Any) -> str:
    """A type in words.

    >>> words_of(int | None), words_of(list[str]), words_of(Literal["grad", "param"])
    ('an integer or None', 'a list of strings', "'grad' or 'param'")
    """
    if get_origin(expected) is Literal:
        return " or ".join(repr(choice) for choice in get_args(expected))
    if get_origin(expected) in (Union, types.UnionType):
        return " or ".join(words_of(member) for member in get_args(expected))
    plain = {
        int: "an integer",
        float: "a number",
        bool: "True or False",
        str: "a string",
        dict: "a dict",
        list: "a list",
        tuple: "a tuple",
        type(None): "None",
        Any: "anything",
        Callable: "a function",
        typing.get_origin(Callable[..., Any]): "a function",
    }
    origin = get_origin(expected) or expected
    words = plain.get(origin, getattr(origin, "__name__", str(origin)))
    members = {int: "integers", float: "numbers", str: "strings"}
    if origin in (list, dict) and get_args(expected) and get_args(expected)[-1] in members:
        words = f"{words} of {members[get_args(expected)[-1]]}"
    return words


def _holds(rule: Rule, value: Any) -> bool:
    """Whether the rule holds. A rule about numbers accepts the other members of a union type (a callable, a dict)."""
    try:
        return bool(rule.holds(value))
    except TypeError:
        return True


BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
"""The spellings of a bool in a string, in lower case."""


FUNCTION = get_origin(Callable[..., Any])

INTEGERS_END = 2**63
"""All integers are below this, and above its negative: numpy, PyTorch and files have int64."""

FLOATS_END = 3.4e38
"""All finite numbers are up to this: models are float32."""


def _convert_to(value: Any, expected: Any) -> Any:
    origin = get_origin(expected) or expected
    if expected is Any:
        return value
    if origin is Literal:
        return _choice(value, expected)
    if origin in (Union, types.UnionType):
        return _union_member(value, expected)
    if getattr(getattr(value, "dtype", None), "kind", "") == "b" and value.ndim == 0:  # numpy's bool
        value = bool(value)
    if origin in (bool, int, float):
        return _number(value, origin)
    if origin in (list, dict):
        return _container(value, expected, origin)
    if origin in (Callable, FUNCTION):
        is_right = callable(value) and not isinstance(value, types.ModuleType)
    else:
        is_right = isinstance(origin, type) and isinstance(value, origin)
    if not is_right:
        raise Mismatch(words_of(expected))
    return value


def _choice(value: Any, expected: Any) -> Any:
    """The choice of a Literal that equals the value; True does not stand for 1."""
    for choice in get_args(expected):
        if value == choice and isinstance(value, bool) == isinstance(choice, bool):
            return choice
    raise Mismatch(words_of(expected), "unknown-value")


def _union_member(value: Any, expected: Any) -> Any:
    """A value of one of a union's types: unchanged if its type is among them ("3" stays a string), else the first that fits."""
    members = get_args(expected)
    same = [member for member in members if type(value) is member]
    too_large = None
    for member in same or members:
        try:
            return _convert_to(value, member)
        except Mismatch as mismatch:
            too_large = mismatch if mismatch.rule == "out-of-range" else too_large
    raise too_large or Mismatch(words_of(expected))


def _number(value: Any, kind: type) -> bool | int | float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)  # including numpy's numbers
    if kind is bool and (isinstance(value, bool) or (is_number and value in (0, 1))):
        return bool(value)
    if kind is bool and isinstance(value, str) and value.lower() in BOOLEANS:
        return BOOLEANS[value.lower()]
    if kind is int and is_number and (isinstance(value, numbers.Integral) or float(value).is_integer()):
        if abs(value) >= INTEGERS_END:
            raise Mismatch("an integer below 2**63", "out-of-range")
        return int(value)
    if kind is float and is_number:
        if FLOATS_END < abs(value) < math.inf:
            raise Mismatch(f"a number up to {FLOATS_END:.2g}", "out-of-range")
        return float(value)
    raise Mismatch(words_of(kind))


def _container(value: Any, expected: Any, kind: type) -> Any:
    if kind is list and getattr(value, "ndim", 0) == 1 and hasattr(value, "tolist"):  # an array or a tensor
        value = value.tolist()
    if kind is list and isinstance(value, (list, tuple)):
        member = (*get_args(expected), Any)[0]
        return [_convert_to(item, member) for item in value]
    if kind is dict and isinstance(value, dict):
        if not get_args(expected):
            return value
        name, member = get_args(expected)
        return {_convert_to(key, name): _convert_to(item, member) for key, item in value.items()}
    raise Mismatch(words_of(expected))
