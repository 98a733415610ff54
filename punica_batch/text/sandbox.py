"""The jinja2 environment that chat templates run in: immutable, without files or Python's internals, bounded in size.

Conventions are those that templates on the Hugging Face hub are written against: ``trim_blocks``, ``lstrip_blocks``,
loop controls, ``raise_exception``, ``strftime_now``, ``tojson`` without HTML escapes, and the ``generation`` block.

jinja2's sandbox keeps a template from reaching Python; it does not keep one from asking for 10**9 characters. What can
make much from little in one step (operators, padding, formatting, joining) is therefore checked before it is done.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_CHARS = 4 << 20  # of any string that a template makes, its output included
_MAX_WIDTH = 100_000  # of any number that asks for so many characters or items
_MAX_BITS = 4096  # of any integer
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +*.\d]*\d{6}")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(?:\d{6}|\{)")  # or a width that is itself an argument
_WIDTH_FILTERS = (
    "center", "indent", "batch", "slice", "round", "truncate", "wordwrap", "format", "tojson", "join", "replace",
)  # fmt: skip


class RaisedByTemplate(TemplateError):
    """The template called ``raise_exception``."""


def _refuse() -> None:
    raise SecurityError(f"the template asks for more than {MAX_CHARS} characters")


def _check_call(name: str, owner: Any, args: tuple[Any, ...]) -> None:
    """Refuse a string operation ``owner.name(*args)`` whose result could be huge."""
    if any(isinstance(arg, int) and abs(arg) > _MAX_WIDTH for arg in args):
        _refuse()
    if name == "replace" and len(args) >= 2:
        old, new = (str(arg) for arg in args[:2])
        count = owner.count(old) if isinstance(owner, str) else len(str(owner)) + 1
        if count * len(new) > MAX_CHARS:
            _refuse()


def _check_percent(pattern: Any, values: tuple[Any, ...]) -> None:
    """Refuse ``pattern % values`` with a huge width, written in the pattern or given for a ``*``."""
    text = str(pattern)
    if _WIDE_PERCENT.search(text) or ("*" in text and any(isinstance(v, int) and abs(v) > _MAX_WIDTH for v in values)):
        _refuse()


def _joined(items: Any, separator: Any) -> list[Any]:
    """``items`` as a list, when joining it keeps within the bound."""
    total, out = 0, []
    for item in items:
        out.append(item)
        total += len(str(item)) + len(str(separator))
        if total > MAX_CHARS:
            _refuse()
    return out


def _guard_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with its arguments checked; ``wraps`` carries over the marks by which jinja2 passes its own ones."""
    own = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        value, rest = args[own], (*args[own + 1 :], *kwargs.values())
        if name == "format":
            _check_percent(value, rest)
        else:
            _check_call(name, value, rest)
        if name == "join":
            value = _joined(value, kwargs.get("d", rest[0] if rest else ""))
        return function(*args[:own], value, *args[own + 1 :], **kwargs)

    return guarded


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}`` marks what a model wrote, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return str(caller())


class _BoundedConcat(NodeTransformer):
    """Rewrites ``a ~ b``, which jinja2 compiles to a plain join, into a filter that can refuse."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        empty = nodes.Const("", lineno=node.lineno)
        return nodes.Filter(parts, "join", [empty], [], None, None, lineno=node.lineno)


class _SafeNamespace(Namespace):
    """jinja2's ``namespace`` without underscore names, which could stand in for Python's own attributes."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # like jinja2's: any keyword may be an attribute's name
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError("a namespace cannot hold a name that begins with an underscore")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | str | None = None, separators: Any = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise RaisedByTemplate(message)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """``now`` is what ``strftime_now`` shows, fixed so that all rows of a job see one date."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: datetime) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension])
        self.filters["tojson"] = _to_json
        for name in _WIDTH_FILTERS:
            self.filters[name] = _guard_filter(name, self.filters[name])
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": now.strftime,
            "namespace": _SafeNamespace,
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _BoundedConcat().visit(tree)  # type: ignore[no-any-return]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(1, right if operator == "**" else 1) + right.bit_length()
            if operator in ("*", "**") and bits > _MAX_BITS:
                _refuse()
        elif operator == "+":
            if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
                self._check_size(len(left) + len(right))
        elif operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, (str, bytes, list, tuple)) and isinstance(times, int):
                    self._check_size(len(items) * max(0, times))
        elif operator == "%" and isinstance(left, (str, bytes)):
            _check_percent(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def _check_size(size: int) -> None:
        if size > MAX_CHARS:
            _refuse()

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapper = super().wrap_str_format(value)
        if wrapper is None:
            return None
        pattern: str = value.__self__

        def bounded(*args: Any, **kwargs: Any) -> str:
            if _WIDE_BRACES.search(pattern):
                _refuse()
            return wrapper(*args, **kwargs)

        return bounded

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if type(owner) in (str, bytes, int):
            name = __obj.__name__
            if name == "join" and args:
                args = (_joined(args[0], owner), *args[1:])
            else:
                _check_call(name, owner, args)
        return super().call(__context, __obj, *args, **kwargs)
