"""What to say where a package is missing that one of the extras in pyproject.toml installs."""

from __future__ import annotations

from typing import NoReturn

_EXTRAS = ("torch", "numpy")  # each named like its package


def explain(error: ModuleNotFoundError) -> NoReturn:
    """Raises the error again, with how to install the package where an extra does that."""
    if error.name not in _EXTRAS:
        raise error
    raise ModuleNotFoundError(
        f"this part of gatedelta needs {error.name}, which is not installed: gatedelta[{error.name}] brings it (pip "
        f"install '.[{error.name}]' in a clone of the repository), or pip install {error.name}",
        name=error.name,
    ) from error
