"""Checkpoint readers: safetensors directories, GGUF files, random weights; and ``pull``.

Importing this package or its ``checkpoint``, ``cache`` and ``pull`` modules does not import torch.
"""
