"""Where things lie in the checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "weights" / "demo"
DATA = ROOT.parent / "shared" / "data"  # too large for the repository: tests that want it are skipped without it
