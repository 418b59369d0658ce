from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
# Several tests run at a time: their pipelines would all keep to the same cores.
os.environ.setdefault("LAYLINE_PP_BIND", "0")
