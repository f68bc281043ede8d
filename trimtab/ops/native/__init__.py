"""Shared by all C++ kernels: the Python module, the instruction sets, threads, and a table that Python reads too."""
