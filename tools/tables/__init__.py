"""The tables that render_results.py writes, a module per subject."""

import sys

from repo_files import ROOT

sys.path.insert(0, str(ROOT / "bench"))  # what the benchmarks share: rows, ratios
