"""The benchmarks, to be run from the repository's root as `python -m bench...`: README.md lists them."""

from tools import dev_paths  # noqa: F401  (finds the package gatedelta for all of them, as for the tests)
