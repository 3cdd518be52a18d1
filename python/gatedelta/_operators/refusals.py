"""Which exception a refused call raises. What the caller got wrong is a ValueError or a TypeError, what this build or
device cannot serve an UnsupportedError (a NotImplementedError), and a failure a RuntimeError.

torch's stable ABI makes a RuntimeError of every exception of an operator, so its text says which it is
(bindings/torch/tensor.hpp). Compiled graphs call operators without ``raising``: there all stay RuntimeErrors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from .. import _lib

_REFUSED = "gatedelta: "
_UNSUPPORTED = "gatedelta: unsupported: "
_NO_SUCH_TYPE = "gatedelta::"  # torch's own texts about an argument that is not of the schema's type


def raising(operator: Callable) -> Callable:
    """The operator, with exceptions that tell a caller's mistake from a failure."""

    @functools.wraps(operator, updated=())
    def call(*args, **kwargs):
        try:
            return operator(*args, **kwargs)
        except RuntimeError as error:
            kind = _kind(str(error))
            if kind is None:
                raise
            raise kind(*error.args) from None

    return call


def _kind(text: str) -> type[Exception] | None:
    if text.startswith(_UNSUPPORTED):
        return _lib.UnsupportedError
    if text.startswith(_REFUSED):
        return ValueError
    return TypeError if text.startswith(_NO_SUCH_TYPE) else None


def check(status: int) -> None:
    """Raises what a status other than GD_OK means, in the operators' words."""
    try:
        _lib.check(status)
    except _lib.UnsupportedError as error:
        raise _lib.UnsupportedError(_UNSUPPORTED + str(error)) from None
    except ValueError as error:
        raise ValueError(_REFUSED + str(error)) from None
    except RuntimeError as error:
        raise RuntimeError(f"gatedelta failed: {error}") from None
