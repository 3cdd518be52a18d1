"""The tables that bench.report.render writes, a module per subject."""
