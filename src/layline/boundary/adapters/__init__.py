"""Inputs and outputs of stages that are not a plain prepare and finish."""
