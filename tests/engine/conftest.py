"""The tiny models of the adapter's tests serve here too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "integrations"))
