"""Where things lie in the checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "weights" / "demo"
