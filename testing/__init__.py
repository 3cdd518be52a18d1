"""What tests and benchmarks compare with: C++ sources, and their Python face in truth.py."""
