"""Kernels: SGMV and paged attention, each with a plain torch ``reference`` that is the CPU path and the tests' oracle.

Knows nothing of ``punica_batch``.
"""
