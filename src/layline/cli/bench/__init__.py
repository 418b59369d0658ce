"""``layline bench``: measurements, each beside other engines in one interleaved run."""
