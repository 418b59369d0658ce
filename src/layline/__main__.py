"""``python -m layline``: the same as the ``layline`` command, for torchrun and for workers."""

from __future__ import annotations

import sys

from layline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
