"""Gates: a pipeline against one stage, bit by bit, with counters that must move and canaries."""
