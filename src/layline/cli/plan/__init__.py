"""``layline plan``: what crosses each boundary of a model, before, without or beside a run."""
