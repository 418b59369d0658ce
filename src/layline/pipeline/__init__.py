"""Cuts between pipeline stages: streams, slots, transports and who waits for whom."""
