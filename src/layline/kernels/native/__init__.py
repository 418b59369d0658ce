"""Products with packed matrices in C: the sources, their compilation, and the weights on top.

``packed.h`` describes the layout; ``matmul.c`` divides the work; ``avx512.c`` and ``avx2.c`` hold
the same vector code for two instruction sets; ``pack.c`` fills tiles.
"""
