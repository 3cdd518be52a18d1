"""Warnings that name the user's line, not one of the framework's that calls us."""

from __future__ import annotations

import sys
import warnings


def warn(message: str, *frameworks: str, category: type[Warning] = UserWarning) -> None:
    """At the nearest line outside of gatedelta, torch and these packages; Python's own skip_file_prefixes is of 3.12.
    Where there is none, at the outermost one."""
    passed = {__name__.partition(".")[0], "torch", *frameworks}
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in passed:
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "")
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)
