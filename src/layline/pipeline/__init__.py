"""Lines between pipeline stages: where a model is cut, what crosses, in which order it runs.

What decides (fence, doors, placement, cuts, estimate, schedule, counters, guards) imports no torch.
"""
