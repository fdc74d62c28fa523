"""Functions whose options are typed once: the error for an unknown one names the closest, and signatures list all."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ForwardRef, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def takes_options(kind: type, defaults: Mapping[str, object]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function whose keywords are those of a `TypedDict`, `kind`: it takes `**options: Unpack[kind]`.

    A keyword that neither the function nor `kind` has raises a `TypeError` that names the closest one. What `help` and
    notebooks show as the signature lists the options, with their `defaults`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = _listed(inspect.signature(function), kind, defaults)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in signature.parameters:
                    raise TypeError(_unknown(function.__name__, name, signature))
            return function(*args, **kwargs)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked

    return decorate


def _listed(signature: inspect.Signature, kind: type, defaults: Mapping[str, object]) -> inspect.Signature:
    """The signature with the options of `kind` in place of `**options`."""
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=_written(annotation))
        for name, annotation in kind.__annotations__.items()
    ]
    return signature.replace(parameters=[*own, *options])


def _written(annotation: Any) -> Any:
    """The source text of an annotation that was not evaluated (a `ForwardRef`); any other annotation itself."""
    return annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else annotation


def _unknown(function: str, name: str, signature: inspect.Signature) -> str:
    closest = difflib.get_close_matches(name, signature.parameters, n=1)
    if closest:
        return f"{function}() takes no option {name!r}; did you mean {closest[0]!r}?"
    return f"{function}() takes no option {name!r}; it takes {', '.join(signature.parameters)}"
